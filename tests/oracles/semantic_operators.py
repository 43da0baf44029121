"""Runs one semantic operator through its lowering, on stock ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.graph import BURNISH_DOMAIN, Builder
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from burnish.targets import TARGETS, check_allowed
from oracles.rewritten import rewritten


def run_semantic_operator(
    op_type: str,
    inputs: Sequence[np.ndarray],
    like: int,
    batched: Sequence[int] = (),
    threads: int = 1,
    runs: int = 1,
    **attributes: Any,
) -> list[np.ndarray]:
    """Return the first output of every run.

    Args:
        inputs: what is fed, in the order of the operator's inputs.
        like: the input whose dtype and shape the output has.
        batched: inputs whose leading axis is symbolic in the graph.
        threads: how many threads ONNX Runtime may use within an operator.
        runs: how often the same session runs.
    """
    graph = ir.Graph([], [], nodes=[], name="semantic", opset_imports={"": 18, BURNISH_DOMAIN: 1})
    builder = Builder(graph)
    for index, array in enumerate(inputs):
        shape = ["batch" if index in batched and axis == 0 else size for axis, size in enumerate(array.shape)]
        graph.inputs.append(
            ir.Value(name=f"input{index}", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)))
        )
    tensors = [builder.tensor(value) for value in graph.inputs]
    result = builder.op(op_type, *tensors, domain=BURNISH_DOMAIN, like=tensors[like], **attributes)
    graph.outputs.append(result.value)
    model = rewritten(lower_semantic_operators, ir.Model(graph, ir_version=10))
    check_allowed(model, TARGETS["onnxruntime"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {f"input{index}": array for index, array in enumerate(inputs)}
    return [np.asarray(session.run(None, feeds)[0]) for _ in range(runs)]

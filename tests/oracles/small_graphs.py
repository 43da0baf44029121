"""Builds a small graph around functions that emit nodes, and runs it on stock ONNX Runtime or the standard's reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from burnish.graph import Builder, Tensor
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.rewritten import rewritten

Shape = Sequence[int | str | None] | None


class SmallGraph:
    """A graph under construction, fed with arrays of the dtypes given here.

    Args:
        inputs: name -> dtype and shape; a name is a symbolic dimension, and a shape of None leaves even the rank open.
        opset: version of the standard.
    """

    def __init__(self, inputs: Mapping[str, tuple[str, Shape]], opset: int = 18):
        self.graph = ir.Graph([], [], nodes=[], name="small", opset_imports={"": opset})
        self.builder = Builder(self.graph)
        self._names: list[str] = []
        self._model: onnx.ModelProto | None = None
        for name, (dtype, shape) in inputs.items():
            value = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype))))
            value.shape = None if shape is None else ir.Shape(shape)
            self.graph.inputs.append(value)

    def __getitem__(self, name: str) -> Tensor:
        return self.builder.tensor(next(value for value in self.graph.inputs if value.name == name))

    def output(self, name: str, tensor: Tensor) -> None:
        """Declare a tensor an output; an input, or one that is an output already, goes out as a copy."""
        value = self.builder.op("Identity", tensor).value
        value.name = name
        self.graph.outputs.append(value)
        self._names.append(name)
        self._model = None

    def operators(self, but: Sequence[str] = ("Constant", "Identity")) -> list[str]:
        """The operators in it, in order."""
        return [node.op_type for node in self.graph if node.op_type not in but]

    def model(self) -> onnx.ModelProto:
        """The graph with its semantic operators lowered, written once for the outputs that it has by then."""
        if self._model is None:
            self._model = ir.to_proto(rewritten(lower_semantic_operators, ir.Model(self.graph, ir_version=10)))
        return self._model

    def check(self) -> None:
        """Assert that the standard's checker accepts it, with consistent types and shapes."""
        onnx.checker.check_model(self.model(), full_check=True)

    def session(self, threads: int = 1) -> Session:
        return Session(self.model(), self._names, threads)

    def run(self, threads: int = 1, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        """Run once on ONNX Runtime; every output by name."""
        return self.session(threads)(**feeds)

    def run_reference(self, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        """Run once on the standard's reference evaluator."""
        results = ReferenceEvaluator(self.model()).run(None, {n: np.asarray(a) for n, a in feeds.items()})
        return dict(zip(self._names, map(np.asarray, results), strict=True))


class Session:
    """The graph loaded into ONNX Runtime, to run many times."""

    def __init__(self, model: onnx.ModelProto, names: Sequence[str], threads: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self._names = list(names)

    def __call__(self, **feeds: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(self._names, self._session.run(self._names, {n: np.asarray(a) for n, a in feeds.items()}), strict=True))

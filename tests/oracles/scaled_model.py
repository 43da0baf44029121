"""A model whose outputs are its inputs, each element times a weight: little enough to train by hand in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder

RATE = 2.0**-4  # exact in float32, which the rate is given in


def scaled_outputs(samples: Mapping[str, np.ndarray], squash: Any = None) -> ir.Model:
    """A model with one output ``<name>`` per sample array: ``in:<name> * w:<name>``, a weight for each element of a sample."""
    graph = ir.Graph([], [], nodes=[], name="scaled", opset_imports={"": 18})
    builder = Builder(graph)
    for name, array in samples.items():
        shape = ("batch", *array.shape[1:])
        value = ir.Value(name=f"in:{name}", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(shape))
        graph.inputs.append(value)
        start = np.random.default_rng(len(name)).uniform(0.8, 1.2, array.shape[1:] or (1,))
        weight = ir.Value(name=f"w:{name}", type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(start.shape))
        weight.const_value = ir.tensor(start, name=weight.name)
        graph.initializers.add(weight)
        output = builder.tensor(value) * builder.tensor(weight)
        if squash is not None:
            output = squash(output)
        output.value.name = name
        graph.outputs.append(output.value)
    return ir.Model(graph, ir_version=10)

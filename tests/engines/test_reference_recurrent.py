"""Recurrent layers in bodies on the reference engine: the standard's evaluator knows few activations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.engines.reference import ReferenceEngine
from burnish.graph import Builder, Tensor
from specs.control import if_

SHAPES = {"x": (4, 2, 3), "w": (1, 2, 3), "r": (1, 2, 2)}


def model(inside: bool) -> ir.Model:
    """An RNN of sequences of different lengths, in the graph or in both branches of an If."""
    inputs = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.DOUBLE), shape=ir.Shape(shape)) for name, shape in SHAPES.items()
    ]
    inputs.append(ir.Value(name="condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])))
    graph = ir.Graph(inputs, [], nodes=[], name="g", opset_imports={"": 21})
    builder = Builder(graph)

    def layer(emitter: Builder) -> list[Tensor]:
        operands = [emitter.tensor(value) for value in inputs[:3]]
        lengths = emitter.constant(np.array([4, 2], np.int32))
        return [emitter.op("RNN", *operands, None, lengths, outputs=2, hidden_size=2, activations=["Sigmoid"])[1]]

    last = builder.tensor(ir.Value(name="last", type=inputs[0].type, shape=ir.Shape([1, 2, 2])))
    result = if_(builder, builder.tensor(inputs[3]), layer, layer, [last]) if inside else layer(builder)[0]
    graph.outputs.append(result.value)
    return ir.Model(graph, ir_version=10)


def test_a_layer_in_a_branch_is_the_layer() -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()} | {"condition": np.array(True)}
    expected, actual = (next(iter(ReferenceEngine().run(model(inside), feeds).values())) for inside in (False, True))
    np.testing.assert_allclose(actual, expected, rtol=1e-15)

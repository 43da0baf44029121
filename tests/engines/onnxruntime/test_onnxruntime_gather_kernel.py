"""The kernel that adds where Gather read: the bits of standard operators, and what it leaves to them."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.errors import EngineError
from burnish.graph import Builder
from burnish.kernels.compiling import find_compiler
from burnish.operators.indexing import GATHER_GRAD
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.rewritten import rewritten

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

SHAPES = {
    # name: (shape of data, axis, shape of the indices)
    "rows of a table": ((11, 37), 0, (4, 9)),
    "wide rows that threads share": ((7, 96), 0, (50,)),
    "columns": ((5, 6), 1, (8,)),
    "an axis between others": ((3, 4, 5), -2, (2, 6)),
    "scalar indices": ((6, 5), 0, ()),
    "no indices": ((6, 5), 0, (0,)),
    "rows without elements": ((6, 0), 0, (3,)),
}


@cache
def engine() -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(kernels=True)


def model_of(data: tuple[int | None, ...], axis: int, read: tuple[int, ...], dtype=ir.DataType.FLOAT, constant=None) -> ir.Model:
    """The gradient of Gather as a graph of dy, the indices, and the data, whose shape alone is read."""
    axis %= len(data)
    shapes = {"dy": (*data[:axis], *read, *data[axis + 1 :]), "indices": read, "data": data}
    dtypes = {"dy": dtype, "indices": ir.DataType.INT64, "data": dtype}
    inputs = [ir.Value(name=name, type=ir.TensorType(dtypes[name]), shape=ir.Shape(shapes[name])) for name in shapes]
    graph = ir.Graph(inputs, [], nodes=[], name="g", opset_imports={"": 21, "burnish": 1})
    builder = Builder(graph)
    dy, indices, table = map(builder.tensor, inputs)
    result = GATHER_GRAD(dy, indices if constant is None else builder.constant(np.array(constant)), table, axis=axis)
    result.value.name = "d_data"
    graph.outputs.append(result.value)
    return ir.Model(graph, ir_version=10)


def with_kernels(model: ir.Model, threads: int) -> ir.Model:
    copy = model.clone()
    kernels.call_kernels(copy, threads)
    return copy


def operators_of(model: ir.Model) -> set[str]:
    return {node.op_type for node in model.graph}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_bits_are_those_of_standard_operators(name, threads):
    data, axis, read = SHAPES[name]
    model, random = model_of(data, axis, read), np.random.default_rng(len(name))
    shape = model.graph.inputs[0].shape
    extent = data[axis]
    feeds = {
        "dy": random.standard_normal(shape.numpy(), dtype=np.float32),
        "indices": random.integers(-extent, extent, read),  # some are counted from the end, and most stand there repeatedly
        "data": np.zeros(data, np.float32),
    }
    called = with_kernels(model, threads)
    assert "FusedGatherGrad" in operators_of(called)
    assert "ScatterElements" not in operators_of(called)
    standard = rewritten(lower_semantic_operators, model.clone())
    results = [engine().load(each, threads)(feeds)["d_data"] for each in (called, standard)]
    assert results[0].shape == data
    np.testing.assert_array_equal(results[0], results[1])


def test_an_index_beyond_the_axis_is_refused():
    model = with_kernels(model_of((6, 5), 0, (3,)), 1)
    feeds = {"dy": np.zeros((3, 5), np.float32), "indices": np.array([0, 6, 1]), "data": np.zeros((6, 5), np.float32)}
    with pytest.raises(EngineError, match="index 6 of an axis of 6"):
        engine().load(model, 1)(feeds)


@pytest.mark.parametrize(
    "model",
    [
        model_of((6, 5), 0, (3,), dtype=ir.DataType.DOUBLE),
        model_of((None, 5), 0, (3,)),
        model_of((6, 5), 0, (1,), constant=[2]),
    ],
    ids=("float64", "an extent that is not known", "one constant index, which is a matter of padding"),
)
def test_others_are_left_to_standard_operators(model):
    assert "FusedGatherGrad" not in operators_of(with_kernels(model, 1))

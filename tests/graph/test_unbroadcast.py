"""A cotangent summed back to its operand's shape, decided when the graph is built or when it runs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.graph import Builder, unbroadcast
from oracles.gradient_harness import Evaluator


def summed_back(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    padded = (1,) * (array.ndim - len(shape)) + shape
    axes = tuple(axis for axis, extent in enumerate(padded) if extent == 1)
    return array.sum(axis=axes, keepdims=True).reshape(shape)


def build(full: ir.Shape | None, operand: ir.Shape | None) -> tuple[ir.Model, ir.Value]:
    graph = ir.Graph([], [], nodes=[], name="unbroadcast", opset_imports={"": 18})
    builder = Builder(graph)
    double = ir.TensorType(ir.DataType.DOUBLE)
    values = [ir.Value(name=name, type=double, shape=shape) for name, shape in (("cotangent", full), ("operand", operand))]
    graph.inputs.extend(values)
    result = unbroadcast(*(builder.tensor(value) for value in values)).value
    graph.outputs.append(result if result not in values else builder.op("Identity", builder.tensor(result)).value)
    return ir.Model(graph, ir_version=10), result


@st.composite
def operand_and_full(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    full = tuple(draw(st.lists(st.integers(1, 3), max_size=4)))
    kept = full[draw(st.integers(0, len(full))) :]
    return tuple(1 if draw(st.booleans()) else extent for extent in kept), full


@settings(max_examples=60, deadline=None)
@given(operand_and_full(), st.sampled_from(["static", "named", "unranked"]))
def test_sums_over_the_repeated_axes(shapes: tuple[tuple[int, ...], tuple[int, ...]], knowledge: str) -> None:
    operand, full = shapes
    known: list[ir.Shape | None] = [ir.Shape(full), ir.Shape(operand)]
    if knowledge == "named":
        known = [
            ir.Shape([f"{name}{axis}" for axis in range(len(shape))]) for name, shape in (("full", full), ("operand", operand))
        ]
    elif knowledge == "unranked":
        known = [None, None]
    model, _ = build(*known)
    cotangent = np.random.default_rng(0).standard_normal(full)
    (result,) = Evaluator(model)({"cotangent": cotangent, "operand": np.zeros(operand)}).values()
    np.testing.assert_allclose(result, summed_back(cotangent, operand), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("full", "operand", "operators"),
    [
        (["n", 3], ["n", 3], []),
        ([2, 3], [2, 3], []),
        (["n", 3], [3], ["ReduceSum"]),
        (["n", 3, 4, 4], [1, 3, 1, 1], ["ReduceSum"]),
        (["n", 3, 4, 4], [3, 1, 1], ["ReduceSum", "Squeeze"]),
        (["n", 3], [], ["ReduceSum"]),
        (["n", 3], [1], ["ReduceSum", "Reshape"]),
        ([None, 3], [4, 3], []),
    ],
)
def test_known_shapes_need_no_work_at_run_time(full: list, operand: list, operators: list[str]) -> None:
    model, result = build(ir.Shape(full), ir.Shape(operand))
    emitted = [node.op_type for node in model.graph if node.op_type not in ("Constant", "Identity")]
    assert emitted == operators
    if operators:
        assert [dim if isinstance(dim, int) else dim.value for dim in result.shape.dims] == operand

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


def build(full: ir.Shape | None, operand: ir.Shape | None, dtype: ir.DataType = ir.DataType.DOUBLE) -> tuple[ir.Model, ir.Value]:
    graph = ir.Graph([], [], nodes=[], name="unbroadcast", opset_imports={"": 18})
    builder = Builder(graph)
    values = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=shape) for name, shape in (("cotangent", full), ("operand", operand))
    ]
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


LONG = [
    ([262144, 8], [8]),
    ([262144, 8], [1, 8]),
    ([512, 512, 8], [8]),
    ([512, 512, 8], [1, 1, 8]),
    ([16, 4096, 3, 2], [4096, 1, 2]),
    ([32768, "n"], ["n"]),
    ([65536, 4], []),
]


@pytest.mark.parametrize(("full", "operand"), LONG)
def test_long_leading_axes_keep_their_digits(full: list, operand: list) -> None:
    """All terms have one sign, so that the error of a float32 sum shows how many were added one after the other."""
    model, result = build(ir.Shape(full), ir.Shape(operand), ir.DataType.FLOAT)
    extents, target = ([5 if extent == "n" else extent for extent in shape] for shape in (full, operand))
    cotangent = np.random.default_rng(0).random(extents, dtype=np.float32)
    (actual,) = Evaluator(model)({"cotangent": cotangent, "operand": np.zeros(target, np.float32)}).values()
    expected = summed_back(cotangent.astype(np.float64), tuple(target))
    assert actual.shape == expected.shape
    assert np.abs(actual / expected - 1).max() <= 1e-6
    assert [dim if isinstance(dim, int) else dim.value for dim in result.shape.dims] == operand


@pytest.mark.parametrize(
    ("full", "operand", "operators"),
    [
        ([262144, 8], [8], ["Reshape", "ReduceSum", "ReduceSum"]),
        ([512, 512, 8], [1, 1, 8], ["Reshape", "ReduceSum", "ReduceSum"]),
        ([16384, 8], [8], ["ReduceSum"]),  # not longer than what is added up well
        ([16411, 8], [8], ["ReduceSum"]),  # a prime
        ([2 * 16411, 8], [8], ["ReduceSum"]),  # no factor near the root
        (["n", 262144, 8], [8], ["ReduceSum"]),
        ([262144, "n", "m"], ["n", "m"], ["ReduceSum"]),
        ([8, 262144], [8, 1], ["ReduceSum"]),
        ([262144, 0], [0], ["ReduceSum"]),
    ],
)
def test_only_long_leading_axes_are_summed_in_stages(full: list, operand: list, operators: list[str]) -> None:
    model, _ = build(ir.Shape(full), ir.Shape(operand))
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == operators

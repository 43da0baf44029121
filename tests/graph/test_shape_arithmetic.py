"""Arithmetic on shapes with names and unknown dimensions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.graph import broadcast_shapes, same_dimension, same_shape, static_shape


@st.composite
def broadcastable(draw) -> list[tuple[int, ...]]:
    full = draw(st.lists(st.integers(1, 4), max_size=4))
    shapes = []
    for _ in range(draw(st.integers(1, 3))):
        kept = full[draw(st.integers(0, len(full))) :]
        shapes.append(tuple(1 if draw(st.booleans()) else extent for extent in kept))
    return shapes


@given(broadcastable())
def test_broadcast_of_integers_is_numpy_broadcast(shapes: list[tuple[int, ...]]) -> None:
    result = broadcast_shapes(*(ir.Shape(shape) for shape in shapes))
    assert tuple(result.dims) == np.broadcast_shapes(*shapes)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (["n", 3], [3], ["n", 3]),
        (["n", 3], ["n", 1], ["n", 3]),
        (["n"], [4], [4]),
        ([4], ["n"], [4]),
        (["n"], [1], ["n"]),
        ([1], ["n"], ["n"]),
        (["n"], ["m"], [None]),
        ([None], [None], [None]),
        ([None], [3], [3]),
        ([None], [1], [None]),
        ([], ["n", 2], ["n", 2]),
    ],
)
def test_broadcast_of_names(left: list, right: list, expected: list) -> None:
    result = broadcast_shapes(ir.Shape(left), ir.Shape(right))
    assert [dim if isinstance(dim, int) else dim.value for dim in result.dims] == expected


def test_unknown_dimensions_equal_nothing_not_even_themselves() -> None:
    unknown = ir.SymbolicDim(None)
    assert not same_dimension(unknown, unknown)
    assert same_dimension(ir.SymbolicDim("n"), ir.SymbolicDim("n"))
    assert not same_dimension(ir.SymbolicDim("n"), ir.SymbolicDim("m"))
    assert not same_dimension(ir.SymbolicDim("n"), 3)
    assert same_dimension(3, 3)


def test_same_shape_needs_every_dimension_known_to_be_equal() -> None:
    assert same_shape(ir.Shape(["n", 3]), ir.Shape(["n", 3]))
    assert not same_shape(ir.Shape(["n", 3]), ir.Shape(["n", None]))
    assert not same_shape(ir.Shape([3]), ir.Shape([1, 3]))
    assert not same_shape(None, ir.Shape([3]))
    assert same_shape(ir.Shape([]), ir.Shape([]))


def test_static_shape() -> None:
    assert static_shape(ir.Value(name="x", shape=ir.Shape([2, 3]))) == (2, 3)
    assert static_shape(ir.Value(name="x", shape=ir.Shape([]))) == ()
    assert static_shape(ir.Value(name="x", shape=ir.Shape(["n", 3]))) is None
    assert static_shape(ir.Value(name="x")) is None

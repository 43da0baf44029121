"""Common parts of patterns for normalization layers: standard deviations and affine parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import (
    SIXTEEN_BIT,
    Builder,
    Tensor,
    attribute_value,
    constant_array,
    remove_unread_value,
    replace_node,
    same_dimension,
)
from burnish.graph.matching import Either, Match, Node, Number, Pattern
from burnish.graph.uses import remove_unread


def mean(operand: Pattern) -> Pattern:
    """Return the mean over trailing axes with keepdims; the number of axes is bound to ``axes``."""
    return Node("ReduceMean", operand, reads=_trailing_axes)


def square(operand: Pattern) -> Pattern:
    return Either(Node("Pow", operand, Number(2.0)), Node("Mul", operand, operand))


def standard_deviation(variance: Pattern) -> Pattern:
    """Return the square root of ``variance`` plus a constant bound to ``epsilon``."""
    stabilized = Node("Add", variance, Number(name="epsilon"))
    return Either(Node("Sqrt", stabilized), Node("Pow", stabilized, Number(0.5)))


def inverse_standard_deviation(variance: Pattern) -> Pattern:
    deviation = standard_deviation(variance)
    return Either(
        Node("Reciprocal", deviation),
        Node("Div", Number(1.0), deviation),
        Node("Pow", Node("Add", variance, Number(name="epsilon")), Number(-0.5)),
    )


def widened(x: Pattern) -> Pattern:
    """Return ``x`` cast to float32."""
    return Node("Cast", x, attributes={"to": int(ir.DataType.FLOAT)})


def rounded(operand: Pattern) -> Pattern:
    """Return a Cast and bind its dtype to ``dtype``."""
    return Node("Cast", operand, reads=lambda node: {"dtype": ir.DataType(node.attributes["to"].as_int())})


def keeps_precision(match: Match) -> bool:
    """True if the standard's operators, with float32 statistics, are as precise as the matched nodes.

    Not true for float64, nor for statistics in 16 bits. In 16 bits, x must be widened to float32 for the statistics and rounded
    before the affine part, as the operator does.
    """
    x: ir.Value = match["x"]
    return x.dtype == ir.DataType.FLOAT if match.get("dtype") is None else x.dtype in SIXTEEN_BIT and x.dtype == match["dtype"]


def is_valid_epsilon(match: Match) -> bool:
    epsilon: float = match["epsilon"]
    return np.isfinite(epsilon) and epsilon >= 0


def fits_normalized_shape(operand: ir.Value | None, match: Match) -> bool:
    """True if a scale or bias is absent or broadcasts to the normalized axes of ``x`` without extending them."""
    if operand is None:
        return True
    x: ir.Value = match["x"]
    if operand.dtype != x.dtype or operand.shape is None or x.shape is None:
        return False
    extents = _without_leading_ones(operand.shape, match["axes"])
    normalized = x.shape.dims[len(x.shape) - match["axes"] :]
    if len(extents) > len(normalized):
        return False
    return all(
        extent == 1 or same_dimension(extent, other)
        for extent, other in zip(reversed(extents), reversed(normalized), strict=False)
    )


def affine_operand(builder: Builder, match: Match, operand: ir.Value | None) -> Tensor:
    """Return a scale or bias in exactly the normalized shape, for all runtimes; ones if it is absent."""
    x = builder.tensor(match["x"])
    assert x.shape is not None
    dims = x.shape.dims[len(x.shape) - match["axes"] :]
    static = [dim for dim in dims if isinstance(dim, int)]
    is_static = len(static) == len(dims)
    if operand is None and is_static:
        return builder.constant(np.ones(static, dtype=x.dtype.numpy()))
    target = builder.integers(static) if is_static else builder.op("Shape", x, start=len(x.shape) - match["axes"])
    if operand is None:
        return builder.op("Expand", builder.scalar(1, x), target, shape=ir.Shape(dims))
    assert operand.shape is not None
    extents = _without_leading_ones(operand.shape, match["axes"])
    tensor = builder.tensor(operand)
    if len(extents) < len(operand.shape):
        # A 0 in Reshape copies the dimension at the same index only, so leading ones need a Squeeze.
        tensor = builder.op("Squeeze", tensor, builder.integers(range(len(operand.shape) - len(extents))), shape=extents)
    same = len(extents) == len(dims) and all(map(same_dimension, extents, dims))
    return tensor if same else builder.op("Expand", tensor, target, shape=ir.Shape(dims))


def replace_pieces(graph: ir.Graph, output: ir.Value, layer: Tensor) -> None:
    """Replace the matched nodes by a new one, under the name of their output."""
    last = output.producer()
    assert last is not None
    operands = [value for value in last.inputs if value is not None]
    name = output.name
    replace_node(last, layer)
    layer.value.name = name
    for operand in operands:
        remove_unread(graph, operand.producer())
        if operand.producer() is None:
            remove_unread_value(graph, operand)


def _trailing_axes(node: ir.Node) -> Mapping[str, Any] | None:
    value = node.inputs[0]
    if value is None or value.shape is None or attribute_value(node, "keepdims", 1) != 1:
        return None
    rank = len(value.shape)
    operand = node.inputs[1] if len(node.inputs) > 1 else None
    if operand is None:
        return None if attribute_value(node, "noop_with_empty_axes", 0) else {"axes": rank}
    array = constant_array(operand)
    if array is None:
        return None
    axes = sorted(int(axis) % rank if rank else 0 for axis in array.reshape(-1))
    if not axes and attribute_value(node, "noop_with_empty_axes", 0):
        return None
    axes = axes or list(range(rank))
    return {"axes": len(axes)} if axes == list(range(rank - len(axes), rank)) else None


def _without_leading_ones(shape: ir.Shape, rank: int) -> list[int | ir.SymbolicDim]:
    dims = list(shape.dims)
    while len(dims) > rank and dims[0] == 1:
        dims.pop(0)
    return dims

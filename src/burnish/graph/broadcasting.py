"""Undoing a broadcast: the one place where a cotangent is summed back to the shape of the operand it belongs to."""

from __future__ import annotations

from burnish.graph.builder import Tensor
from burnish.graph.shapes import same_dimension, same_shape


def unbroadcast(cotangent: Tensor, operand: Tensor) -> Tensor:
    """Sum ``cotangent`` over the axes along which ``operand`` was repeated, and give it ``operand``'s shape.

    Decided when the graph is built where the shapes allow it. Where a dimension is unknown, or one name may stand for 1,
    the graph itself compares the two shapes: sums over the axes where the operand has extent 1, then reshapes.
    """
    if same_shape(cotangent.shape, operand.shape):
        return cotangent
    builder = cotangent.builder
    if cotangent.shape is None or operand.shape is None:
        return _unbroadcast_at_run_time(cotangent, operand)
    missing = len(cotangent.shape) - len(operand.shape)
    leading = list(range(missing))
    repeated: list[int] = []
    for axis, dimension in enumerate(operand.shape.dims):
        other = cotangent.shape.dims[axis + missing]
        if same_dimension(dimension, other):
            continue
        if dimension == 1:
            repeated.append(axis + missing)
        elif not isinstance(dimension, int):
            return _unbroadcast_at_run_time(cotangent, operand)
    if not leading and not repeated:
        return cotangent
    if leading and repeated and any(dimension != 1 for dimension in operand.shape.dims):
        summed = builder.op("ReduceSum", cotangent, builder.integers(leading + repeated), keepdims=1)
        return builder.op("Squeeze", summed, builder.integers(leading), like=operand)
    if leading and not repeated:
        return builder.op("ReduceSum", cotangent, builder.integers(leading), keepdims=0, like=operand)
    if repeated and not leading:
        return builder.op("ReduceSum", cotangent, builder.integers(repeated), keepdims=1, like=operand)
    total = builder.op("ReduceSum", cotangent, builder.integers(leading + repeated), keepdims=0)
    return builder.op("Reshape", total, builder.integers([1] * len(operand.shape)), like=operand)


def _unbroadcast_at_run_time(cotangent: Tensor, operand: Tensor) -> Tensor:
    builder = cotangent.builder
    target = builder.op("Shape", operand)
    rank = builder.op("Shape", builder.op("Shape", cotangent))
    padding = rank - builder.op("Shape", target)
    padded = builder.op("Concat", builder.op("Expand", builder.integers([1]), padding), target, axis=0)
    is_one = builder.op("Equal", padded, builder.integers([1]))
    axes = builder.op("Squeeze", builder.op("NonZero", is_one), builder.integers([0]))
    summed = builder.op("ReduceSum", cotangent, axes, keepdims=1, noop_with_empty_axes=1)
    return builder.op("Reshape", summed, target, allowzero=1, like=operand)

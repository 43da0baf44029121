"""Undoing a broadcast: the one place where a cotangent is summed back to the shape of the operand it belongs to."""

from __future__ import annotations

import math

from burnish.graph.builder import Tensor
from burnish.graph.shapes import same_dimension, same_shape

LONGEST_LEADING_RUN = 16384
"""Beyond this many terms a sum over leading axes is split. ONNX Runtime adds them one after the other to the same element."""

LARGEST_IMBALANCE = 8
"""How far the longer part of a split may be from the square root; a more uneven one is not worth a pass over the partial sums."""


def unbroadcast(cotangent: Tensor, operand: Tensor) -> Tensor:
    """Sum ``cotangent`` over the axes along which ``operand`` was repeated, and give it ``operand``'s shape.

    Decided when the graph is built where the shapes allow it. Where a dimension is unknown, or one name may stand for 1,
    the graph itself compares the two shapes: sums over the axes where the operand has extent 1, then reshapes. A sum over
    leading axes that is known to be very long is done in two stages: of n float32 terms of one sign, added one after the other,
    262,144 leave an error of 8e-6.
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
    partial = _sum_blocks_of_leading_axes(cotangent, leading + repeated)
    if partial is not None:
        return unbroadcast(partial, operand)
    if leading and repeated and any(dimension != 1 for dimension in operand.shape.dims):
        summed = builder.op("ReduceSum", cotangent, builder.integers(leading + repeated), keepdims=1)
        return builder.op("Squeeze", summed, builder.integers(leading), like=operand)
    if leading and not repeated:
        return builder.op("ReduceSum", cotangent, builder.integers(leading), keepdims=0, like=operand)
    if repeated and not leading:
        return builder.op("ReduceSum", cotangent, builder.integers(repeated), keepdims=1, like=operand)
    total = builder.op("ReduceSum", cotangent, builder.integers(leading + repeated), keepdims=0)
    return builder.op("Reshape", total, builder.integers([1] * len(operand.shape)), like=operand)


def _sum_blocks_of_leading_axes(cotangent: Tensor, summed: list[int]) -> Tensor | None:
    """Return sums over blocks of the leading axes, in a shape that broadcasts like the cotangent's; None where it is not split.

    ``summed``, ascending, names the axes that will be summed; those of them that come first are the leading ones. Their n terms
    become k sums, k the divisor of n next to its square root: [n, ...] to [k, ...], and [n, m, ...] to [k, 1, ...].
    """
    assert cotangent.shape is not None
    dims = cotangent.shape.dims
    count = next((index for index, axis in enumerate(summed) if axis != index), len(summed))
    extents = [dimension for dimension in dims[:count] if isinstance(dimension, int)]
    terms = math.prod(extents)
    if len(extents) < count or terms <= LONGEST_LEADING_RUN:
        return None
    block = next(divisor for divisor in range(math.isqrt(terms), 0, -1) if terms % divisor == 0)
    blocks = terms // block
    rest = [dimension if isinstance(dimension, int) else -1 for dimension in dims[count:]]
    if blocks > LARGEST_IMBALANCE * math.sqrt(terms) or rest.count(-1) > 1 or 0 in rest:
        return None
    builder = cotangent.builder
    ones = [1] * (count - 2)
    split = builder.op("Reshape", cotangent, builder.integers([blocks, block, *ones, *rest]))
    partial = [blocks, *[1] * (count - 1), *dims[count:]]
    return builder.op("ReduceSum", split, builder.integers([1]), keepdims=int(count > 1), shape=partial)


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

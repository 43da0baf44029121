"""Sums and means that keep their digits, and per-channel helpers based on them.

A runtime adds up a long contiguous run, or a long leading axis, with few accumulators: over 10⁶ terms of one sign ONNX
Runtime's sums are off by 2e-5 and 5e-4. Runs that may be that long are summed in blocks here.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor

LONGEST_RUN = 16384
LONGEST_LEADING_RUN = 1024


def channel_axes(x: Tensor) -> list[int]:
    """All axes of ``x`` [N, C, ...] except the channel's."""
    return [0, *range(2, x.rank or 0)]


def has_short_runs(x: Tensor) -> bool:
    """True if a plain reduction of ``x`` [N, C, ...] over its channel axes is known to keep its digits."""
    extents = [x.dimension(axis) for axis in range(2, x.rank or 0)]
    if not extents:
        batch = x.dimension(0)
        return batch is not None and batch <= LONGEST_LEADING_RUN
    known = [extent for extent in extents if extent is not None]
    return len(known) == len(extents) and math.prod(known) <= LONGEST_RUN


def channel_sum(x: Tensor) -> Tensor:
    """Sum ``x`` [N, C, ...] over all axes except the channel's: [C]."""
    builder = x.builder
    if has_short_runs(x):
        return builder.op("ReduceSum", x, builder.integers(channel_axes(x)), keepdims=0, shape=[x.dimension(1)])
    if (x.rank or 0) > 2:
        x = blocked_sum(builder.op("Reshape", x, builder.integers([0, 0, -1]), shape=[None, x.dimension(1), None]), axis=2)
    return blocked_sum(x, axis=0)


def channel_mean(x: Tensor) -> Tensor:
    """Average ``x`` [N, C, ...] over all axes except the channel's: [C]."""
    return channel_sum(x) / elements_per_channel(x)


def elements_per_channel(x: Tensor) -> Tensor:
    """The number of elements of ``x`` [N, C, ...] in one channel, as a scalar of x's dtype, computed from its shape."""
    builder = x.builder
    extents = builder.op("Gather", builder.op("Shape", x), builder.integers(channel_axes(x)), axis=0)
    return builder.cast(builder.op("ReduceProd", extents, keepdims=0), x.dtype)


def blocked_sum(x: Tensor, axis: int) -> Tensor:
    """Sum over one axis of n elements in three stages of about n^(1/3) elements each: errors grow with n^(1/3), not with n.

    n may be known only at run time; every stage pads the axis with zeros to a multiple of its block.
    """
    partial = _sum_blocks(_sum_blocks(x, axis, 1 / 3), axis, 1 / 2)
    rest = [x.dimension(index) for index in range(x.rank or 0) if index != axis]
    return x.builder.op("ReduceSum", partial, x.builder.integers([axis]), keepdims=0, shape=rest)


def _sum_blocks(x: Tensor, axis: int, exponent: float) -> Tensor:
    """Replace an axis of n elements by the sums of its blocks of n^exponent elements."""
    builder = x.builder
    shape = builder.op("Shape", x)
    length = builder.op("Slice", shape, builder.integers([axis]), builder.integers([axis + 1]))
    root = builder.op("Ceil", builder.op("Pow", builder.cast(length, ir.DataType.FLOAT), exponent))
    block = builder.op("Max", builder.cast(root, ir.DataType.INT64), 1)
    blocks = (length + block - 1) / block
    padding = builder.op("Concat", builder.integers([0]), blocks * block - length, axis=0)
    padded = builder.op("Pad", x, padding, None, builder.integers([axis]))
    before = builder.op("Slice", shape, builder.integers([0]), builder.integers([axis]))
    behind = builder.op("Slice", shape, builder.integers([axis + 1]), builder.integers([np.iinfo(np.int64).max]))
    extents: list[int | None] = [x.dimension(index) for index in range(x.rank or 0)]
    split = builder.op(
        "Reshape",
        padded,
        builder.op("Concat", before, blocks, block, behind, axis=0),
        shape=[*extents[:axis], None, None, *extents[axis + 1 :]],
    )
    sums = [*extents[:axis], None, *extents[axis + 1 :]]
    return builder.op("ReduceSum", split, builder.integers([axis + 1]), keepdims=0, shape=sums)


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Reshape [C] to [C, 1, ...] so that it broadcasts along the channel axis (1) of ``like`` [N, C, ...]."""
    rank = like.rank or 0
    if rank <= 2:
        return vector
    builder = vector.builder
    shape = [vector.dimension(0)] + [1] * (rank - 2)
    return builder.op("Reshape", vector, builder.integers([-1] + [1] * (rank - 2)), shape=shape, dtype=vector.dtype)


def channel_affine(x: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``x * slope + offset`` with [C] vectors; one pass over ``x`` [N, C, ...] if the number of channels is known."""
    channels = slope.dimension(0) or x.dimension(1)
    if channels is None or (x.rank or 0) < 3:
        return x * per_channel(slope, x) + per_channel(offset, x)
    builder = x.builder
    zeros, ones = (builder.constant(np.full(channels, number, x.dtype.numpy())) for number in (0, 1))
    return builder.op("BatchNormalization", x, slope, offset, zeros, ones, epsilon=0.0, like=x)

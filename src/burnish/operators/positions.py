"""Known or computed extents, and the adjoint of operators that only move elements: addition at flat positions.

The gradient of any operator that copies elements (a slice, a gather, a reflecting pad): apply the operator to the flat
positions of its input, then add every cotangent element at its original position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import SIXTEEN_BIT, Builder, Tensor, known_extents, same_shape
from burnish.operators.registry import Operation

INT64_MAX = int(np.iinfo(np.int64).max)
INT64_MIN = int(np.iinfo(np.int64).min)


def known_rank(op: Operation, x: Tensor) -> int:
    """Return the rank of ``x``.

    Raises:
        UnsupportedOperatorError: it is unknown.
    """
    if x.rank is None:
        raise UnsupportedOperatorError(
            f"{op}: the rank of its input '{x.name}' is not known; declare the shapes of the model's inputs and load it again"
        )
    return x.rank


def extents(tensor: Tensor, start: int = 0, end: int | None = None) -> tuple[int, ...] | None:
    """Return the dimensions ``start:end`` of a tensor as integers, or None if one of them is unknown."""
    return None if tensor.shape is None else known_extents(tensor.shape.dims[start:end])


def extent(tensor: Tensor, axis: int) -> Tensor:
    """Return the extent along ``axis``, int64 [1]: a constant if known, otherwise read at run time."""
    known = tensor.dimension(axis)
    if known is not None:
        return tensor.builder.integers([known])
    return tensor.builder.op("Shape", tensor, start=axis, end=axis + 1 if axis != -1 else None)


def count(tensor: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """Return the number of elements in the dimensions ``start:end``, an int64 scalar."""
    known = extents(tensor, start, end)
    if known is not None:
        return tensor.builder.scalar(prod(known), ir.DataType.INT64)
    return tensor.builder.op("ReduceProd", tensor.builder.op("Shape", tensor, start=start, end=end), keepdims=0)


def count_like(tensor: Tensor, start: int) -> Tensor:
    """Return the number of elements in the dimensions from ``start`` on, a scalar of the tensor's dtype."""
    known = extents(tensor, start)
    if known is None:
        return tensor.builder.cast(count(tensor, start), tensor.dtype)
    return tensor.builder.scalar(prod(known), tensor)


def joined(builder: Builder, vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate int64 vectors; a constant if all of them are."""
    arrays = [vector.array for vector in vectors]
    if all(array is not None for array in arrays):
        return builder.integers([int(number) for array in arrays if array is not None for number in array])
    return builder.op("Concat", *vectors, axis=0)


def reshape_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Reshape to the shape of ``like``: a constant shape if at most one dimension is unknown, otherwise read at run time."""
    if same_shape(tensor.shape, like.shape):
        return tensor
    builder = tensor.builder
    if like.shape is not None and 0 not in like.shape.dims:
        target = [dimension if isinstance(dimension, int) else -1 for dimension in like.shape.dims]
        if target.count(-1) <= 1:
            return builder.op("Reshape", tensor, builder.integers(target), like=like)
    return builder.op("Reshape", tensor, builder.op("Shape", like), allowzero=1, like=like)


def reshape_to(tensor: Tensor, parts: Sequence[int | Callable[[], Tensor]]) -> Tensor:
    """Reshape to extents that are ints or functions that emit int64 [1]; a single function becomes -1 and is not called."""
    builder = tensor.builder
    known = [part for part in parts if isinstance(part, int)]
    if len(known) >= len(parts) - 1 and 0 not in known:
        return builder.op("Reshape", tensor, builder.integers([part if isinstance(part, int) else -1 for part in parts]))
    pieces = [builder.integers([part]) if isinstance(part, int) else part() for part in parts]
    return builder.op("Reshape", tensor, joined(builder, pieces), allowzero=1)


def flat_positions(tensor: Tensor) -> Tensor:
    """Return the position of each element in row-major order: int64, of the tensor's shape."""
    builder = tensor.builder
    index = ir.DataType.INT64
    positions = builder.op("Range", builder.scalar(0, index), builder.op("Size", tensor), builder.scalar(1, index))
    shape = None if tensor.shape is None else ir.Shape(tensor.shape.dims)
    return builder.op("Reshape", positions, builder.op("Shape", tensor), allowzero=1, shape=shape, dtype=index)


def add_at_positions(updates: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    """Return zeros of the shape of ``like``, with ``updates`` added at flat ``positions`` (int64, >= 0, repeats add up).

    Uses one-dimensional ScatterElements, which ONNX Runtime runs in order on one thread, at about 6 ns per element: its ScatterND
    adds from several threads at once and loses updates of a repeated index.
    """
    builder = updates.builder
    flat = builder.integers([-1])
    size = builder.op("Reshape", builder.op("Size", like), flat)
    zeros = builder.op("ConstantOfShape", size, value=ir.tensor(np.zeros(1, updates.dtype.numpy())), dtype=updates.dtype)
    total = scatter_add(zeros, builder.op("Reshape", positions, flat), builder.op("Reshape", updates, flat), axis=0)
    return reshape_as(total, like)


def scatter_add(tensor: Tensor, indices: Tensor, updates: Tensor, axis: int, like: Tensor | None = None) -> Tensor:
    """Return ``tensor`` with ``updates`` added at ``indices`` along ``axis``, in the dtype of ``tensor``.

    16-bit values are added in float32: ONNX Runtime has no kernel that adds them, and their sums would lose digits.
    """
    builder, dtype = tensor.builder, tensor.dtype
    added = ir.DataType.FLOAT if dtype in SIXTEEN_BIT else dtype
    tensor, updates = builder.cast(tensor, added), builder.cast(updates, added)
    shape = None if like is None else like.shape
    total = builder.op("ScatterElements", tensor, indices, updates, axis=axis, reduction="add", shape=shape, dtype=added)
    return builder.cast(total, dtype)


def pad_or_crop(tensor: Tensor, axes: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> Tensor:
    """Add zeros before and after along ``axes``; a negative number crops."""
    builder = tensor.builder
    cropped = [index for index in range(len(axes)) if begins[index] < 0 or ends[index] < 0]
    if cropped:
        tensor = builder.op(
            "Slice",
            tensor,
            builder.integers([max(-begins[index], 0) for index in cropped]),
            builder.integers([min(ends[index], 0) or INT64_MAX for index in cropped]),
            builder.integers([axes[index] for index in cropped]),
        )
    padded = [index for index in range(len(axes)) if begins[index] > 0 or ends[index] > 0]
    if padded:
        amounts = [max(begins[index], 0) for index in padded] + [max(ends[index], 0) for index in padded]
        tensor = builder.op("Pad", tensor, builder.integers(amounts), None, builder.integers([axes[index] for index in padded]))
    return tensor

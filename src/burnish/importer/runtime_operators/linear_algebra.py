"""Inverses of matrices, distances between rows, and Fourier transforms of real signals.

ONNX Runtime has the transforms only on GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank
from burnish.operators.spectrum import OPSET_OF_AXIS_INPUT

_MOST_ROWS = 32
"""Largest matrix whose inverse is written out, with one step per row."""


@rewrites("Inverse")
def inverse(op: Operation) -> Results:
    """Invert matrices by Gauss-Jordan elimination with row exchanges; larger matrices stay."""
    builder, x, size = op.builder, op.input, op.input.dimension(-1) if op.input.rank else None
    if size is None or not 0 < size <= _MOST_ROWS:
        return None
    rank = known_rank(op, x)
    shape = builder.op("Shape", x)
    matrices = builder.op("Reshape", x, builder.integers([-1, size, size])) if rank != 3 else x
    identity = builder.cast(builder.constant(np.eye(size)[None]), x.dtype)
    zeros = builder.op("Mul", matrices, builder.scalar(0.0, x))
    both = builder.op("Concat", matrices, zeros + identity, axis=2)
    for step in range(size):
        both = _eliminated(both, step, size)
    result = builder.op("Slice", both, builder.integers([size]), builder.integers([2 * size]), builder.integers([2]))
    return result if rank == 3 else builder.op("Reshape", result, shape)


def _eliminated(both: Tensor, step: int, size: int) -> Tensor:
    """Move the largest remaining number of a column to the diagonal, scale its row to one there, and clear the column."""
    builder = both.builder
    places = np.arange(size)[None, :, None]
    column = _part(both, step, axis=2)
    left = builder.op("Where", builder.constant(places >= step), builder.op("Abs", column), builder.scalar(-1.0, both))
    largest = builder.op("ArgMax", left, axis=1, keepdims=1)
    row = builder.constant(places)
    here = builder.constant(places == step)
    exchanged = builder.op("Where", builder.op("Equal", row, largest), builder.scalar(step, ir.DataType.INT64), row)
    order = builder.op("Where", here, largest, exchanged)
    both = builder.op("GatherElements", both, builder.op("Expand", order, builder.op("Shape", both)), axis=1)
    pivot = _part(both, step, axis=1)
    pivot = pivot / _part(pivot, step, axis=2)
    return builder.op("Where", here, pivot, both - _part(both, step, axis=2) * pivot)


def _part(x: Tensor, index: int, axis: int) -> Tensor:
    builder = x.builder
    return builder.op("Slice", x, builder.integers([index]), builder.integers([index + 1]), builder.integers([axis]))


@rewrites("CDist")
def distances(op: Operation) -> Tensor:
    """Emit distances, possibly squared, from each row of one matrix to each row of another."""
    builder = op.builder
    apart = builder.op("Unsqueeze", op.input, builder.integers([1])) - builder.op(
        "Unsqueeze", op.required(1), builder.integers([0])
    )
    squares = builder.op("ReduceSum", apart * apart, builder.integers([2]), keepdims=0)
    return squares if op.attribute("metric", "sqeuclidean") == "sqeuclidean" else builder.op("Sqrt", squares)


def _transform(x: Tensor, axis: int, **attributes: Any) -> Tensor:
    if x.builder.opset < OPSET_OF_AXIS_INPUT:
        return x.builder.op("DFT", x, axis=axis, **attributes)
    return x.builder.op("DFT", x, None, x.builder.scalar(axis, ir.DataType.INT64), **attributes)


def _is_known(op: Operation) -> bool:
    """True for the form that the operator defines: half the spectrum, and no scale except 1/N of the inverse."""
    return bool(op.attribute("onesided", 1)) and not op.attribute("normalized", 0)


@rewrites("Rfft")
def transform_of_reals(op: Operation) -> Results:
    """Transform the last ``signal_ndim`` axes: ``[..., n]`` to ``[..., n // 2 + 1, 2]``, with real and imaginary parts last."""
    if not _is_known(op):
        return None
    builder, x = op.builder, op.input
    last = known_rank(op, x) - 1
    half = _transform(builder.op("Unsqueeze", x, builder.integers([-1])), last, onesided=1)
    for axis in range(last - op.attribute("signal_ndim", 1) + 1, last):
        half = _transform(half, axis)
    return half


@rewrites("Irfft")
def inverse_transform_to_reals(op: Operation) -> Results:
    """Invert the transform: ``[..., m, 2]`` to ``[..., 2 (m - 1)]``, or to ``2 m - 1`` numbers if the file declares that.

    Of the two lengths with m frequencies, exporters mean the even one, as in NumPy and PyTorch.
    """
    if not _is_known(op):
        return None
    builder, half = op.builder, op.input
    last = known_rank(op, half) - 2
    for axis in range(last - op.attribute("signal_ndim", 1) + 1, last):
        half = _transform(half, axis, inverse=1)
    # The upper frequencies are the conjugates of the lower ones, in reverse order.
    highest = -1 if _is_odd(op, half.dimension(last)) else -2
    above = builder.op("Slice", half, *(builder.integers([each]) for each in (highest, 0, last, -1)))
    conjugate = above * builder.cast(builder.constant(np.array([1.0, -1.0])), half.dtype)
    whole = _transform(builder.op("Concat", half, conjugate, axis=last), last, inverse=1)
    return builder.op("Gather", whole, builder.scalar(0, ir.DataType.INT64), axis=last + 1)


def _is_odd(op: Operation, frequencies: int | None) -> bool:
    declared = op.node.outputs[0].shape
    return declared is not None and frequencies is not None and declared.dims[-1] == 2 * frequencies - 1

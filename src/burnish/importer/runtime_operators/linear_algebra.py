"""Inverses of matrices, and distances between their rows."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank

_MOST_ROWS = 32
"""Rows of a matrix up to which its inverse is written out, one step for each."""


@rewrites("Inverse")
def inverse(op: Operation) -> Results:
    """By elimination with exchanges of rows (Gauss and Jordan), step by step; larger matrices stay."""
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
    """Bring the largest of the numbers left in a column onto the diagonal, and make it one and the others zero."""
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
    """From each row of one matrix to each of another, as they are or squared."""
    builder = op.builder
    apart = builder.op("Unsqueeze", op.input, builder.integers([1])) - builder.op(
        "Unsqueeze", op.required(1), builder.integers([0])
    )
    squares = builder.op("ReduceSum", apart * apart, builder.integers([2]), keepdims=0)
    return squares if op.attribute("metric", "sqeuclidean") == "sqeuclidean" else builder.op("Sqrt", squares)

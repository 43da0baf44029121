"""Lp normalization: every row divided by its norm."""

from __future__ import annotations

from burnish.errors import ModelError
from burnish.graph import Tensor
from burnish.operators.normalization.standardize import (
    moved_back,
    negative_axis,
    root_mean_square_normalize,
    rows_over,
    staged,
    trailing_sum,
)
from burnish.operators.positions import count_like, known_rank
from burnish.operators.registry import Operation, training_form


@training_form("LpNormalization")
def lp_normalization(op: Operation) -> Tensor:
    """ONNX LpNormalization-22: x / (sum |x|^p)^(1/p) along one axis, for p = 1 or 2. A row of norm 0 stays 0, with gradient 0."""
    builder, x = op.builder, op.input
    power = op.attribute("p", 2)
    if power not in (1, 2):
        raise ModelError(f"{op}: p = {power}, and the standard has p = 1 and p = 2; correct the attribute of the node")
    axis = negative_axis(op, x, op.attribute("axis", -1)) + known_rank(op, x)
    rows, permutation = rows_over(staged(x), [axis])
    if power == 2:
        normalized, _ = root_mean_square_normalize(rows, -1, epsilon=0.0)
        y = normalized / builder.op("Sqrt", count_like(rows, -1))
    else:
        norm = trailing_sum(builder.op("Abs", rows), -1)
        zero = builder.op("Equal", norm, builder.scalar(0, norm))
        inverse = builder.op("Reciprocal", builder.op("Where", zero, builder.scalar(1, norm), norm))
        y = rows * builder.op("Where", zero, builder.scalar(0, norm), inverse)
    return builder.cast(moved_back(y, permutation), x.dtype)

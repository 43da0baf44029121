"""Layer, root-mean-square and Lp normalization: over trailing axes with a broadcast scale, and rows divided by their norms.

float16 and bfloat16 are normalized in float32 and cast back before scale and bias, for any ``stash_type``; float64 stays
float64, although ``stash_type`` names float32 (as in PyTorch and in ONNX Runtime's kernel).
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.normalization.standardize import (
    check_not_empty,
    moved_back,
    negative_axis,
    root_mean_square_normalize,
    rows_over,
    staged,
    standardize,
    trailing_sum,
)
from burnish.operators.positions import count_like, known_rank
from burnish.operators.registry import Operation, Operator, Precision


def layer_normalization(op: Operation) -> tuple[Tensor, ...]:
    """Layer normalization (Ba, Kiros and Hinton 2016; ONNX LayerNormalization-17 with its outputs Mean and InvStdDev)."""
    builder, x, scale, bias = op.builder, op.required(0), op.required(1), op.optional(2)
    axis = _normalized_axis(op, x)
    _check_broadcast(op, x, scale, "Scale")
    normalized, *statistics = standardize(staged(x), axis, op.attribute("epsilon", 1e-5))
    y = builder.cast(normalized, x.dtype) * scale
    if bias is not None:
        _check_broadcast(op, x, bias, "B")
        y = y + bias
    stash = ir.DataType(op.attribute("stash_type", 1))
    read = zip(op.outputs[1:], statistics, strict=False)
    return y, *(builder.cast(statistic, output.value.dtype or stash) for output, statistic in read)


def root_mean_square_normalization(op: Operation) -> Tensor:
    """RMS normalization (Zhang and Sennrich 2019; ONNX RMSNormalization-23); the output has the dtype of its scale."""
    builder, x, scale = op.builder, op.required(0), op.required(1)
    axis = _normalized_axis(op, x)
    _check_broadcast(op, x, scale, "scale")
    normalized, _ = root_mean_square_normalize(staged(x), axis, op.attribute("epsilon", 1e-5))
    return builder.cast(builder.cast(normalized, x.dtype), scale.dtype) * scale


def _normalized_axis(op: Operation, x: Tensor) -> int:
    axis = negative_axis(op, x, op.attribute("axis", -1))
    check_not_empty(op, x, axis)
    return axis


def _check_broadcast(op: Operation, x: Tensor, operand: Tensor, name: str) -> None:
    if operand.shape is None:
        return
    rank = operand.rank or 0
    fits = rank <= (x.rank or 0)
    for axis in range(-rank, 0) if fits else ():
        extent, repeated = x.dimension(axis), operand.dimension(axis)
        fits = fits and (repeated in (None, 1) or extent in (None, repeated))
    if not fits:
        raise ModelError(
            f"{op}: {name} '{operand.name}' of shape {operand.shape} does not broadcast to the input '{x.name}' of shape "
            f"{x.shape}; give it the normalized shape"
        )


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


OPERATORS = [
    Operator(
        "LayerNormalization",
        since=17,
        training_form=layer_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        mixes=axis_rules.following_axes,
        reopen=reopen_rules.last_axes,
    ),
    Operator(
        "RMSNormalization",
        since=23,
        training_form=root_mean_square_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        mixes=axis_rules.following_axes,
        reopen=reopen_rules.last_axes,
    ),
    Operator(
        "LpNormalization",
        training_form=lp_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        mixes=axis_rules.named_axis,
        reopen=reopen_rules.along_axis,
    ),
]

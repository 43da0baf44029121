"""Layer normalization and root-mean-square normalization: over trailing axes, with a scale that broadcasts.

float16 and bfloat16 are normalized in float32 and cast back before scale and bias, whatever ``stash_type`` allows; float64
stays float64, although ``stash_type`` names float32 (as in PyTorch and in ONNX Runtime's kernel).
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Tensor
from burnish.operators.normalization.standardize import (
    check_not_empty,
    negative_axis,
    root_mean_square_normalize,
    staged,
    standardize,
)
from burnish.operators.registry import Operation, training_form


@training_form("LayerNormalization", since=17)
def layer_normalization(op: Operation) -> tuple[Tensor, ...]:
    """Ba, Kiros and Hinton 2016; ONNX LayerNormalization-17 with its outputs Mean and InvStdDev."""
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


@training_form("RMSNormalization", since=23)
def root_mean_square_normalization(op: Operation) -> Tensor:
    """Zhang and Sennrich 2019; ONNX RMSNormalization-23, whose output has the dtype of its scale."""
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
    """Refuse an operand that is known not to broadcast to the shape of ``x``."""
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

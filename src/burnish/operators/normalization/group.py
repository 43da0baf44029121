"""Normalization over groups of channels, over single channels, and over given axes.

float16 and bfloat16 are normalized in float32 and cast back before scale and bias.
"""

from __future__ import annotations

from burnish.errors import ModelError
from burnish.graph import SIXTEEN_BIT, Tensor
from burnish.operators.normalization.group_training import by_group, group_norm_training
from burnish.operators.normalization.standardize import (
    check_not_empty,
    moved_back,
    negative_axis,
    rows_over,
    staged,
    standardize,
)
from burnish.operators.normalization.statistics import per_channel
from burnish.operators.positions import known_rank, reshape_as
from burnish.operators.registry import Operation, training_form

DEFAULT_AXES = (0, 2, 3)
STD_OFFSET = 1e-9


@training_form("GroupNormalization", since=21)
def group_normalization(op: Operation) -> Tensor:
    """Wu and He 2018; ONNX GroupNormalization-21, with a scale and a bias for each channel."""
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    groups = _checked_groups(op, x)
    for operand in (scale, bias):
        _check_size(op, operand, x.dimension(1))
    if x.dtype not in SIXTEEN_BIT:
        return group_norm_training(x, scale, bias, groups, op.attribute("epsilon", 1e-5))
    grouped, _ = by_group(x, groups)
    normalized, _, _ = standardize(staged(grouped), 2 - (grouped.rank or 0), op.attribute("epsilon", 1e-5))
    y = reshape_as(op.builder.cast(normalized, x.dtype), x)
    return y * per_channel(scale, x) + per_channel(bias, x)


@training_form("InstanceNormalization", since=6)
def instance_normalization(op: Operation) -> Tensor:
    """Ulyanov, Vedaldi and Lempitsky 2016; ONNX InstanceNormalization, over the spatial axes of every sample and channel."""
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    rank = known_rank(op, x)
    if rank < 3:
        raise ModelError(f"{op}: its input '{x.name}' of rank {rank} has no spatial axes to normalize over; give it at least one")
    check_not_empty(op, x, 2 - rank)
    for operand in (scale, bias):
        _check_size(op, operand, x.dimension(1))
    if x.dtype not in SIXTEEN_BIT:
        return group_norm_training(x, scale, bias, 0, op.attribute("epsilon", 1e-5))
    normalized, _, _ = standardize(staged(x), 2 - rank, op.attribute("epsilon", 1e-5))
    return op.builder.cast(normalized, x.dtype) * per_channel(scale, x) + per_channel(bias, x)


@training_form("MeanVarianceNormalization", since=9)
def mean_variance_normalization(op: Operation) -> Tensor:
    """ONNX MeanVarianceNormalization-13: (x - mean) / (std + 1e-9) over ``axes``, without scale and bias."""
    x = op.required(0)
    rank = known_rank(op, x)
    axes = [negative_axis(op, x, axis) + rank for axis in op.attribute("axes", DEFAULT_AXES)]
    if not axes or len(set(axes)) < len(axes):
        raise ModelError(f"{op}: axes must name at least one axis, and none twice, not {list(axes)}; correct the node")
    rows, permutation = rows_over(staged(x), axes)
    check_not_empty(op, rows, -len(axes))
    normalized, _, _ = standardize(rows, -len(axes), epsilon=0.0, offset=STD_OFFSET)
    return op.builder.cast(moved_back(normalized, permutation), x.dtype)


def _checked_groups(op: Operation, x: Tensor) -> int:
    """``num_groups`` of a node that can be carried out."""
    rank = known_rank(op, x)
    if rank < 2:
        raise ModelError(f"{op}: its input '{x.name}' of rank {rank} has no channel axis; give it at least two axes")
    check_not_empty(op, x, 1 - rank)
    groups, channels = op.attribute("num_groups"), x.dimension(1)
    if groups < 1 or (channels is not None and channels % groups):
        raise ModelError(
            f"{op}: num_groups = {groups} does not divide the {channels} channels of its input '{x.name}'; choose a divisor"
        )
    return int(groups)


def _check_size(op: Operation, operand: Tensor, channels: int | None) -> None:
    """Refuse a scale or bias that is known not to be a vector with one number for each channel."""
    if operand.shape is None:
        return
    if operand.rank != 1 or (channels is not None and operand.dimension(0) not in (None, channels)):
        raise ModelError(
            f"{op}: '{operand.name}' has the shape {operand.shape}, and the {channels} channels need a vector of that size; "
            "correct it"
        )

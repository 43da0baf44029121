"""Normalization over groups of channels, over single channels, and over given axes.

float16 and bfloat16 are normalized in float32 and cast back before scale and bias.

Group and instance normalization are one semantic operator in training, with their scale and bias:

    GroupNormTraining(x, scale, bias; num_groups, epsilon) -> y, mean, inverse_std, shift, centered
    GroupNormGrad(dy, x, scale, bias, mean, inverse_std, shift, centered; num_groups, epsilon) -> dx, dscale, dbias

x is [N, C, ...], scale and bias are [C]. ``num_groups`` = 0 means one group per channel: instance normalization. Statistics are
[N, groups]. ``centered`` is x minus some value near the mean of each group and ``shift`` is the mean of that difference.
Together they give x - mean to the last bits. The lowered backward reads these and does not keep x; a kernel that computes with
x and mean may omit both.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import SIXTEEN_BIT, Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.normalization.standardize import (
    centered_rows,
    check_not_empty,
    inverse_deviation,
    moved_back,
    negative_axis,
    projected,
    projection_gradients,
    rows_over,
    staged,
    standardize,
    trailing_mean,
    trailing_sum,
)
from burnish.operators.normalization.statistics import channel_sum, per_channel
from burnish.operators.positions import count_like, extent, extents, joined, known_rank, reshape_as
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like

DEFAULT_AXES = (0, 2, 3)
STD_OFFSET = 1e-9


def group_normalization(op: Operation) -> Tensor:
    """Group normalization (Wu and He 2018; ONNX GroupNormalization-21), with a scale and a bias for each channel."""
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


def instance_normalization(op: Operation) -> Tensor:
    """Instance normalization over the spatial axes of every sample and channel (Ulyanov, Vedaldi and Lempitsky 2016)."""
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
    """Refuse a scale or bias that is known not to be a vector with one number per channel."""
    if operand.shape is None:
        return
    if operand.rank != 1 or (channels is not None and operand.dimension(0) not in (None, channels)):
        raise ModelError(
            f"{op}: '{operand.name}' has the shape {operand.shape}, and the {channels} channels need a vector of that size; "
            "correct it"
        )


LONGEST_PILOT = 1024
"""Rows up to this length are centered by their mean before their statistics; longer ones by the mean of a part."""


def _layer_and_statistics(operands: Operands) -> list[OutputType]:
    x = operands["x"]
    groups = operands.attributes["num_groups"] or x.dimension(1)
    statistic = OutputType(x.dtype, ir.Shape([None if x.shape is None else x.shape.dims[0], groups]))
    return [OutputType.of(x), statistic, statistic, statistic, OutputType.of(x)]


def group_norm_training(x: Tensor, scale: Tensor, bias: Tensor, num_groups: int, epsilon: float) -> Tensor:
    """Normalize ``x`` [N, C, ...] over each group of channels of each sample, with a scale and a bias [C] for each channel.

    Args:
        x: float32 or float64, of known rank.
        scale, bias: the dtype of x.
        num_groups: the number of groups; 0 for one channel each.
        epsilon: added to the population variance.

    Returns:
        scale * (x - mean) / sqrt(variance + epsilon) + bias, like x (Wu and He 2018; Ulyanov, Vedaldi and Lempitsky 2016).
    """
    y, *_ = GROUP_NORM_TRAINING.emit(x, scale, bias, num_groups=num_groups, epsilon=epsilon)
    return y


def group_norm_training_gradient(op: Operation, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient as one GroupNormGrad node; only it reads the statistics, so it includes their part."""
    attributes = {name: op.attribute(name) for name in ("num_groups", "epsilon")}
    return GROUP_NORM_GRAD.emit(dy, op.required(0), op.required(1), op.required(2), *op.outputs[1:], **attributes)


def group_norm_double_backward(
    op: Operation, v: Tensor | None, v_scale: Tensor | None, v_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The derivatives of dx = StandardizeGrad(dy scale, n, r), dscale = sum(dy n) and dbias = sum(dy).

    The rows n and their inverse deviations r are again functions of x.
    """
    dy, x, scale = (op.required(index) for index in range(3))
    rows, axis = _rows(x, op.attribute("num_groups"))
    normalized, _, inverse = standardize(rows, axis, op.attribute("epsilon"))
    n, gain = reshape_as(normalized, x), per_channel(scale, x)
    by_dy: Tensor | None = None
    by_scale: Tensor | None = None
    by_rows: Tensor | None = None
    by_x: Tensor | None = None
    if v is not None:
        q = reshape_as(dy * gain, rows)
        by_q, by_rows, by_inverse = projection_gradients(reshape_as(v, rows), q, normalized, inverse, axis)
        by_q = reshape_as(by_q, x)
        by_dy, by_scale = by_q * gain, channel_sum(by_q * dy)
        by_x = -(normalized * (by_inverse * inverse * inverse / count_like(rows, axis)))
    if v_scale is not None:
        along = per_channel(v_scale, x)
        by_dy = _added(by_dy, n * along)
        by_rows = _added(by_rows, reshape_as(dy * along, rows))
    if v_bias is not None:
        flat = op.builder.op("Expand", per_channel(v_bias, x), op.builder.op("Shape", x), like=x)
        by_dy = _added(by_dy, flat)
    if by_rows is not None:
        by_x = _added(by_x, projected(by_rows, normalized, inverse, axis))
    return by_dy, None if by_x is None else reshape_as(by_x, x), by_scale, *[None] * (len(op.inputs) - 3)


def _added(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


@dataclass(frozen=True)
class _Extents:
    """Known extents of x except N: [N, groups, members of a group, elements of a channel]."""

    groups: int
    members: int
    elements: int


def _known_extents(x: Tensor, num_groups: int) -> _Extents | None:
    sizes = extents(x, 1)
    if sizes is None or 0 in sizes:
        return None
    groups = num_groups or sizes[0]
    return _Extents(groups, sizes[0] // groups, prod(sizes[1:]))


def _rows(x: Tensor, num_groups: int) -> tuple[Tensor, int]:
    """Return x with the elements of a group in its last axes, and the first of these axes, counted from the end."""
    return (x, 2 - (x.rank or 0)) if not num_groups else by_group(x, num_groups)


def by_group(x: Tensor, groups: int) -> tuple[Tensor, int]:
    """Return ``x`` [N, C, ...] as [N, groups, elements], or images of unknown extents as [N, groups, others, height, width].

    Also return the first axis after the groups, counted from the end.
    """
    builder = x.builder
    batch = None if x.shape is None else x.shape.dims[0]
    if (x.rank or 0) > 3 and extents(x, 1) is None:
        target = joined(builder, [builder.integers([0, groups, -1]), extent(x, -2), extent(x, -1)])
        dimensions = [batch, groups, None, x.dimension(-2), x.dimension(-1)]
        return builder.op("Reshape", x, target, shape=dimensions, dtype=x.dtype), -3
    return builder.op("Reshape", x, builder.integers([0, groups, -1])), -1


def lower_group_norm_training(op: Operation) -> tuple[Tensor, ...]:
    """Compute statistics from values near zero, so that a large mean costs no digits (Chan, Golub, LeVeque 1983).

    If extents are known, the mean of a part of each row, an eighth or more, is subtracted: it differs from the row's mean by at
    most the root of 7 deviations. The layer is then one pass over the centered values.
    """
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    num_groups, epsilon = op.attribute("num_groups"), op.attribute("epsilon")
    sizes = _known_extents(x, num_groups)
    if sizes is None:
        rows, axis = _rows(x, num_groups)
        centered, shift, variance, mean = centered_rows(rows, axis)
        inverse = inverse_deviation(variance, epsilon)
        normalized = reshape_as((centered - shift) * inverse, x)
        y = normalized * per_channel(scale, x) + per_channel(bias, x)
    else:
        rows, axis = builder.op("Reshape", x, builder.integers([0, sizes.groups, sizes.members * sizes.elements])), -1
        centered, shift, variance, mean = centered_rows(rows, axis, _pilot(rows, sizes.members * sizes.elements))
        inverse = inverse_deviation(variance, epsilon)
        gain = inverse * _by_member(scale, sizes)
        y = _affine(centered, gain, _by_member(bias, sizes) - shift * gain, sizes.elements, x)
    normalized_axes = builder.integers(list(range(axis, 0)))
    statistics = (builder.op("Squeeze", value, normalized_axes) for value in (mean, inverse, shift))
    return y, *statistics, reshape_as(centered, x)


def _pilot(rows: Tensor, length: int) -> Tensor:
    """Return a value near the mean of each row [N, groups, length]: [N, groups, 1].

    It is computed relative to the first element, so that a constant row is its own pilot.
    """
    builder = rows.builder

    def start(count: int) -> Tensor:
        return builder.op("Slice", rows, *(builder.integers([number]) for number in (0, count, -1)))

    first = start(1)
    part = rows if length <= LONGEST_PILOT else start(1 << (length // 8 - 1).bit_length())
    return first + trailing_mean(part - first, -1)


def _by_member(vector: Tensor, sizes: _Extents) -> Tensor:
    return vector.builder.op("Reshape", vector, vector.builder.integers([sizes.groups, sizes.members]))


def _affine(x: Tensor, slope: Tensor, offset: Tensor, elements: int, like: Tensor) -> Tensor:
    """``x * slope + offset`` in one pass, in the shape of ``like``; a slope and an offset for each run of ``elements``.

    Uses ONNX Runtime's inference batch normalization, with samples and channels flattened to channels.
    """
    builder = x.builder
    flat = builder.op("Reshape", x, builder.integers([1, -1, elements]))
    slope, offset = (builder.op("Reshape", vector, builder.integers([-1])) for vector in (slope, offset))
    count = builder.op("Shape", slope)
    zeros, ones = (
        builder.op("ConstantOfShape", count, value=ir.tensor(np.full(1, number, x.dtype.numpy())), like=slope)
        for number in (0, 1)
    )
    return reshape_as(builder.op("BatchNormalization", flat, slope, offset, zeros, ones, epsilon=0.0, like=flat), like)


def lower_group_norm_grad(op: Operation) -> tuple[Tensor, ...]:
    """The gradient, with q = scale dy, r the inverse deviation and means over the elements of a group:

    dx = r (q - mean(q) - (x - mean) r² mean(q (x - mean))); dscale = sum(dy (x - mean) r); dbias = sum(dy).

    x - mean is ``centered - shift``. The shift is at most a few deviations, and is subtracted from the sums instead of from every
    element.
    """
    dy, x, scale = (op.required(index) for index in range(3))
    inverse, shift, centered = (op.required(index) for index in (5, 6, 7))
    builder = op.builder
    sizes = _known_extents(x, op.attribute("num_groups"))
    if sizes is None:
        return _gradient_by_rows(op, dy, x, scale, inverse, shift, centered)
    channels = sizes.groups * sizes.members
    by_channel, by_member = (
        builder.integers(target) for target in ([0, channels, sizes.elements], [0, sizes.groups, sizes.members])
    )
    flows, deviations = (builder.op("Reshape", tensor, by_channel) for tensor in (dy, centered))
    total, along = (builder.op("Reshape", trailing_sum(terms, -1), by_member) for terms in (flows, flows * deviations))
    inverse, shift = (builder.op("Unsqueeze", statistic, builder.integers([-1])) for statistic in (inverse, shift))
    along = along - shift * total
    scales = _by_member(scale, sizes)
    dscale, dbias = (
        builder.op(
            "Reshape", builder.op("ReduceSum", sums, builder.integers([0]), keepdims=0), builder.integers([-1]), like=scale
        )
        for sums in (along * inverse, total)
    )
    last, count = builder.integers([-1]), builder.scalar(sizes.members * sizes.elements, dy)
    middle, weight = (builder.op("ReduceSum", sums * scales, last, keepdims=1) / count for sums in (total, along))
    slope = -(weight * inverse * inverse * inverse)
    offset = -(middle * inverse) - slope * shift
    gain = builder.op("Reshape", inverse * scales, builder.integers([0, channels, *[1] * ((x.rank or 0) - 2)]))
    rest = _affine(centered, slope, offset, sizes.members * sizes.elements, x)
    return dy * gain + rest, dscale, dbias


def _gradient_by_rows(
    op: Operation, dy: Tensor, x: Tensor, scale: Tensor, inverse: Tensor, shift: Tensor, centered: Tensor
) -> tuple[Tensor, ...]:
    rows, axis = _rows(centered, op.attribute("num_groups"))
    normalized_axes = op.builder.integers(list(range(axis, 0)))
    inverse, shift = (op.builder.op("Unsqueeze", statistic, normalized_axes) for statistic in (inverse, shift))
    normalized = (rows - shift) * inverse
    dx = projected(reshape_as(dy * per_channel(scale, x), rows), normalized, inverse, axis)
    return reshape_as(dx, x), channel_sum(dy * reshape_as(normalized, x)), channel_sum(dy)


GROUP_NORM_TRAINING = SemanticOperator(
    "GroupNormTraining",
    ("x", "scale", "bias"),
    ("y", "mean", "inverse_std", "shift", "centered"),
    _layer_and_statistics,
    shares_memory={"centered": "x"},
    gradient=group_norm_training_gradient,
    lowering=lower_group_norm_training,
)
GROUP_NORM_GRAD = SemanticOperator(
    "GroupNormGrad",
    ("dy", "x", "scale", "bias", "mean", "inverse_std", "shift", "centered"),
    ("dx", "dscale", "dbias"),
    like("x", "scale", "scale"),
    gradient=group_norm_double_backward,
    lowering=lower_group_norm_grad,
)

OPERATORS = [
    Operator(
        "GroupNormalization",
        since=21,
        training_form=group_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        reopen=reopen_rules.images,
    ),
    Operator(
        "InstanceNormalization",
        since=6,
        training_form=instance_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        mixes=axis_rules.places_of_instance,
        reopen=reopen_rules.images,
    ),
    Operator(
        "MeanVarianceNormalization",
        since=9,
        training_form=mean_variance_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        reopen=reopen_rules.over_axes,
    ),
    GROUP_NORM_TRAINING,
    GROUP_NORM_GRAD,
]

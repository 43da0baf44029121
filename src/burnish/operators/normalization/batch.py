"""Batch normalization: training and frozen, its gradient, and their lowering to standard operators.

Training mode is the semantic operator ``burnish.BatchNormTraining``: unlike the standard's operator it returns the statistics
for the backward. ``burnish.modes`` replaces ``BatchNormalization`` with it and computes the running statistics.

    BatchNormTraining(x, scale, bias; epsilon) -> y, mean, inverse_std, variance, centered, shift
    BatchNormGrad(dy, x, scale, mean, inverse_std, centered, shift) -> dx, dscale, dbias

``centered`` is x minus some value near the mean of each channel and ``shift`` [C] is the mean of that difference. Together they
give x - mean to the last bits, which x and a rounded mean do not. The lowered backward reads these and does not keep x; a
kernel that computes with x and mean may omit both.

Batch renormalization uses the statistics of the batch, corrected toward the running ones (Ioffe 2017).

With μ, σ the running mean and standard deviation and μ_B, σ_B those of the batch, both with epsilon under the root:
``r = clip(σ_B / σ, 1 / r_max, r_max)``, ``d = clip((μ_B - μ) / σ, -d_max, d_max)``, ``y = scale (x̂ r + d) + bias``. No gradient
passes through r and d, so the layer is batch normalization with the scale ``scale r`` and the bias ``scale d + bias``.

    BatchRenormTraining(x, scale, bias, running_mean, running_variance, r_max, d_max; epsilon) -> the outputs of BatchNormTraining

r_max and d_max are scalars with the dtype of the statistics.

Ghost batch normalization uses statistics over groups of samples (Hoffer, Hubara and Soudry 2017).
"""

from __future__ import annotations

from copy import copy
from functools import partial

import numpy as np

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder, Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.normalization.statistics import (
    channel_affine,
    channel_axes,
    channel_mean,
    channel_sum,
    elements_per_channel,
    has_short_runs,
    per_channel,
)
from burnish.operators.positions import extent, joined, known_rank, reshape_as, reshape_to
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like


def batch_norm_training(
    builder: Builder, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize ``x`` [N, C, ...] with the statistics of the batch.

    Returns:
        y like x; mean, inverse standard deviation and population variance, each [C]:
        ``y = scale * (x - mean) * inverse_std + bias`` with ``inverse_std = 1 / sqrt(variance + epsilon)``
        (Ioffe and Szegedy 2015; ONNX BatchNormalization-15 with training_mode=1).
    """
    y, mean, inverse_std, variance, *_ = BATCH_NORM_TRAINING.emit(x, scale, bias, builder=builder, epsilon=epsilon)
    return y, mean, inverse_std, variance


def batch_norm_training_gradient(
    op: Operation,
    dy: Tensor | None,
    d_mean: Tensor | None,
    dinverse_std_of: Tensor | None,
    d_variance: Tensor | None,
    d_centered: Tensor | None,
    d_shift: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradient through the batch statistics; cotangents of the statistics themselves add their own terms.

    Only centered - shift is read from ``centered`` and ``shift``, so the value subtracted from x counts as a constant.
    """
    x, scale = op.required(0), op.required(1)
    builder = op.builder
    mean, inverse_std, centered, shift = (op.outputs[index] for index in (1, 2, 4, 5))
    dx: Tensor | None = None
    dscale: Tensor | None = None
    dbias: Tensor | None = None
    if dy is not None:
        dx, dscale, dbias = BATCH_NORM_GRAD.emit(dy, x, scale, mean, inverse_std, centered, shift)
    if d_centered is not None:
        dx = d_centered if dx is None else dx + d_centered
    if d_mean is None and dinverse_std_of is None and d_variance is None and d_shift is None:
        return dx, dscale, dbias
    count = elements_per_channel(x)
    deviation = centered - per_channel(shift, x)
    for cotangent, factor in (
        (d_mean, None),
        (d_shift, None),
        (d_variance, 2.0),
        (dinverse_std_of, -(inverse_std * inverse_std * inverse_std)),
    ):
        if cotangent is None:
            continue
        weight = cotangent / count
        if factor is None:
            term = builder.op("Expand", per_channel(weight, x), builder.op("Shape", x), like=x)
        else:
            term = deviation * per_channel(weight * factor, x)
        dx = term if dx is None else dx + term
    return dx, dscale, dbias


def batch_normalization(op: Operation, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient with frozen statistics: mean and variance are constants; scale, bias and x have gradients."""
    if op.attribute("training_mode", 0):
        raise UnsupportedOperatorError(
            f"{op} is in training mode and was not bound to a mode before differentiation: "
            "differentiate through burnish.grad or burnish.compile"
        )
    x, scale, mean, variance = op.required(0), op.required(1), op.required(3), op.required(4)
    known_rank(op, x)
    # The standard allows different dtypes for x, the affine pair and the statistics; the widest of x and the statistics is used.
    wide = max(x.dtype, variance.dtype, key=lambda dtype: dtype.itemsize)
    dtypes = [tensor.dtype for tensor in (x, scale, scale, mean, variance)]
    dy, x, scale, mean, variance = (op.builder.cast(tensor, wide) for tensor in (dy, x, scale, mean, variance))
    inverse_std = inverse_std_of(variance, op.attribute("epsilon", 1e-5))
    dx = dy * per_channel(scale * inverse_std, x) if op.wants(0) else None
    dbias = channel_sum(dy) if any(map(op.wants, (2, 3))) else None
    weighted = None
    if op.wants(1) or op.wants(4):
        is_centered = mean.array is not None and not np.any(mean.array)
        weighted = channel_sum(dy * (x if is_centered else x - per_channel(mean, x)))
    dscale = weighted * inverse_std if weighted is not None and op.wants(1) else None
    dmean = -(scale * inverse_std * dbias) if op.wants(3) and dbias is not None else None
    dvariance = None
    if weighted is not None and op.wants(4):
        dvariance = scale * inverse_std * inverse_std * inverse_std * weighted * -0.5
    gradients = (dx, dscale, dbias, dmean, dvariance)
    return tuple(None if d is None else op.builder.cast(d, dtype) for d, dtype in zip(gradients, dtypes, strict=True))


def lower_batch_norm_training(op: Operation) -> tuple[Tensor, ...]:
    """Compute statistics and result from centered values, so that a large mean costs no digits (Chan, Golub, LeVeque 1983).

    If the sums are short, x minus the mean of rows of the first sample goes through the standard operator: its x * a + b is then
    exact to the last bits, and with momentum 0 its running outputs are the batch's own statistics.
    """
    x = op.required(0)
    return _by_standard_operator(op) if known_rank(op, x) > 2 and has_short_runs(x) else _by_corrected_two_pass(op)


def _by_standard_operator(op: Operation) -> tuple[Tensor, ...]:
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    epsilon = op.attribute("epsilon")
    pilot = builder.op("ReduceMean", _sampled(x), builder.integers(channel_axes(x)), keepdims=0, like=scale)
    # The running inputs must not be constants. ONNX Runtime writes the running outputs over the running inputs, initializers
    # included, and merges equal initializers: layers with the same number of channels would overwrite each other's statistics.
    zeros = pilot - pilot
    centered = x - per_channel(pilot, x)
    y, shift, variance = builder.op(
        "BatchNormalization",
        centered,
        scale,
        bias,
        zeros,
        zeros + 1,
        outputs=3,
        like=x,
        epsilon=epsilon,
        momentum=0.0,
        training_mode=1,
    )
    for statistic in (shift, variance):
        statistic.value.type, statistic.value.shape = scale.value.type, scale.value.shape
    return y, pilot + shift, inverse_std_of(variance, epsilon), variance, centered, shift


def _sampled(x: Tensor) -> Tensor:
    """Return the first sample of ``x`` [N, C, ...]; for images or volumes with many rows, only every fourth or second row.

    The mean over M of the N elements of a channel is within sqrt(N / M) standard deviations of the mean over all.
    """
    builder, step = x.builder, max(1, min(4, (x.dimension(2) or 0) // 8 if (x.rank or 0) > 3 else 1))
    if step == 1:
        return builder.op("Slice", x, builder.integers([0]), builder.integers([1]), builder.integers([0]))
    ends = builder.integers([1, np.iinfo(np.int64).max])
    return builder.op("Slice", x, builder.integers([0, 0]), ends, builder.integers([0, 2]), builder.integers([1, step]))


def _by_corrected_two_pass(op: Operation) -> tuple[Tensor, ...]:
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    mean = channel_mean(x)
    centered = x - per_channel(mean, x)
    shift = channel_mean(centered)
    variance = op.builder.op("Max", channel_mean(centered * centered) - shift * shift, 0)
    inverse_std = inverse_std_of(variance, op.attribute("epsilon"))
    gain = scale * inverse_std
    y = channel_affine(centered, gain, bias - shift * gain)
    return y, mean + shift, inverse_std, variance, centered, shift


def lower_batch_norm_grad(op: Operation) -> tuple[Tensor, ...]:
    """The gradient, with r the inverse std and means over the N elements of a channel (Ioffe and Szegedy 2015, section 3):

    dbias = sum(dy); dscale = r sum(dy (x - mean)); dx = scale r (dy - dbias / N - (x - mean) r dscale / N).

    x - mean is ``centered - shift``. The shift is small compared with the std, and is subtracted from the sums instead of from
    every element.
    """
    dy, scale, inverse_std, centered, shift = (op.required(index) for index in (0, 2, 4, 5, 6))
    count = elements_per_channel(centered)
    dbias = channel_sum(dy)
    dscale = (channel_sum(dy * centered) - shift * dbias) * inverse_std
    gain = scale * inverse_std
    slope = gain * inverse_std * dscale / count
    offset = gain * dbias / count - slope * shift
    return dy * per_channel(gain, dy) - channel_affine(centered, slope, offset), dscale, dbias


def inverse_std_of(variance: Tensor, epsilon: float) -> Tensor:
    return variance.builder.op("Reciprocal", variance.builder.op("Sqrt", variance + epsilon))


def batch_renorm_training_gradient(op: Operation, dy: Tensor | None, *statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of batch normalization with the scale ``scale r``, and dscale = r Σ dy x̂ + d Σ dy."""
    r, d = correction(op, op.outputs[1], op.outputs[2])
    normalization = copy(op)
    normalization.inputs = (op.required(0), op.required(1) * r, op.required(2))
    dx, dgain, dbias = batch_norm_training_gradient(normalization, dy, *statistics)
    dscale = None if dgain is None or dbias is None else dgain * r + dbias * d
    return dx, dscale, dbias


def lower_batch_renorm_training(op: Operation) -> tuple[Tensor, ...]:
    x, scale, bias = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    channels = scale.dimension(0)
    if channels is None:
        zeros = scale - scale
        ones = zeros + 1
    else:
        zeros, ones = (builder.constant(np.full(channels, number, scale.dtype.numpy())) for number in (0, 1))
    normalized, mean, inverse_std, _ = batch_norm_training(builder, x, ones, zeros, op.attribute("epsilon"))
    normalization = normalized.value.producer()
    assert normalization is not None
    r, d = correction(op, mean, inverse_std)
    y = channel_affine(normalized, scale * r, bias + scale * d)
    return y, *(builder.tensor(value) for value in normalization.outputs[1:])


def correction(op: Operation, mean: Tensor, inverse_std: Tensor) -> tuple[Tensor, Tensor]:
    """Emit r and d, each [C], from the statistics of the batch that BatchRenormTraining corrects."""
    running_mean, running_variance, r_max, d_max = (op.required(index) for index in range(3, 7))
    builder = op.builder
    running_inverse_std = inverse_std_of(running_variance, op.attribute("epsilon"))
    lowest = builder.op("Reciprocal", r_max)
    r = builder.op("Min", builder.op("Max", running_inverse_std / inverse_std, lowest), r_max, like=mean)
    d = builder.op("Min", builder.op("Max", (mean - running_mean) * running_inverse_std, -d_max), d_max, like=mean)
    return r, d


def ghost_batch_norm_training(
    builder: Builder, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize ``x`` [N, C, ...] with the statistics of groups of ``size`` consecutive samples; ``size`` divides N.

    The groups become channels, [size, N / size * C, ...], so that the layer itself is batch normalization.

    Returns:
        y like x; the means over the groups of their means and of their population variances, each [C]; and the number of
        elements per channel of one group, a scalar.
    """
    if x.rank is None:
        raise UnsupportedOperatorError(
            f"ghost batch normalization: the rank of its input '{x.name}' is not known; declare the shapes of the model's inputs"
        )
    sizes = [x.dimension(axis) or partial(extent, x, axis) for axis in range(1, x.rank)]
    batch, channels = x.dimension(0), x.dimension(1)
    groups = None if batch is None else batch // size
    count = builder.integers([groups]) if groups is not None else extent(x, 0) / size
    by_group = reshape_to(x, [groups or (lambda: count), size, *sizes])
    exchange = [1, 0, *range(2, x.rank + 1)]
    exchanged = builder.op("Transpose", by_group, perm=exchange)
    merged = None if groups is None or channels is None else groups * channels
    side_by_side = reshape_to(exchanged, [size, merged or (lambda: count * extent(x, 1)), *sizes[1:]])
    rows = joined(builder, [count, extent(x, 1)])
    y, means, _, variances = batch_norm_training(builder, side_by_side, _tiled(scale, rows), _tiled(bias, rows), epsilon)
    back = builder.op("Transpose", reshape_as(y, exchanged), perm=exchange, like=by_group)
    mean, variance = (_mean_over_groups(statistic, rows, scale) for statistic in (means, variances))
    return reshape_as(back, x), mean, variance, elements_per_channel(side_by_side)


def _tiled(vector: Tensor, rows: Tensor) -> Tensor:
    """Repeat [C] for every group: [groups * C]; ``rows`` is [groups, C]."""
    builder = vector.builder
    return builder.op("Reshape", builder.op("Expand", vector, rows), builder.integers([-1]))


def _mean_over_groups(statistics: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Average [groups * C] over the groups: [C]; ``rows`` is [groups, C]."""
    builder = statistics.builder
    return builder.op("ReduceMean", builder.op("Reshape", statistics, rows), builder.integers([0]), keepdims=0, like=like)


BATCH_NORM_TRAINING = SemanticOperator(
    "BatchNormTraining",
    ("x", "scale", "bias"),
    ("y", "mean", "inverse_std", "variance", "centered", "shift"),
    like("x", "scale", "scale", "scale", "x", "scale"),
    shares_memory={"centered": "x"},
    gradient=batch_norm_training_gradient,
    lowering=lower_batch_norm_training,
)
BATCH_NORM_GRAD = SemanticOperator(
    "BatchNormGrad",
    ("dy", "x", "scale", "mean", "inverse_std", "centered", "shift"),
    ("dx", "dscale", "dbias"),
    like("x", "scale", "scale"),
    lowering=lower_batch_norm_grad,
)
BATCH_RENORM_TRAINING = SemanticOperator(
    "BatchRenormTraining",
    ("x", "scale", "bias", "running_mean", "running_variance", "r_max", "d_max"),
    BATCH_NORM_TRAINING.outputs,
    BATCH_NORM_TRAINING.infer,
    gradient=batch_renorm_training_gradient,
    lowering=lower_batch_renorm_training,
)

OPERATORS = [
    Operator(
        "BatchNormalization",
        since=14,
        gradient=batch_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        reopen=reopen_rules.images,
    ),
    BATCH_NORM_TRAINING,
    BATCH_NORM_GRAD,
    BATCH_RENORM_TRAINING,
]

"""Batch normalization by statistics that come from elsewhere: the parts of it that lie before and behind an exchange of them.

A worker takes the moments of its own part of the batch, workers exchange them, and each normalizes its part by what they come to:

    BatchNormMoments(x) -> moments, pivot             float64 [1 + 2 C]: count, means, sums of squares about them; and [C]
    BatchNormApply(x, pivot, shift, gain, bias) -> y          (x - pivot - shift) gain + bias
    BatchNormGradSums(dy, x, pivot, shift) -> sums            float64 [2 C]: Σ dy and Σ dy (x - pivot - shift)
    BatchNormGradApply(dy, x, pivot, gain, slope, offset) -> dx        dy gain + (x - pivot) slope + offset

``pivot`` [C] is near the mean of the worker's part, and ``pivot + shift`` is the mean of all: together they hold x - mean to the
last bits, which x and a rounded mean do not. A worker without samples has count 0, and means and sums of 0.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Tensor
from burnish.ops.normalization.statistics import channel_affine, channel_sum, elements_per_channel, per_channel
from burnish.ops.registry import Operation, lowering

DOUBLE = ir.DataType.DOUBLE


def moments_of(x: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Emit the moments of ``x`` [N, C, ...] and the pivot [C]; ``channels`` is any value of shape [C]."""
    extent = channels.dimension(0)
    moments, pivot = x.builder.op(
        "BatchNormMoments",
        x,
        domain=BURNISH_DOMAIN,
        outputs=2,
        dtype=DOUBLE,
        shape=[None if extent is None else 1 + 2 * extent],
    )
    pivot.value.type, pivot.value.shape = channels.value.type, channels.value.shape
    return moments, pivot


def merged(gathered: Tensor, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Emit what the moments of several parts come to.

    Args:
        gathered: float64 [parts, 1 + 2 C].
        channels: any value of shape [C].

    Returns:
        In float64 the count, [1], and mean and population variance, [C] each; both 0 where there is nothing at all. By the
        formulas of Chan, Golub and LeVeque 1983 for all parts at once: ``mean = Σ n_r mean_r / n`` and
        ``M2 = Σ M2_r + n_r (mean_r - mean)²``.
    """
    builder = gathered.builder
    axis, first, one = builder.integers([0]), builder.integers([1]), builder.integers([1])
    extent = builder.op("Shape", channels)
    second = extent + 1
    counts = builder.op("Slice", gathered, builder.integers([0]), one, first)
    means = builder.op("Slice", gathered, one, second, first)
    squares = builder.op("Slice", gathered, second, second + extent, first)
    count = builder.op("ReduceSum", counts, axis, keepdims=0, shape=[1])
    divisor = builder.op("Max", count, 1.0)
    rough = builder.op("ReduceSum", counts * means, axis, keepdims=0, shape=channels.shape) / divisor
    # The means differ by little, and rounding the large sum of them costs more than rounding that of their differences.
    mean = rough + builder.op("ReduceSum", counts * (means - rough), axis, keepdims=0, shape=channels.shape) / divisor
    away = means - mean
    variance = builder.op("ReduceSum", squares + counts * away * away, axis, keepdims=0, shape=channels.shape) / divisor
    return count, mean, variance


def applied(x: Tensor, pivot: Tensor, shift: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Emit ``(x - pivot - shift) gain + bias``; vectors are [C]."""
    return x.builder.op("BatchNormApply", x, pivot, shift, gain, bias, domain=BURNISH_DOMAIN, like=x)


def gradient_sums(dy: Tensor, x: Tensor, pivot: Tensor, shift: Tensor) -> Tensor:
    """Emit ``Σ dy`` and, behind it, ``Σ dy (x - pivot - shift)``, float64 [2 C]."""
    extent = pivot.dimension(0)
    return dy.builder.op(
        "BatchNormGradSums",
        *(dy, x, pivot, shift),
        domain=BURNISH_DOMAIN,
        dtype=DOUBLE,
        shape=[None if extent is None else 2 * extent],
    )


def halves(sums: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Emit the two halves of [2 C], [C] each."""
    builder = sums.builder
    extent, axis = builder.op("Shape", channels), builder.integers([0])
    first = builder.op("Slice", sums, builder.integers([0]), extent, axis, shape=channels.shape)
    return first, builder.op("Slice", sums, extent, extent + extent, axis, shape=channels.shape)


def applied_gradient(dy: Tensor, x: Tensor, pivot: Tensor, gain: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Emit ``dy gain + (x - pivot) slope + offset``; vectors are [C]."""
    return dy.builder.op("BatchNormGradApply", dy, x, pivot, gain, slope, offset, domain=BURNISH_DOMAIN, like=dy)


@lowering("BatchNormMoments")
def lower_moments(op: Operation) -> tuple[Tensor, Tensor]:
    x = op.required(0)
    builder = op.builder
    count = elements_per_channel(x)
    divisor = builder.op("Max", count, 1.0)
    pivot = channel_sum(x) / divisor
    centered = x - per_channel(pivot, x)
    shift = channel_sum(centered) / divisor
    squares = builder.op("Max", channel_sum(centered * centered) - shift * shift * count, 0.0)
    mean = builder.cast(pivot, DOUBLE) + builder.cast(shift, DOUBLE)
    number = builder.op("Reshape", builder.cast(count, DOUBLE), builder.integers([1]))
    return builder.op("Concat", number, mean, builder.cast(squares, DOUBLE), axis=0), pivot


@lowering("BatchNormApply")
def lower_applied(op: Operation) -> Tensor:
    x, pivot, shift, gain, bias = (op.required(index) for index in range(5))
    return channel_affine(x - per_channel(pivot, x), gain, bias - shift * gain)


@lowering("BatchNormGradSums")
def lower_gradient_sums(op: Operation) -> Tensor:
    dy, x, pivot, shift = (op.required(index) for index in range(4))
    builder = op.builder
    total = builder.cast(channel_sum(dy), DOUBLE)
    products = builder.cast(channel_sum(dy * (x - per_channel(pivot, x))), DOUBLE)
    return builder.op("Concat", total, products - builder.cast(shift, DOUBLE) * total, axis=0)


@lowering("BatchNormGradApply")
def lower_applied_gradient(op: Operation) -> Tensor:
    dy, x, pivot, gain, slope, offset = (op.required(index) for index in range(6))
    return dy * per_channel(gain, dy) + channel_affine(x - per_channel(pivot, x), slope, offset)

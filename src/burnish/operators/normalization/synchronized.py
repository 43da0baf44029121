"""Batch normalization with exchanged statistics: its parts before and after the exchange between workers.

A worker computes the moments of its part of the batch, workers exchange them, and each normalizes its part with the result:

    BatchNormMoments(x) -> moments, pivot             float64 [1 + 2 C]: count, means, sums of squares about them; and [C]
    BatchNormMerge(gathered, scale; epsilon)          the statistics from the moments of all parts
        -> count, center, precise, mean, inverse_std, variance, gain
    BatchNormApply(x, pivot, center, gain, bias) -> y         (x - center) gain + bias
    BatchNormGradSums(dy, x, pivot, center) -> sums           float64 [2 C]: Σ dy and Σ dy (x - center)
    BatchNormGradMerge(total, count, precise, scale)  the gradient's terms from the sums over all parts
        -> slope, offset, dscale, dbias
    BatchNormGradApply(dy, x, pivot, center, gain, slope, offset) -> dx     dy gain + (x - center) slope + offset

``center``, the mean over all parts, and ``precise``, the inverse deviation, both [C], and ``count`` [1] are float64; ``gain`` is
the scale times the inverse deviation, and all other vectors have the dtype of the scale. ``pivot`` [C] is near the mean of the
worker's part: (x - pivot) - (center - pivot) gives x - mean to the last bits, which x and a rounded mean do not. A worker
without samples has count 0, and means and sums of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.operators.normalization.statistics import channel_affine, channel_sum, elements_per_channel, per_channel
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like

DOUBLE = ir.DataType.DOUBLE


def _sums(channels: int | None, ahead: int = 0) -> OutputType:
    """A float64 vector of two blocks [C], after ``ahead`` more numbers."""
    return OutputType(DOUBLE, ir.Shape([None if channels is None else ahead + 2 * channels]))


def _moments(operands: Operands) -> list[OutputType]:
    x = operands["x"]
    channels = ir.Shape([None if x.shape is None else x.shape.dims[1]])
    return [_sums(x.dimension(1), ahead=1), OutputType(x.dtype, channels)]


def _merged(operands: Operands) -> list[OutputType]:
    scale = OutputType.of(operands["scale"])
    wide = OutputType(DOUBLE, scale.shape)
    return [OutputType(DOUBLE, ir.Shape([1])), wide, wide, scale, scale, scale, scale]


@dataclass(frozen=True)
class Statistics:
    """The results of BatchNormMerge: [C] of the layer's dtype unless noted. The mean and variance of no elements are 0.

    Attributes:
        count: float64 [1], the elements per channel.
        center, precise: mean and inverse standard deviation, float64.
        mean, inverse_std, variance: of the population, with epsilon under the root.
        gain: the scale times the inverse standard deviation.
    """

    count: Tensor
    center: Tensor
    precise: Tensor
    mean: Tensor
    inverse_std: Tensor
    variance: Tensor
    gain: Tensor


def halves(sums: Tensor, channels: Tensor) -> tuple[Tensor, Tensor]:
    builder = sums.builder
    extent, axis = builder.op("Shape", channels), builder.integers([0])
    first = builder.op("Slice", sums, builder.integers([0]), extent, axis, shape=channels.shape)
    return first, builder.op("Slice", sums, extent, extent + extent, axis, shape=channels.shape)


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


def lower_merged(op: Operation) -> tuple[Tensor, ...]:
    """The formulas of Chan, Golub and LeVeque 1983 for all parts at once.

    ``mean = Σ n_r mean_r / n`` and ``M2 = Σ M2_r + n_r (mean_r - mean)²``.
    """
    gathered, scale = op.required(0), op.required(1)
    builder = op.builder
    axis, first, one = builder.integers([0]), builder.integers([1]), builder.integers([1])
    extent = builder.op("Shape", scale)
    second = extent + 1
    counts = builder.op("Slice", gathered, builder.integers([0]), one, first)
    means = builder.op("Slice", gathered, one, second, first)
    squares = builder.op("Slice", gathered, second, second + extent, first)
    count = builder.op("ReduceSum", counts, axis, keepdims=0, shape=[1])
    divisor = builder.op("Max", count, 1.0)
    rough = builder.op("ReduceSum", counts * means, axis, keepdims=0, shape=scale.shape) / divisor
    # The means differ by little, and rounding their large sum costs more than rounding the sum of their differences.
    mean = rough + builder.op("ReduceSum", counts * (means - rough), axis, keepdims=0, shape=scale.shape) / divisor
    away = means - mean
    variance = builder.op("ReduceSum", squares + counts * away * away, axis, keepdims=0, shape=scale.shape) / divisor
    precise = 1.0 / builder.op("Sqrt", variance + op.attribute("epsilon"))
    narrow = (mean, precise, variance, builder.cast(scale, DOUBLE) * precise)
    return count, mean, precise, *(builder.cast(tensor, scale.dtype) for tensor in narrow)


def lower_applied(op: Operation) -> Tensor:
    x, pivot, center, gain, bias = (op.required(index) for index in range(5))
    return channel_affine(x - per_channel(pivot, x), gain, bias - _from_pivot(center, pivot) * gain)


def lower_gradient_sums(op: Operation) -> Tensor:
    dy, x, pivot, center = (op.required(index) for index in range(4))
    builder = op.builder
    total = builder.cast(channel_sum(dy), DOUBLE)
    products = builder.cast(channel_sum(dy * (x - per_channel(pivot, x))), DOUBLE)
    return builder.op("Concat", total, products - (center - builder.cast(pivot, DOUBLE)) * total, axis=0)


def lower_merged_gradient(op: Operation) -> tuple[Tensor, ...]:
    """With r the inverse deviation, w the scale, S1 = Σ dy and S2 = Σ dy (x - mean) over n elements: ``slope = -w r³ S2 / n``,
    ``offset = -w r S1 / n``, ``dscale = r S2``, ``dbias = S1`` (Ioffe and Szegedy 2015, section 3).
    """
    total, count, precise, scale = (op.required(index) for index in range(4))
    builder = op.builder
    flow, products = halves(total, scale)
    divisor = builder.op("Max", count, 1.0)
    gain = builder.cast(scale, DOUBLE) * precise
    results = (-(gain * precise * precise * products / divisor), -(gain * flow / divisor), products * precise, flow)
    return tuple(builder.cast(tensor, scale.dtype) for tensor in results)


def lower_applied_gradient(op: Operation) -> Tensor:
    dy, x, pivot, center, gain, slope, offset = (op.required(index) for index in range(7))
    offset = offset - slope * _from_pivot(center, pivot)
    return dy * per_channel(gain, dy) + channel_affine(x - per_channel(pivot, x), slope, offset)


def _from_pivot(center: Tensor, pivot: Tensor) -> Tensor:
    builder = pivot.builder
    return builder.cast(center - builder.cast(pivot, DOUBLE), pivot.dtype)


BATCH_NORM_MOMENTS = SemanticOperator("BatchNormMoments", ("x",), ("moments", "pivot"), _moments, lowering=lower_moments)
BATCH_NORM_MERGE = SemanticOperator(
    "BatchNormMerge",
    ("gathered", "scale"),
    ("count", "center", "precise", "mean", "inverse_std", "variance", "gain"),
    _merged,
    lowering=lower_merged,
)
BATCH_NORM_APPLY = SemanticOperator(
    "BatchNormApply", ("x", "pivot", "center", "gain", "bias"), ("y",), like("x"), lowering=lower_applied
)
BATCH_NORM_GRAD_SUMS = SemanticOperator(
    "BatchNormGradSums",
    ("dy", "x", "pivot", "center"),
    ("sums",),
    lambda operands: [_sums(operands["pivot"].dimension(0))],
    lowering=lower_gradient_sums,
)
BATCH_NORM_GRAD_MERGE = SemanticOperator(
    "BatchNormGradMerge",
    ("total", "count", "precise", "scale"),
    ("slope", "offset", "dscale", "dbias"),
    like("scale", "scale", "scale", "scale"),
    lowering=lower_merged_gradient,
)
BATCH_NORM_GRAD_APPLY = SemanticOperator(
    "BatchNormGradApply",
    ("dy", "x", "pivot", "center", "gain", "slope", "offset"),
    ("dx",),
    like("dy"),
    lowering=lower_applied_gradient,
)

OPERATORS = [
    BATCH_NORM_MOMENTS,
    BATCH_NORM_MERGE,
    BATCH_NORM_APPLY,
    BATCH_NORM_GRAD_SUMS,
    BATCH_NORM_GRAD_MERGE,
    BATCH_NORM_GRAD_APPLY,
]

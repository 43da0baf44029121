"""Random numbers from a key: uniform, normal, Bernoulli and multinomial as in the standard, and a symmetric beta.

They use the same words as masks (``burnish.random.draws``): a number depends only on the key, the stream and its place.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.random.draws import uniform_bits
from burnish.random.places import ALIKE, NOT_NOTED, Numbered

# A second word per element comes from a stream that no node has.
_SECOND = 2**31


def uniform(
    builder: Builder,
    key: Tensor,
    stream: int,
    like: Tensor,
    dtype: ir.DataType,
    low: float = 0.0,
    high: float = 1.0,
    numbered: Numbered = NOT_NOTED,
) -> Tensor:
    """Emit numbers with a uniform distribution over [low, high).

    They are multiples of 2**-24 of the interval (2**-32 in float64), rounded to ``dtype``; rounding may give ``high`` itself.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of this consumer of the key, from 0 to 2**31 - 1.
        like: a tensor with the shape of the result.
        dtype: float16, bfloat16, float32 or float64.
        low, high: the interval.
        numbered: see ``uniform_bits``.

    Returns:
        ``dtype``, with the shape of ``like``.
    """
    share = _share(builder, key, stream, like, dtype, numbered)
    return builder.cast(share * (high - low) + low, dtype)


def normal(
    builder: Builder,
    key: Tensor,
    stream: int,
    like: Tensor,
    dtype: ir.DataType,
    mean: float = 0.0,
    scale: float = 1.0,
    numbered: Numbered = NOT_NOTED,
) -> Tensor:
    """Emit numbers with a normal distribution, from two words each.

    ``mean + scale * sqrt(-2 ln(1 - u)) cos(2 pi v)`` with u and v uniform over [0, 1); the largest deviation is 5.8 (float64:
    6.7). Source: Box and Muller, "A note on the generation of random normal deviates", 1958.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of this consumer of the key, from 0 to 2**31 - 1.
        like: a tensor with the shape of the result.
        dtype: float16, bfloat16, float32 or float64; the smaller ones are computed in float32.
        mean: mean of the distribution.
        scale: its standard deviation.
        numbered: see ``uniform_bits``.

    Returns:
        ``dtype``, with the shape of ``like``.
    """
    radius = builder.op("Sqrt", builder.op("Log", 1.0 - _share(builder, key, stream, like, dtype, numbered)) * -2.0)
    angle = _share(builder, key, stream + _SECOND, like, dtype, numbered) * (2.0 * math.pi)
    return builder.cast(radius * builder.op("Cos", angle) * scale + mean, dtype)


def bernoulli(
    builder: Builder, key: Tensor, stream: int, probability: Tensor, dtype: ir.DataType, numbered: Numbered = NOT_NOTED
) -> Tensor:
    """Emit 1 with the given probability, otherwise 0: never 1 for probability 0, always 1 for probability 1.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of this consumer of the key, from 0 to 2**31 - 1.
        probability: floating-point, in [0, 1], one per element.
        dtype: dtype of the result.
        numbered: see ``uniform_bits``.

    Returns:
        ``dtype``, with the shape of ``probability``.
    """
    share = _share(builder, key, stream, probability, probability.dtype, numbered)
    drawn = builder.op("Less", share, builder.cast(probability, share.dtype), shape=probability.shape)
    return builder.cast(drawn, dtype)


def multinomial(
    builder: Builder,
    key: Tensor,
    stream: int,
    scores: Tensor,
    samples: int,
    dtype: ir.DataType,
    numbered: Numbered = NOT_NOTED,
) -> Tensor:
    """Emit class indices drawn with replacement, each class with probability softmax(scores).

    The index is the number of classes with a cumulative probability up to a uniform number.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of this consumer of the key, from 0 to 2**31 - 1.
        scores: logarithms of probabilities up to a constant per row, floating-point, shape [batch, classes].
        samples: number of indices per row.
        dtype: int32 or int64.
        numbered: see ``uniform_bits``, for the result.

    Returns:
        ``dtype``, shape [batch, samples], each in [0, classes).
    """
    scores = builder.cast(scores, _computed(scores.dtype))
    cumulated = builder.op("CumSum", builder.op("Softmax", scores, axis=-1), builder.scalar(-1, ir.DataType.INT64))
    total = builder.op("Slice", cumulated, builder.integers([-1]), builder.integers([2**31]), builder.integers([1]))
    below = builder.op("Slice", cumulated, builder.integers([0]), builder.integers([-1]), builder.integers([1]))
    batch = None if scores.shape is None else scores.shape.dims[0]
    place = builder.op("Expand", total, builder.integers([1, samples]), shape=[batch, samples], dtype=scores.dtype)
    point = _share(builder, key, stream, place, scores.dtype, numbered) * total
    passed = builder.op(
        "LessOrEqual",
        builder.op("Unsqueeze", below, builder.integers([1])),
        builder.op("Unsqueeze", point, builder.integers([2])),
    )
    return builder.op("ReduceSum", builder.cast(passed, dtype), builder.integers([2]), keepdims=0, shape=[batch, samples])


def _computed(dtype: ir.DataType) -> ir.DataType:
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def _share(builder: Builder, key: Tensor, stream: int, like: Tensor, dtype: ir.DataType, numbered: Numbered) -> Tensor:
    """Emit numbers in [0, 1), exact in their dtype: float64 for float64, otherwise float32, which uses 24 bits of a word."""
    words = uniform_bits(builder, key, stream, like, numbered)
    if dtype == ir.DataType.DOUBLE:
        return builder.cast(words, dtype) * 2.0**-32
    kept = builder.op("BitShift", words, 8, direction="RIGHT", like=words)
    return builder.cast(kept, ir.DataType.FLOAT) * 2.0**-24


CANDIDATES = 16
"""Candidates for a gamma number, drawn at once: each is accepted with probability 0.95 or more; all fail once in 1e20 draws."""


def symmetric_beta(builder: Builder, key: Tensor, stream: int, alpha: Tensor) -> Tensor:
    """Emit a number from Beta(alpha, alpha).

    It is ``g / (g + h)`` with g and h from Gamma(alpha) by the method of Marsaglia and Tsang ("A simple method for generating
    gamma variables", 2000): ``d v`` with ``d = a - 1/3``, ``v = (1 + n / sqrt(9 d))^3``, n normal, accepted if v is above 0
    and ``ln u < n^2 / 2 + d - d v + d ln v``. Here ``a`` is alpha + 1, and a factor ``u^(1 / alpha)`` corrects the result, in
    logarithms, so that small alphas do not underflow.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: number of this consumer of the key; it also uses the next two.
        alpha: float32 scalar, above 0.

    Returns:
        float32 scalar in [0, 1].
    """
    dtype = ir.DataType.FLOAT
    each = builder.constant(np.zeros((2, CANDIDATES), np.float32))
    d = alpha + (1 - 1 / 3)
    n = normal(builder, key, stream, each, dtype, numbered=ALIKE)
    cube = 1.0 + n / builder.op("Sqrt", d * 9.0)
    v = cube * cube * cube
    log_v = builder.op("Log", builder.op("Max", v, float(np.finfo(np.float32).tiny)))
    log_u = builder.op("Log", 1.0 - uniform(builder, key, stream + 1, each, dtype, numbered=ALIKE))
    accepted = builder.op("Less", log_u, n * n * 0.5 + d - d * v + d * log_v)
    accepted = builder.op("And", accepted, builder.op("Greater", v, 0.0))
    # ArgMax gives the first of equal numbers: the first accepted candidate.
    first = builder.op("ArgMax", builder.cast(accepted, dtype), axis=1, keepdims=1)
    log_gamma = builder.op("GatherElements", log_v, first, axis=1)
    pair = builder.constant(np.zeros((2, 1), np.float32))
    log_gamma = log_gamma + builder.op("Log", 1.0 - uniform(builder, key, stream + 2, pair, dtype, numbered=ALIKE)) / alpha
    g, h = (builder.op("Gather", log_gamma, builder.integers([index]), axis=0) for index in (0, 1))
    return builder.op("Reshape", builder.op("Sigmoid", g - h), builder.integers([]))

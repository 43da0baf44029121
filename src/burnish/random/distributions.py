"""Numbers drawn from a key: uniform, normal, Bernoulli, multinomial as the standard defines them, and of a symmetric beta.

Made of the same words as masks (``burnish.random.draws``): a number depends on the key, the stream and its element's place alone.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.random.draws import uniform_bits
from burnish.random.places import ALIKE, NOT_NOTED, Numbered

# What needs a second word for an element takes it from a stream that no node is given.
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
    """Emit numbers spread evenly over [low, high).

    They are multiples of 2**-24 of the interval (2**-32 in float64), rounded to ``dtype``, where ``high`` itself may come up.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: which consumer of the key this is, from 0 to 2**31 - 1.
        like: the tensor whose shape the result has.
        dtype: float16, bfloat16, float32 or float64.
        low, high: the interval.
        numbered: as ``uniform_bits`` takes it.

    Returns:
        ``dtype``, of the shape of ``like``.
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
    """Emit numbers of a normal distribution, two words for each.

    ``mean + scale * sqrt(-2 ln(1 - u)) cos(2 pi v)`` with u and v uniform over [0, 1); the largest deviation is 5.8 (float64:
    6.7). Source: Box and Muller, "A note on the generation of random normal deviates", 1958.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: which consumer of the key this is, from 0 to 2**31 - 1.
        like: the tensor whose shape the result has.
        dtype: float16, bfloat16, float32 or float64; the smaller ones are computed in float32.
        mean: of the distribution.
        scale: its standard deviation.
        numbered: as ``uniform_bits`` takes it.

    Returns:
        ``dtype``, of the shape of ``like``.
    """
    radius = builder.op("Sqrt", builder.op("Log", 1.0 - _share(builder, key, stream, like, dtype, numbered)) * -2.0)
    angle = _share(builder, key, stream + _SECOND, like, dtype, numbered) * (2.0 * math.pi)
    return builder.cast(radius * builder.op("Cos", angle) * scale + mean, dtype)


def bernoulli(
    builder: Builder, key: Tensor, stream: int, probability: Tensor, dtype: ir.DataType, numbered: Numbered = NOT_NOTED
) -> Tensor:
    """Emit 1 with the given probability, else 0: never for probability 0, always for probability 1.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: which consumer of the key this is, from 0 to 2**31 - 1.
        probability: floating-point, in [0, 1], one per element.
        dtype: of the result.
        numbered: as ``uniform_bits`` takes it.

    Returns:
        ``dtype``, of the shape of ``probability``.
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

    The index is the number of classes whose cumulated probability is at most a uniform number.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: which consumer of the key this is, from 0 to 2**31 - 1.
        scores: logarithms of probabilities up to a constant of the row, floating-point, shape [batch, classes].
        samples: how many indices to draw for every row.
        dtype: int32 or int64.
        numbered: as ``uniform_bits`` takes it, of the result.

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
    """Emit numbers in [0, 1), exact in their dtype: float64 for float64, else float32, whose 24 digits take 24 bits of a word."""
    words = uniform_bits(builder, key, stream, like, numbered)
    if dtype == ir.DataType.DOUBLE:
        return builder.cast(words, dtype) * 2.0**-32
    kept = builder.op("BitShift", words, 8, direction="RIGHT", like=words)
    return builder.cast(kept, ir.DataType.FLOAT) * 2.0**-24


CANDIDATES = 16
"""Of a gamma distribution, drawn at once: each is accepted with probability 0.95 or more, none of them once in 1e20."""


def symmetric_beta(builder: Builder, key: Tensor, stream: int, alpha: Tensor) -> Tensor:
    """Emit a number of Beta(alpha, alpha).

    It is ``g / (g + h)`` with g and h of Gamma(alpha), each by the method of Marsaglia and Tsang ("A simple method for generating
    gamma variables", 2000): ``d v`` with ``d = a - 1/3``, ``v = (1 + n / sqrt(9 d))^3``, n normal, accepted where v is above 0
    and ``ln u < n^2 / 2 + d - d v + d ln v``. ``a`` is alpha + 1, and the result is brought back by ``u^(1 / alpha)``, in
    logarithms, so that small alphas do not underflow.

    Args:
        builder: emits into the graph.
        key: uint32, shape [2].
        stream: which consumer of the key this is; the two after it are taken too.
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
    # Of equal numbers ArgMax gives the first.
    first = builder.op("ArgMax", builder.cast(accepted, dtype), axis=1, keepdims=1)
    log_gamma = builder.op("GatherElements", log_v, first, axis=1)
    pair = builder.constant(np.zeros((2, 1), np.float32))
    log_gamma = log_gamma + builder.op("Log", 1.0 - uniform(builder, key, stream + 2, pair, dtype, numbered=ALIKE)) / alpha
    g, h = (builder.op("Gather", log_gamma, builder.integers([index]), axis=0) for index in (0, 1))
    return builder.op("Reshape", builder.op("Sigmoid", g - h), builder.integers([]))

"""Shares drawn from a key: a number of a symmetric beta distribution."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.random.distributions import normal, uniform
from burnish.random.places import ALIKE

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

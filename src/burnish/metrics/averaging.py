"""Means over classes, some of which may not appear at all."""

from __future__ import annotations

import math

import numpy as np

from burnish.graph import Tensor
from burnish.metrics.base import divide


def mean_over_classes(values: Tensor, weights: Tensor) -> Tensor:
    """Emit ``sum(weights * values) / sum(weights)`` of vectors, a scalar; NaN where every weight is 0.

    Args:
        values: floating-point; finite also where the weight is 0.
        weights: int64, not negative.
    """
    builder = values.builder
    weights = builder.cast(weights, values.dtype)
    total, weight = (builder.op("ReduceSum", part, keepdims=0) for part in (values * weights, weights))
    return divide(total, weight, math.nan)


def mean_over_classes_of(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the same of arrays."""
    weight = weights.sum()
    return float((values * weights).sum() / weight) if weight else math.nan

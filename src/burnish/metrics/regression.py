"""Regression metrics: absolute and squared errors, and R²."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import Compared
from burnish.losses.base import check_same_shape
from burnish.metrics.base import COUNT, SUM, MetricBase, Quotient, divide, divided, does_not_fit, quotient, wide, widened

SQUARES = "squares"
LEAST_SPREAD = 1e-14
"""Share of the sum of squares below which the spread is rounding, of equal values."""


@dataclass(frozen=True)
class MeanAbsoluteError(Quotient):
    """Mean over all elements of |prediction - target|."""

    word: ClassVar[str] = "mean_absolute_error"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        difference = _difference(self.name, compared)
        builder = difference.builder
        total = builder.op("ReduceSum", builder.op("Abs", difference), keepdims=0)
        return {SUM: total, COUNT: builder.op("Size", compared.prediction)}


@dataclass(frozen=True)
class MeanSquaredError(Quotient):
    """Mean over all elements of (prediction - target)²."""

    word: ClassVar[str] = "mean_squared_error"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        return {SUM: _squares(self.name, compared), COUNT: compared.prediction.builder.op("Size", compared.prediction)}


@dataclass(frozen=True)
class RootMeanSquaredError(MetricBase):
    """The square root of the mean over all elements of (prediction - target)²."""

    word: ClassVar[str] = "root_mean_squared_error"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        elements = compared.prediction.builder.op("Size", compared.prediction)
        return {SQUARES: _squares(self.name, compared), "elements": elements}

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        builder = compared.prediction.builder
        return builder.cast(builder.op("Sqrt", quotient(totals[SQUARES], totals["elements"], wide(dtype))), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        return math.sqrt(divided(totals[SQUARES], totals["elements"]))


@dataclass(frozen=True)
class R2(MetricBase):
    """R², the coefficient of determination: 1 - the sum of (prediction - target)² over that of (target - its mean)².

    For several values per sample it is the mean over them, as in ``sklearn.metrics.r2_score``. 1 is a perfect prediction, 0 is as
    good as the mean of the targets, and below 0 is worse. Constant values have no R² and are left out; NaN if all are constant.
    Sums are in float64.
    """

    word: ClassVar[str] = "r2"
    higher_is_better: ClassVar[bool] = True

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit sums of squared errors, of targets and of their squares, float64, and the count, int64: [values] each."""
        difference, builder = _difference(self.name, compared), compared.prediction.builder
        rank = compared.label.rank
        if rank is None:
            raise ConfigurationError(f"{self.name}: the rank of '{compared.label.name}' is not known: give the output a shape")
        axes = builder.integers(range(1 if rank == 1 else rank - 1))
        error, target = (builder.cast(each, ir.DataType.DOUBLE) for each in (difference, compared.label))
        one = builder.cast(builder.op("Equal", compared.label, compared.label), ir.DataType.INT64)
        parts = {SQUARES: error * error, "targets": target, "target_squares": target * target, "elements": one}
        return {name: builder.op("ReduceSum", part, axes, keepdims=0) for name, part in parts.items()}

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        builder = compared.prediction.builder
        count = builder.cast(totals["elements"], ir.DataType.DOUBLE)
        spread = totals["target_squares"] - totals["targets"] * totals["targets"] / count
        has_spread = builder.op("Greater", spread, totals["target_squares"] * LEAST_SPREAD)
        safe = builder.op("Where", has_spread, spread, builder.scalar(1.0, spread), like=spread)
        weights = builder.cast(has_spread, ir.DataType.DOUBLE)
        shares = (1.0 - totals[SQUARES] / safe) * weights
        if shares.rank:
            shares, weights = (builder.op("ReduceSum", part, keepdims=0) for part in (shares, weights))
        return builder.cast(divide(shares, weights, math.nan), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        squares, sums, target_squares, count = (
            np.atleast_1d(np.asarray(totals[name], np.float64)) for name in (SQUARES, "targets", "target_squares", "elements")
        )
        spread = target_squares - sums * sums / np.maximum(count, 1)
        there = spread > target_squares * LEAST_SPREAD
        return float((1 - squares[there] / spread[there]).mean()) if there.any() else math.nan


def _squares(metric: str, compared: Compared) -> Tensor:
    difference = _difference(metric, compared)
    return difference.builder.op("ReduceSum", difference * difference, keepdims=0)


def _difference(metric: str, compared: Compared) -> Tensor:
    if compared.spec.name != "targets":
        raise does_not_fit(metric, "values", compared, "accuracy")
    check_same_shape(metric, compared.prediction, compared.label)
    return widened(compared.prediction) - widened(compared.label)


mean_absolute_error = MeanAbsoluteError
mean_squared_error = MeanSquaredError
root_mean_squared_error = RootMeanSquaredError
r2 = R2

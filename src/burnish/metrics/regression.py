"""Distances between values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.losses import Compared
from burnish.losses.base import check_same_shape
from burnish.metrics.base import COUNT, SUM, MetricBase, Quotient, divided, does_not_fit, quotient, wide, widened

SQUARES = "squares"


@dataclass(frozen=True)
class MeanAbsoluteError(Quotient):
    """Mean over all elements of |prediction - target|."""

    word: ClassVar[str] = "mean_absolute_error"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit the sum in the prediction's dtype (float32 for sixteen bits), and the count, int64."""
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
        """Emit the sum in the prediction's dtype (float32 for sixteen bits), and the count, int64."""
        return {SUM: _squares(self.name, compared), COUNT: compared.prediction.builder.op("Size", compared.prediction)}


@dataclass(frozen=True)
class RootMeanSquaredError(MetricBase):
    """The square root of the mean over all elements of (prediction - target)²."""

    word: ClassVar[str] = "root_mean_squared_error"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit the sum of squares in the prediction's dtype (float32 for sixteen bits), and the number of elements, int64."""
        elements = compared.prediction.builder.op("Size", compared.prediction)
        return {SQUARES: _squares(self.name, compared), "elements": elements}

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        builder = compared.prediction.builder
        return builder.cast(builder.op("Sqrt", quotient(totals[SQUARES], totals["elements"], wide(dtype))), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        return math.sqrt(divided(totals[SQUARES], totals["elements"]))


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

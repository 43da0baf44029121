"""Normalized entropy: the log loss of clicks relative to that of their average."""

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
from burnish.losses.binary_cross_entropy import bounded_log, softplus
from burnish.metrics.base import MetricBase, divide, does_not_fit, quotient, wide, widened

LOGARITHMIC_LOSS, TARGETS, QUESTIONS = "logarithmic_loss", "targets", "questions"


@dataclass(frozen=True)
class NormalizedEntropy(MetricBase):
    """The mean of ``-(y log q + (1 - y) log(1 - q))`` over that of a model that always predicts the mean p of all targets.

    The denominator is the entropy ``-(p log p + (1 - p) log(1 - p))``. Below 1, a model knows more than the frequency of clicks.
    The loss's weights do not count. NaN if all targets are 0, or all are 1. Source: He et al., "Practical lessons from predicting
    clicks on ads at Facebook", 2014.
    """

    word: ClassVar[str] = "normalized_entropy"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit the sums of log loss and targets in the prediction's dtype (float32 for sixteen bits), and the element count,
        int64.

        Raises:
            ConfigurationError: the labels are class indices, or the prediction does not answer yes-or-no questions.
        """
        if compared.spec.name != "targets":
            raise does_not_fit(self.name, "answers of yes or no", compared, "perplexity")
        if compared.scale not in ("logits", "probabilities"):
            raise ConfigurationError(
                f"{self.name}: the loss {compared.loss.name} reads no answers of yes or no: leave the metric out, or use the "
                "loss bce_with_logits"
            )
        check_same_shape(self.name, compared.prediction, compared.label)
        x, y = widened(compared.prediction), widened(compared.label)
        builder = x.builder
        if compared.scale == "logits":
            elements = (1.0 - y) * x + softplus(-x)
        else:
            elements = -(y * bounded_log(x) + (1.0 - y) * bounded_log(1.0 - x))
        return {
            LOGARITHMIC_LOSS: builder.op("ReduceSum", elements, keepdims=0),
            TARGETS: builder.op("ReduceSum", y, keepdims=0),
            QUESTIONS: builder.op("Size", compared.prediction),
        }

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        builder = compared.prediction.builder
        mean = quotient(totals[LOGARITHMIC_LOSS], totals[QUESTIONS], wide(dtype))
        p = quotient(totals[TARGETS], totals[QUESTIONS], wide(dtype))
        # The bounded logarithm makes the entropy exactly 0, instead of NaN, if all targets are equal.
        entropy = -(p * bounded_log(p) + (1.0 - p) * bounded_log(1.0 - p))
        return builder.cast(divide(mean, entropy, math.nan), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        count, positives = float(totals[QUESTIONS]), float(totals[TARGETS])
        if not 0 < positives < count:
            return math.nan
        p = positives / count
        return float(totals[LOGARITHMIC_LOSS]) / count / -(p * math.log(p) + (1 - p) * math.log1p(-p))


normalized_entropy = NormalizedEntropy

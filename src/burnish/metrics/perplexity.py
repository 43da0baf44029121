"""Perplexity: the number of equally likely classes that a prediction is undecided between, on average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import CLASS_AXIS, Compared
from burnish.metrics.base import MetricBase, divided, does_not_fit, how_many, quotient, wide, widened
from burnish.operators.loss import Labelled

NEGATIVE_LOG_LIKELIHOOD, POSITIONS = "negative_log_likelihood", "positions"


@dataclass(frozen=True)
class Perplexity(MetricBase):
    """``exp(mean of -log p[label])`` over the positions whose label is not ignored (Jelinek et al. 1977).

    p is the softmax of the logits, without the loss's weights or smoothing. The mean is over all positions of a data set, so the
    perplexity is not the mean of the batches' perplexities.
    """

    word: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit the sum of -log p[label] in the prediction's dtype (float32 for sixteen bits), and the position count, int64.

        Raises:
            ConfigurationError: the labels are not class indices, or the prediction has no probabilities.
        """
        if compared.spec.name != "labels":
            raise does_not_fit(self.name, "class indices", compared, "mean_absolute_error")
        if compared.scale not in ("logits", "log_probabilities"):
            raise ConfigurationError(
                f"{self.name}: the loss {compared.loss.name} reads scores that are no probabilities: leave the metric out, or "
                "use accuracy"
            )
        log_p = widened(compared.prediction)
        builder = log_p.builder
        if compared.scale == "logits":
            log_p = builder.op("LogSoftmax", log_p, axis=CLASS_AXIS)
        positions = Labelled(log_p, compared.label, compared.spec.ignored)
        total = builder.op("ReduceSum", positions.counted(-positions.pick(log_p)), keepdims=0)
        return {NEGATIVE_LOG_LIKELIHOOD: total, POSITIONS: how_many(positions.is_counted())}

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        builder = compared.prediction.builder
        mean = quotient(totals[NEGATIVE_LOG_LIKELIHOOD], totals[POSITIONS], wide(dtype))
        return builder.cast(builder.op("Exp", mean), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        mean = divided(totals[NEGATIVE_LOG_LIKELIHOOD], totals[POSITIONS])
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf


perplexity = Perplexity

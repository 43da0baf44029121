"""Predicted and right answers, a class or yes and no, and means over classes."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import CLASS_AXIS, Compared
from burnish.metrics.base import divide, does_not_fit
from burnish.operators.loss import Labelled
from burnish.validation import is_whole

Average = Literal["binary", "micro", "macro", "weighted"] | int
AVERAGES = ("binary", "micro", "macro", "weighted")
EVEN_ODDS = 0.5


def asks_for_a_class(metric: str, compared: Compared) -> bool:
    """Return True if labels are class indices, False if they are yes-or-no targets.

    Raises:
        ConfigurationError: they are neither.
    """
    if compared.spec.name == "labels":
        return True
    if compared.scale is None or compared.spec.minimum is None or compared.spec.maximum is None:
        raise does_not_fit(metric, "classes or yes-or-no answers", compared, "mean_absolute_error")
    return False


def labelled(compared: Compared) -> Labelled:
    """Return the class indices, without ignored ones."""
    return Labelled(compared.prediction, compared.label, compared.spec.ignored)


def best_class(prediction: Tensor) -> Tensor:
    """Emit the class with the largest score of each position, the first of equal scores; int64, of the labels' shape."""
    return prediction.builder.op("ArgMax", prediction, axis=CLASS_AXIS, keepdims=0, dtype=ir.DataType.INT64)


def is_yes(compared: Compared) -> Tensor:
    """Emit True for targets above the middle of their range; bool, of their shape."""
    minimum, maximum = compared.spec.minimum or 0, compared.spec.maximum or 0
    return compared.prediction.builder.op("Greater", compared.label, (minimum + maximum) / 2)


def says_yes(metric: str, compared: Compared, threshold: float = EVEN_ODDS) -> Tensor:
    """Emit True for predictions with a probability above ``threshold``; bool, of their shape.

    Raises:
        ConfigurationError: a threshold is given for scores, which are not probabilities.
    """
    if compared.scale == "scores" and threshold != EVEN_ODDS:
        raise ConfigurationError(
            f"{metric}: the loss {compared.loss.name} reads scores, which are a yes above 0 and have no probability to compare "
            "with a threshold: leave threshold out"
        )
    bound = threshold if compared.scale == "probabilities" else math.log(threshold / (1 - threshold))
    return compared.prediction.builder.op("Greater", compared.prediction, bound)


def check_average(metric: str, average: object) -> None:
    """Raise ConfigurationError for anything but a way of averaging over classes or a class index."""
    is_class = is_whole(average) and average >= 0
    if not is_class and average not in AVERAGES:
        raise ConfigurationError(
            f"{metric}: average must be {', '.join(map(repr, AVERAGES))} or the index of one class, not {average!r}"
        )


def check_classes(metric: str, compared: Compared, average: Average, over_indices: bool) -> None:
    """Raise ConfigurationError if a prediction does not have the classes that ``average`` needs."""
    prediction = compared.prediction
    if prediction.rank is not None and prediction.rank < 2:
        if average not in ("binary", "micro"):
            raise ConfigurationError(
                f"{metric}: the prediction '{prediction.name}' has shape {prediction.shape} and no axis of classes: "
                "use the average 'binary'"
            )
        return
    classes = prediction.dimension(CLASS_AXIS)
    if classes is None:
        return
    if average == "binary" and over_indices and classes != 2:
        raise ConfigurationError(
            f"{metric}: the average 'binary' is for two classes, and the prediction '{prediction.name}' has {classes}: "
            f"use 'macro', 'micro', 'weighted' or the index of a class, such as '{metric.partition(':')[0]}:macro'"
        )
    if isinstance(average, int) and average >= classes:
        raise ConfigurationError(
            f"{metric}: the prediction '{prediction.name}' has {classes} classes: give a class from 0 to {classes - 1}"
        )


def chosen_class(average: Average) -> int | None:
    """Return the one class that ``average`` selects; None if it uses all."""
    return 1 if average == "binary" else average if isinstance(average, int) else None


def mean_over_classes(values: Tensor, weights: Tensor) -> Tensor:
    """Emit ``sum(weights * values) / sum(weights)`` of vectors, a scalar; NaN if every weight is 0.

    Args:
        values: floating-point; finite even for weight 0.
        weights: int64, not negative.
    """
    builder = values.builder
    weights = builder.cast(weights, values.dtype)
    total, weight = (builder.op("ReduceSum", part, keepdims=0) for part in (values * weights, weights))
    return divide(total, weight, math.nan)


def mean_over_classes_of(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the same mean for arrays."""
    weight = weights.sum()
    return float((values * weights).sum() / weight) if weight else math.nan

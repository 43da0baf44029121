"""What metrics of right and wrong read: the answer of a prediction, a class or yes and no, and the right one."""

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
    """Return whether labels are class indices (True) or yes-or-no targets (False).

    Raises:
        ConfigurationError: they are neither.
    """
    if compared.spec.name == "labels":
        return True
    if compared.scale is None or compared.spec.minimum is None or compared.spec.maximum is None:
        raise does_not_fit(metric, "classes or yes-or-no answers", compared, "mean_absolute_error")
    return False


def labelled(compared: Compared) -> Labelled:
    """Return class indices, with those that are ignored left out."""
    return Labelled(compared.prediction, compared.label, compared.spec.ignored)


def best_class(prediction: Tensor) -> Tensor:
    """Emit the class of the largest score of each position, the first where scores tie; int64, of the labels' shape."""
    return prediction.builder.op("ArgMax", prediction, axis=CLASS_AXIS, keepdims=0, dtype=ir.DataType.INT64)


def is_yes(compared: Compared) -> Tensor:
    """Emit which yes-or-no targets are a yes: those above the middle of their range; bool, of their shape."""
    minimum, maximum = compared.spec.minimum or 0, compared.spec.maximum or 0
    return compared.prediction.builder.op("Greater", compared.label, (minimum + maximum) / 2)


def says_yes(metric: str, compared: Compared, threshold: float = EVEN_ODDS) -> Tensor:
    """Emit which elements of the prediction are a yes: a probability above ``threshold``; bool, of its shape.

    Raises:
        ConfigurationError: a threshold for scores, which are no probabilities.
    """
    if compared.scale == "scores" and threshold != EVEN_ODDS:
        raise ConfigurationError(
            f"{metric}: the loss {compared.loss.name} reads scores, which are a yes above 0 and have no probability to compare "
            "with a threshold: leave threshold out"
        )
    bound = threshold if compared.scale == "probabilities" else math.log(threshold / (1 - threshold))
    return compared.prediction.builder.op("Greater", compared.prediction, bound)


def check_average(metric: str, average: object) -> None:
    """Raise ConfigurationError for what is no way of averaging over classes, and no class."""
    is_class = is_whole(average) and average >= 0
    if not is_class and average not in AVERAGES:
        raise ConfigurationError(
            f"{metric}: average must be {', '.join(map(repr, AVERAGES))} or the index of one class, not {average!r}"
        )


def check_classes(metric: str, compared: Compared, average: Average, over_indices: bool) -> None:
    """Raise ConfigurationError where a prediction has no such classes as ``average`` asks for."""
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
    """Return the one class of class indices that ``average`` is about; None where it is about all."""
    return 1 if average == "binary" else average if isinstance(average, int) else None


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

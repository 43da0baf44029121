"""Metrics: what is reported beside the loss, as functions of totals that add up over batches, replicas and clients.

One file per family, on what is in ``base``: ``answers`` says what a prediction answers and what is right, ``averaging`` takes
means over classes. What is minimized is in ``burnish.losses``; how totals of batches are added up is in ``burnish.training``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from burnish.errors import ConfigurationError
from burnish.metrics.accuracy import Accuracy, TopK, accuracy, top_k
from burnish.metrics.auc import AreaUnderCurve, auc
from burnish.metrics.base import COUNT, SUM, Metric, MetricBase, Quotient, output_name, total_of
from burnish.metrics.perplexity import Perplexity, perplexity
from burnish.metrics.retrieval import F1, Precision, Recall, f1, precision, recall
from burnish.metrics.values import (
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    mean_absolute_error,
    mean_squared_error,
    root_mean_squared_error,
)
from burnish.settings import call_hint

__all__ = [
    "COUNT",
    "F1",
    "METRICS",
    "SUM",
    "Accuracy",
    "AreaUnderCurve",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "MetricBase",
    "Perplexity",
    "Precision",
    "Quotient",
    "Recall",
    "RootMeanSquaredError",
    "TopK",
    "accuracy",
    "auc",
    "f1",
    "get",
    "higher_is_better",
    "is_known",
    "mae",
    "mean_absolute_error",
    "mean_squared_error",
    "mse",
    "output_name",
    "perplexity",
    "precision",
    "recall",
    "rmse",
    "root_mean_squared_error",
    "top_k",
    "total_of",
]

mae = mean_absolute_error
mse = mean_squared_error
rmse = root_mean_squared_error

METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": accuracy,
    "auc": auc,
    "f1": f1,
    "mean_absolute_error": mean_absolute_error,
    "mae": mean_absolute_error,
    "mean_squared_error": mean_squared_error,
    "mse": mean_squared_error,
    "perplexity": perplexity,
    "precision": precision,
    "recall": recall,
    "root_mean_squared_error": root_mean_squared_error,
    "rmse": root_mean_squared_error,
    "top_k": top_k,
}
"""Metrics by name. One of your own stands here before a program that was saved with it is opened."""


def get(metric: str | Metric) -> Metric:
    """Return the metric of a text, or the metric object itself.

    The text is a name, with settings behind a colon and commas between them; the first may stand alone: ``f1:macro``,
    ``auc:average=macro,bins=1024``, ``top_k:5``, for which ``top_5`` is another way to write.

    Raises:
        ConfigurationError: there is no metric of that name, or no such setting.
    """
    there_is = f"there is {', '.join(sorted(METRICS.keys() - {'top_k'}))}, top_<k>"
    if isinstance(metric, str):
        name, _, settings = (part.strip() for part in metric.partition(":"))
        prefix, _, k = name.rpartition("_")
        if prefix == "top" and k.isdecimal() and not settings:
            return TopK(int(k))
        if name not in METRICS:
            raise ConfigurationError(f"there is no metric '{metric}'; {there_is}")
        return METRICS[name](**_settings(metric, name, settings))
    if isinstance(metric, Metric) and not isinstance(metric, type):
        return metric
    given = f"{metric!r}{call_hint(metric)}" if call_hint(metric) else type(metric).__name__
    raise ConfigurationError(f"a metric is a name or an object of burnish.metrics, not {given}; {there_is}")


def is_known(metric: Metric) -> bool:
    """Return whether a metric is found again by its name."""
    try:
        return get(metric.name) == metric
    except ConfigurationError:
        return False


def higher_is_better(figure: str) -> bool:
    """Return whether of two figures of this name the larger is the better; the smaller is where it names no metric: the loss."""
    try:
        return get(figure).higher_is_better
    except ConfigurationError:
        return False


def _settings(metric: str, name: str, text: str) -> dict[str, Any]:
    parameters = inspect.signature(METRICS[name]).parameters
    settings: dict[str, Any] = {}
    for position, part in enumerate(filter(None, text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals and position == 0 and parameters:
            key, value = next(iter(parameters)), key
        if key not in parameters:
            has = f"it has {', '.join(parameters)}" if parameters else "it has none"
            raise ConfigurationError(f"metric '{metric}': {name} has no setting '{part.strip()}'; {has}")
        if key in settings:
            raise ConfigurationError(f"metric '{metric}' gives {key} twice: give it once")
        settings[key] = _value(value)
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in settings:
            raise ConfigurationError(f"metric '{metric}': {name} needs {key}: write '{name}:<{key}>'")
    return settings


def _value(text: str) -> int | float | str:
    """A number, or the text as it stands, which the metric then refuses by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

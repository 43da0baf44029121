"""Metrics: figures reported with the loss, as functions of totals that add up over batches, replicas and clients.

There is one file per family; ``base`` holds the shared parts. ``classification`` determines a prediction's answer and the right
one, and averages over classes. ``burnish.losses`` holds the functions to minimize; ``burnish.training`` adds up the totals of
batches.
"""

from __future__ import annotations

from burnish.errors import ConfigurationError
from burnish.metrics.accuracy import Accuracy, TopK, accuracy, top_k
from burnish.metrics.auc import AreaUnderCurve, auc
from burnish.metrics.average_precision import CocoAveragePrecision, VocAveragePrecision, coco_map, voc_map
from burnish.metrics.base import COUNT, SUM, Metric, MetricBase, Quotient, is_of_rows, output_name, rows_name, total_of
from burnish.metrics.normalized_entropy import NormalizedEntropy, normalized_entropy
from burnish.metrics.perplexity import Perplexity, perplexity
from burnish.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    mean_absolute_error,
    mean_squared_error,
    r2,
    root_mean_squared_error,
)
from burnish.metrics.retrieval import F1, MeanIntersectionOverUnion, Precision, Recall, f1, mean_iou, precision, recall
from burnish.registry import Registry
from burnish.settings import is_natural_text

__all__ = [
    "COUNT",
    "F1",
    "METRICS",
    "R2",
    "SUM",
    "Accuracy",
    "AreaUnderCurve",
    "CocoAveragePrecision",
    "MeanAbsoluteError",
    "MeanIntersectionOverUnion",
    "MeanSquaredError",
    "Metric",
    "MetricBase",
    "NormalizedEntropy",
    "Perplexity",
    "Precision",
    "Quotient",
    "Recall",
    "RootMeanSquaredError",
    "TopK",
    "VocAveragePrecision",
    "accuracy",
    "auc",
    "coco_map",
    "f1",
    "get",
    "higher_is_better",
    "is_known",
    "is_of_rows",
    "mae",
    "mean_absolute_error",
    "mean_iou",
    "mean_squared_error",
    "mse",
    "normalized_entropy",
    "output_name",
    "perplexity",
    "precision",
    "r2",
    "recall",
    "rmse",
    "root_mean_squared_error",
    "rows_name",
    "top_k",
    "total_of",
    "voc_map",
]

mae = mean_absolute_error
mse = mean_squared_error
rmse = root_mean_squared_error

METRICS: Registry[Metric] = Registry(
    "metric",
    {
        "accuracy": accuracy,
        "pixel_accuracy": accuracy,
        "auc": auc,
        "coco_map": coco_map,
        "mean_iou": mean_iou,
        "voc_map": voc_map,
        "f1": f1,
        "mean_absolute_error": mean_absolute_error,
        "mae": mean_absolute_error,
        "mean_squared_error": mean_squared_error,
        "mse": mean_squared_error,
        "normalized_entropy": normalized_entropy,
        "perplexity": perplexity,
        "precision": precision,
        "r2": r2,
        "recall": recall,
        "root_mean_squared_error": root_mean_squared_error,
        "rmse": root_mean_squared_error,
        "top_k": top_k,
    },
    home="burnish.metrics",
    is_made=lambda given: isinstance(given, Metric),
    bare=True,
)
"""Metrics by name. Register your own metrics here before opening a program that was saved with them."""


def get(metric: str | Metric) -> Metric:
    """Return the metric of a name, or the metric object itself.

    The name may be followed by a colon and comma-separated settings, the first of them without its name: ``f1:macro``,
    ``auc:average=macro,bins=1024``, ``top_k:5``. ``top_5`` is short for ``top_k:5``.

    Raises:
        ConfigurationError: there is no metric of that name, or no such setting.
    """
    prefix, _, k = metric.rpartition("_") if isinstance(metric, str) else ("", "", "")
    return METRICS.resolve(f"top_k:{k}" if prefix == "top" and is_natural_text(k) else metric)


def is_known(metric: Metric) -> bool:
    """True if ``get`` returns an equal metric for the metric's name."""
    try:
        return get(metric.name) == metric
    except ConfigurationError:
        return False


def higher_is_better(figure: str) -> bool:
    """True if larger figures of this metric are better; False for the loss."""
    try:
        return get(figure).higher_is_better
    except ConfigurationError:
        return False

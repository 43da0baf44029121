"""Metrics: figures that add up over batches, as a sum over a count.

Counts, and sums of yes-or-no, are int64 and so exact however large the data set; sums of values have the prediction's dtype.
Who divides casts both. A figure that is no such quotient (an area under a curve) has no place here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import CLASS_AXIS, Loss


@runtime_checkable
class Metric(Protocol):
    """A figure that is reported beside the loss."""

    @property
    def name(self) -> str:
        """Name of the output."""
        ...

    def terms(self, prediction: Tensor, label: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        """Emit (sum, count), two scalars: the sum int64 or of the prediction's dtype, the count int64.

        Args:
            prediction: what the loss reads.
            label: what the loss compares it with.
            loss: says which labels are ignored.

        Raises:
            ConfigurationError: the metric does not fit what the loss compares with.
        """
        ...


@dataclass(frozen=True)
class Accuracy:
    """Share of positions whose largest score along axis 1 is the label's; the first where scores tie.

    Positions with an ignored label are not counted.
    """

    @property
    def name(self) -> str:
        return "accuracy"

    def terms(self, prediction: Tensor, label: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        builder = prediction.builder
        counted = _counted(self.name, prediction, label, loss)
        best = builder.op("ArgMax", prediction, axis=CLASS_AXIS, keepdims=0, dtype=ir.DataType.INT64)
        return _how_many(builder.op("And", builder.op("Equal", best, label), counted)), _how_many(counted)


@dataclass(frozen=True)
class TopK:
    """Share of positions whose label is among the k largest scores along axis 1; the first where scores tie.

    Positions with an ignored label are not counted.
    """

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigurationError(f"top_k: k must be at least 1, not {self.k}")

    @property
    def name(self) -> str:
        return f"top_{self.k}"

    def terms(self, prediction: Tensor, label: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        builder = prediction.builder
        counted = _counted(self.name, prediction, label, loss)
        classes = prediction.dimension(CLASS_AXIS)
        if classes is not None and self.k > classes:
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has {classes} classes: choose k of at most {classes}"
            )
        _, indices = builder.op("TopK", prediction, builder.integers([self.k]), axis=CLASS_AXIS, outputs=2)
        expected = builder.op("Unsqueeze", label, builder.integers([CLASS_AXIS]))
        hit = builder.cast(builder.op("Equal", indices, expected), ir.DataType.INT64)
        # The k indices of a position differ, so that at most one of them is the label.
        hits = builder.op("ReduceSum", hit, builder.integers([CLASS_AXIS]), keepdims=0)
        total = builder.op("ReduceSum", hits * builder.cast(counted, ir.DataType.INT64), keepdims=0)
        return total, _how_many(counted)


@dataclass(frozen=True)
class MeanAbsoluteError:
    """Mean over all elements of |prediction - target|."""

    @property
    def name(self) -> str:
        return "mean_absolute_error"

    def terms(self, prediction: Tensor, label: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        difference = _difference(self.name, prediction, label, loss)
        builder = prediction.builder
        return builder.op("ReduceSum", builder.op("Abs", difference), keepdims=0), builder.op("Size", prediction)


@dataclass(frozen=True)
class MeanSquaredError:
    """Mean over all elements of (prediction - target)²."""

    @property
    def name(self) -> str:
        return "mean_squared_error"

    def terms(self, prediction: Tensor, label: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
        difference = _difference(self.name, prediction, label, loss)
        builder = prediction.builder
        return builder.op("ReduceSum", difference * difference, keepdims=0), builder.op("Size", prediction)


def accuracy() -> Accuracy:
    """Return the share of right answers; see ``Accuracy``."""
    return Accuracy()


def top_k(k: int) -> TopK:
    """Return the share of labels among the k best answers; see ``TopK``."""
    return TopK(k)


def mean_absolute_error() -> MeanAbsoluteError:
    """Return the mean absolute error; see ``MeanAbsoluteError``."""
    return MeanAbsoluteError()


def mean_squared_error() -> MeanSquaredError:
    """Return the mean squared error; see ``MeanSquaredError``."""
    return MeanSquaredError()


METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": Accuracy,
    "mean_absolute_error": MeanAbsoluteError,
    "mae": MeanAbsoluteError,
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
}


def get(metric: str | Metric) -> Metric:
    """Return the metric of a name (``top_5`` for any k), or the metric object itself.

    Raises:
        ConfigurationError: there is no metric of that name.
    """
    there_is = f"there is {', '.join(sorted(METRICS))}, top_<k>"
    if isinstance(metric, str):
        prefix, _, k = metric.rpartition("_")
        if prefix == "top" and k.isdecimal():
            return TopK(int(k))
        if metric not in METRICS:
            raise ConfigurationError(f"there is no metric '{metric}'; {there_is}")
        return METRICS[metric]()
    if isinstance(metric, Metric):
        return metric
    raise ConfigurationError(f"a metric is a name or an object of burnish.metrics, not {type(metric).__name__}; {there_is}")


def _counted(name: str, prediction: Tensor, label: Tensor, loss: Loss) -> Tensor:
    """Emit which positions count, bool, of the labels' shape."""
    (spec,) = loss.label_specs((prediction,))
    if spec.name != "labels":
        raise ConfigurationError(
            f"{name} compares class indices, and the loss {loss.name} compares values: leave the metric out, or use "
            "mean_absolute_error"
        )
    builder = prediction.builder
    if spec.ignored is None:
        return builder.op("Equal", label, label)
    return builder.op("Not", builder.op("Equal", label, spec.ignored))


def _difference(name: str, prediction: Tensor, label: Tensor, loss: Loss) -> Tensor:
    (spec,) = loss.label_specs((prediction,))
    if spec.name != "targets":
        raise ConfigurationError(
            f"{name} compares values, and the loss {loss.name} compares class indices: leave the metric out, or use accuracy"
        )
    return prediction - label


def _how_many(condition: Tensor) -> Tensor:
    """Emit how many elements are true, int64 scalar."""
    builder = condition.builder
    return builder.op("ReduceSum", builder.cast(condition, ir.DataType.INT64), keepdims=0)

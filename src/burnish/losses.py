"""Losses: what training minimizes, as a sum of terms over a sum of weights, in operators that autodiff differentiates.

``loss = total / weight``, both kept apart so that batches, replicas and clients of any size add up exactly. ``average`` is
that division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor, same_shape

Reduction = Literal["mean", "sum"]

CLASS_AXIS = 1


@dataclass(frozen=True)
class LabelSpec:
    """What a loss compares the prediction with.

    Attributes:
        name: name of the graph input, ``labels`` (class indices) or ``targets`` (values).
        dtype: ONNX element type.
        shape: extents; a string is a symbolic dimension (the batch), None an unknown one.
        minimum, maximum: for class indices, the smallest and largest that are valid; None where that is not known.
        ignored: for class indices, the one value outside that range that is valid too.
    """

    name: str
    dtype: ir.DataType
    shape: tuple[int | str | None, ...]
    minimum: int | None = None
    maximum: int | None = None
    ignored: int | None = None


@runtime_checkable
class Loss(Protocol):
    """A loss: two scalars of the prediction's dtype, the sum of the terms and the sum of their weights."""

    @property
    def name(self) -> str:
        """How the loss is asked for."""
        ...

    @property
    def label_name(self) -> str:
        """``labels`` (class indices, int64) or ``targets`` (values)."""
        ...

    def label_entry(self, prediction: Tensor) -> LabelSpec:
        """Return name, dtype and shape of the label input that goes with a prediction."""
        ...

    def terms(self, prediction: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Emit the sum of the loss terms and the sum of the weights; the loss is their quotient (``average``)."""
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values; ``get`` builds the loss from them again."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross-entropy from logits ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``; the class axis is 1.

    With log p = LogSoftmax(logits), y the label, w the class weights (1 where none are given) and s the smoothing::

        term   = (1 - s) * w[y] * -log p[y]  +  s / C * sum_c w[c] * -log p[c]
        loss   = sum(term) / sum(w[y])      over the positions whose label is not ignore_index

    These are the semantics of ``torch.nn.functional.cross_entropy``, with one difference: where every label of a batch is
    ignored, the sum of weights is 0 and PyTorch's mean is NaN; ``average`` gives loss 0 and gradients 0.

    Attributes:
        ignore_index: positions with this label add neither a term nor a weight.
        label_smoothing: share s of the target that is spread evenly over all classes, in [0, 1].
        weight: one finite number >= 0 per class, or None.
        reduction: ``mean`` as above; ``sum`` leaves the division out (the sum of weights is the constant 1).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    weight: tuple[float, ...] | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        _check_reduction(self.name, self.reduction)
        if not _is_number(self.label_smoothing) or not 0.0 <= self.label_smoothing <= 1.0:
            raise ConfigurationError(f"{self.name}: label_smoothing must be between 0 and 1, not {self.label_smoothing!r}")
        if not isinstance(self.ignore_index, int):
            raise ConfigurationError(f"{self.name}: ignore_index must be an integer, not {self.ignore_index!r}")
        if self.weight is None:
            return
        if not all(_is_number(number) and number >= 0 for number in self.weight):
            raise ConfigurationError(f"{self.name}: weight must hold finite numbers that are not negative, not {self.weight}")
        object.__setattr__(self, "weight", tuple(float(number) for number in self.weight))

    @property
    def name(self) -> str:
        return "cross_entropy"

    @property
    def label_name(self) -> str:
        return "labels"

    def options(self) -> dict[str, Any]:
        settings = asdict(self)
        settings["weight"] = None if self.weight is None else list(self.weight)
        return {"name": self.name, **settings}

    def label_entry(self, prediction: Tensor) -> LabelSpec:
        """Return the spec of ``labels``: the prediction's shape without the class axis, int64, 0 to C - 1.

        Raises:
            ConfigurationError: the prediction is not floating-point, has no class axis, or not one class per weight.
        """
        shape = _floating_shape(self.name, prediction)
        if len(shape) < 2:
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has shape {list(shape)}, and classes are read along axis 1: "
                "the model must give [batch, classes, ...]; add a batch axis, or name another output (outputs=...)"
            )
        classes = shape[CLASS_AXIS]
        if isinstance(classes, int) and self.weight is not None and len(self.weight) != classes:
            raise ConfigurationError(
                f"{self.name}: weight has {len(self.weight)} numbers, and the prediction '{prediction.name}' has "
                f"{classes} classes: give one number per class"
            )
        maximum = classes - 1 if isinstance(classes, int) else None
        return LabelSpec(
            self.label_name,
            ir.DataType.INT64,
            (*shape[:CLASS_AXIS], *shape[CLASS_AXIS + 1 :]),
            minimum=0,
            maximum=maximum,
            ignored=self.ignore_index,
        )

    def terms(self, prediction: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Emit (total, weight), scalars of the prediction's dtype.

        Args:
            prediction: logits ``[N, C, d1, ...]``, floating-point.
            label: class indices ``[N, d1, ...]``, int64, each in [0, C) or ``ignore_index``.

        Raises:
            ConfigurationError: as ``label_entry``.
        """
        self.label_entry(prediction)
        builder = prediction.builder
        log_p = builder.op("LogSoftmax", prediction, axis=CLASS_AXIS)
        ignored = builder.op("Equal", label, self.ignore_index)
        # An ignored label may be no class at all; class 0 stands in for it and its term is dropped below.
        index = builder.op("Where", ignored, builder.scalar(0, label), label, like=label)
        picked = builder.op("GatherElements", log_p, builder.op("Unsqueeze", index, builder.integers([1])), axis=CLASS_AXIS)
        term = builder.op("Squeeze", picked, builder.integers([1]), shape=label.shape)
        label_weight: Tensor | None = None
        if self.weight is not None:
            class_weight = builder.constant(np.asarray(self.weight, dtype=prediction.dtype.numpy()))
            label_weight = builder.op("Gather", class_weight, index, axis=0, shape=label.shape)
            term = label_weight * term
        if self.label_smoothing:
            smooth = self._smooth(log_p)
            term = term * (1.0 - self.label_smoothing) + smooth * self.label_smoothing
        zero = builder.scalar(0.0, prediction)
        total = builder.op("ReduceSum", builder.op("Where", ignored, zero, -term, like=term), keepdims=0)
        if self.reduction == "sum":
            return total, builder.scalar(1.0, prediction)
        if label_weight is None:
            counted = builder.cast(builder.op("Not", ignored), prediction.dtype)
        else:
            counted = builder.op("Where", ignored, zero, label_weight, like=label_weight)
        return total, builder.op("ReduceSum", counted, keepdims=0)

    def _smooth(self, log_p: Tensor) -> Tensor:
        """Emit the mean over all C classes of w[c] * log p[c], of the labels' shape."""
        builder = log_p.builder
        if self.weight is not None and log_p.rank is not None:
            shape = (-1, *([1] * (log_p.rank - 2)))
            log_p = log_p * builder.constant(np.asarray(self.weight, dtype=log_p.dtype.numpy()).reshape(shape))
        return builder.op("ReduceMean", log_p, builder.integers([CLASS_AXIS]), keepdims=0)


@dataclass(frozen=True)
class MeanSquaredError:
    """Mean over all elements of (prediction - target)², as ``torch.nn.functional.mse_loss``.

    Attributes:
        reduction: ``mean`` over every element of the batch, or ``sum`` (the sum of weights is then the constant 1).
    """

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        _check_reduction(self.name, self.reduction)

    @property
    def name(self) -> str:
        return "mean_squared_error"

    @property
    def label_name(self) -> str:
        return "targets"

    def options(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    def label_entry(self, prediction: Tensor) -> LabelSpec:
        """Return the spec of ``targets``: dtype and shape of the prediction.

        Raises:
            ConfigurationError: the prediction is not floating-point.
        """
        return LabelSpec(self.label_name, prediction.dtype, _floating_shape(self.name, prediction))

    def terms(self, prediction: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Emit (sum of squares, number of elements), scalars of the prediction's dtype; both inputs have one shape.

        Raises:
            ConfigurationError: the prediction is not floating-point, or the shapes are known to differ.
        """
        _floating_shape(self.name, prediction)
        _check_same_shape(self.name, prediction, label)
        builder = prediction.builder
        difference = prediction - label
        total = builder.op("ReduceSum", difference * difference, keepdims=0)
        if self.reduction == "sum":
            return total, builder.scalar(1.0, prediction)
        return total, builder.cast(builder.op("Size", prediction), prediction.dtype)


def cross_entropy(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    weight: Sequence[float] | None = None,
    reduction: Reduction = "mean",
) -> CrossEntropy:
    """Return softmax cross-entropy from logits over class indices; see ``CrossEntropy``."""
    return CrossEntropy(ignore_index, label_smoothing, None if weight is None else tuple(weight), reduction)


def mean_squared_error(*, reduction: Reduction = "mean") -> MeanSquaredError:
    """Return the mean squared error over values; see ``MeanSquaredError``."""
    return MeanSquaredError(reduction)


LOSSES: dict[str, type[CrossEntropy] | type[MeanSquaredError]] = {
    "cross_entropy": CrossEntropy,
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
}


def get(loss: str | Mapping[str, Any] | Loss) -> Loss:
    """Return the loss of a name, of the options that a loss gave (``Loss.options``), or the loss object itself.

    Raises:
        ConfigurationError: there is no loss of that name, or no such option.
    """
    if isinstance(loss, str):
        return _named(loss)()
    if isinstance(loss, Mapping):
        settings = {key: value for key, value in loss.items() if key != "name"}
        try:
            return _named(str(loss.get("name")))(**settings)
        except TypeError as error:
            raise ConfigurationError(f"loss '{loss.get('name')}': {error}; it was given the options {settings}") from error
    if isinstance(loss, Loss):
        return loss
    raise ConfigurationError(
        f"loss must be a name or a loss object of burnish.losses, not {type(loss).__name__}; there is {', '.join(sorted(LOSSES))}"
    )


def average(total: Tensor, weight: Tensor) -> Tensor:
    """Emit ``total / weight``, and 0 (with gradient 0) where nothing was counted: both are 0 in a batch of ignored labels."""
    builder = total.builder
    nothing = builder.op("Equal", weight, 0.0)
    return total / builder.op("Where", nothing, builder.scalar(1.0, weight), weight, like=weight)


def _named(name: str) -> type[CrossEntropy] | type[MeanSquaredError]:
    if name not in LOSSES:
        raise ConfigurationError(f"there is no loss '{name}'; there is {', '.join(sorted(LOSSES))}")
    return LOSSES[name]


def _check_reduction(name: str, reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"{name}: reduction must be 'mean' or 'sum', not {reduction!r}")


def _is_number(number: object) -> bool:
    return isinstance(number, int | float | np.number) and math.isfinite(float(number))


def _floating_shape(name: str, prediction: Tensor) -> tuple[int | str | None, ...]:
    if not prediction.dtype.is_floating_point():
        raise ConfigurationError(
            f"{name}: the prediction '{prediction.name}' is {prediction.dtype.name}, not floating-point: "
            "name the output that holds the model's scores or values (outputs=...)"
        )
    if prediction.shape is None:
        raise ConfigurationError(
            f"{name}: the shape of the prediction '{prediction.name}' is not known, not even its rank: "
            "give the model's output a shape, in which any dimension may be symbolic"
        )
    return tuple(dimension if isinstance(dimension, int) else dimension.value for dimension in prediction.shape.dims)


def _check_same_shape(name: str, prediction: Tensor, label: Tensor) -> None:
    if prediction.shape is None or label.shape is None or same_shape(prediction.shape, label.shape):
        return
    left, right = prediction.shape.dims, label.shape.dims
    pairs = zip(left, right, strict=False)
    if len(left) != len(right) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        raise ConfigurationError(
            f"{name}: the prediction '{prediction.name}' has shape {prediction.shape} and '{label.name}' {label.shape}: "
            "they must be the same, and are not broadcast"
        )

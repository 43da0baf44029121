"""Losses over class indices: softmax cross-entropy, negative log-likelihood, divergence, and their helpers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    SOFTMAX,
    Compared,
    ElementwiseLoss,
    Extents,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Scale,
    Term,
    check_reduction,
    check_same_shape,
    floating_shape,
    samples_of,
    sum_of,
)
from burnish.operators.loss import CLASS_AXIS, SOFTMAX_CROSS_ENTROPY, Labelled, class_count
from burnish.settings import plain
from burnish.validation import is_number, is_whole, require


def classified_shape(
    loss: str,
    prediction: Tensor,
    weight: Sequence[float] | None = None,
    option: str = "weight",
    class_axis: int = CLASS_AXIS,
) -> Extents:
    """Return the extents of a prediction ``[N, C, d1, ...]`` with its classes along ``class_axis`` (1 or -1).

    ``weight``, if given, holds one number per class; ``option`` names it in errors.

    Raises:
        ConfigurationError: the prediction is not floating-point, has no class axis, or not one class per weight.
    """
    shape = floating_shape(loss, prediction)
    if len(shape) < 2:
        expected = "[batch, classes, ...]" if class_axis == CLASS_AXIS else "[batch, ..., classes]"
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' has shape {list(shape)}, and classes are read along axis {class_axis}: "
            f"the model must give {expected}; add a batch axis, or name another output (outputs=...)"
        )
    classes = shape[class_axis]
    if isinstance(classes, int) and weight is not None and len(weight) != classes:
        raise ConfigurationError(
            f"{loss}: {option} has {len(weight)} numbers, and the prediction '{prediction.name}' has "
            f"{classes} classes: give one number per class"
        )
    return shape


def class_labels(
    loss: str,
    prediction: Tensor,
    ignored: int | None,
    weight: Sequence[float] | None = None,
    class_axis: int = CLASS_AXIS,
) -> LabelSpec:
    """Return the spec of ``labels``: the prediction's shape without the class axis, int64, 0 to C - 1.

    Raises:
        ConfigurationError: the prediction is not floating-point, has no class axis, or not one class per weight.
    """
    shape = classified_shape(loss, prediction, weight, class_axis=class_axis)
    axis = class_axis % len(shape)
    classes = shape[axis]
    return LabelSpec(
        "labels",
        ir.DataType.INT64,
        (*shape[:axis], *shape[axis + 1 :]),
        minimum=0,
        maximum=classes - 1 if isinstance(classes, int) else None,
        ignored=ignored,
    )


def check_class_weight(loss: str, weight: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return class weights as floats.

    Raises:
        ConfigurationError: a weight is negative or not a finite number.
    """
    if weight is None:
        return None
    weight = plain(tuple(weight))
    if not all(is_number(number) and number >= 0 for number in weight):
        raise ConfigurationError(f"{loss}: weight must hold finite numbers that are not negative, not {weight}")
    return tuple(float(number) for number in weight)


def check_ignore_index(loss: str, ignore_index: object) -> None:
    """Raise ConfigurationError for anything but an integer that int64 labels can hold."""
    fits = is_whole(ignore_index) and -(2**63) <= ignore_index < 2**63
    require(fits, loss, "ignore_index", ignore_index, "an integer that int64 holds")


def class_weight_column(weight: Sequence[float], like: Tensor) -> Tensor:
    """Emit class weights as a constant that broadcasts along the class axis of ``like``."""
    assert like.rank is not None
    shape = (-1, *([1] * (like.rank - 2)))
    return like.builder.constant(np.asarray(weight, dtype=like.dtype.numpy()).reshape(shape))


def positions(prediction: Tensor) -> Tensor:
    """Emit the number of positions of ``[N, C, d1, ...]``, elements without the class axis, in the prediction's dtype."""
    builder = prediction.builder
    return builder.cast(builder.op("Size", prediction) / class_count(prediction), prediction.dtype)


LAST_AXIS = -1


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(LossBase):
    """Softmax cross-entropy from logits ``[N, C, d1, ...]``, or ``[N, d1, ..., C]`` with ``class_axis=-1``.

    With log p = LogSoftmax(logits), y the label, w the class weights (default 1) and s the smoothing, over class indices
    (``labels``, ``[N, d1, ...]``)::

        term   = (1 - s) * w[y] * -log p[y]  +  s / C * sum_c w[c] * -log p[c]
        loss   = sum(term) / sum(w[y])      over the positions whose label is not ignore_index

    and over probabilities q (``targets``, ``[N, C, d1, ...]``)::

        term   = sum_c ((1 - s) * q[c] + s / C) * w[c] * -log p[c]
        loss   = sum(term) / number of positions

    These are the semantics of ``torch.nn.functional.cross_entropy``, with one difference: if every label of a batch is ignored,
    PyTorch's mean is NaN, and here loss and gradients are 0.

    Attributes:
        ignore_index: label of positions that add neither a term nor a weight; unused for probabilities.
        label_smoothing: share s of the target that is spread evenly over all classes, in [0, 1].
        weight: one finite number >= 0 per class, or None.
        probabilities: True to compare with probabilities instead of class indices.
        class_axis: 1, or -1 for classes along the last axis, as in language models.
        reduction: ``mean`` as above; ``sum`` leaves the division out (the sum of weights is the constant 1).
    """

    name = "cross_entropy"

    ignore_index: int = -100
    label_smoothing: float = 0.0
    weight: Sequence[float] | None = None
    probabilities: bool = False
    class_axis: int = CLASS_AXIS
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        if isinstance(self.class_axis, bool) or self.class_axis not in (CLASS_AXIS, LAST_AXIS):
            raise ConfigurationError(f"{self.name}: class_axis must be 1 or -1, not {self.class_axis!r}")
        is_share = is_number(self.label_smoothing) and 0.0 <= self.label_smoothing <= 1.0
        require(is_share, self.name, "label_smoothing", self.label_smoothing, "between 0 and 1")
        check_ignore_index(self.name, self.ignore_index)
        object.__setattr__(self, "weight", check_class_weight(self.name, self.weight))

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(activation=replace(SOFTMAX, axis=self.class_axis)),)

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return () if self.probabilities else ("accuracy",)

    @property
    def scale(self) -> Scale | None:
        return None if self.probabilities else "logits"

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        (prediction,) = predictions
        if not self.probabilities:
            return (class_labels(self.name, prediction, self.ignore_index, self.weight, self.class_axis),)
        shape = self._shape(prediction)
        return (LabelSpec("targets", prediction.dtype, shape, minimum=0, maximum=1),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term.

        Args:
            predictions: logits ``[N, C, d1, ...]`` (``[N, d1, ..., C]``), floating-point.
            labels: class indices ``[N, d1, ...]``, int64, each in [0, C) or ``ignore_index``; or probabilities of the logits'
                shape and dtype.

        Raises:
            ConfigurationError: ``label_specs`` rejects the logits, or the shapes of logits and probabilities are known to differ.
        """
        self._shape(predictions[0])
        prediction, label = self._by_position(predictions[0], labels[0])
        return (self._over_probabilities(prediction, label) if self.probabilities else self._over_indices(prediction, label),)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared:
        (spec,) = self.label_specs(predictions)
        return Compared(*self._by_position(predictions[0], labels[0]), self, spec, self.scale)

    def _shape(self, prediction: Tensor) -> Extents:
        return classified_shape(self.name, prediction, self.weight, class_axis=self.class_axis)

    def _by_position(self, prediction: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return both with the classes along axis 1; with classes along the last axis, flatten to one row per position.

        Flattening moves no elements in memory, so the softmax runs along contiguous rows.
        """
        if self.class_axis == CLASS_AXIS:
            return prediction, label
        builder, last = prediction.builder, len(self._shape(prediction)) - 1
        if self.probabilities:
            check_same_shape(self.name, prediction, label)
            label = builder.op("Flatten", label, axis=last)
        else:
            label = builder.op("Reshape", label, builder.integers([-1]))
        return builder.op("Flatten", prediction, axis=last), label

    def _over_indices(self, logits: Tensor, label: Tensor) -> Term:
        builder = logits.builder
        weights = None if self.weight is None else builder.constant(np.asarray(self.weight, logits.dtype.numpy()))
        smoothing = ir.tensor(np.float64(self.label_smoothing)) if self.label_smoothing else None
        total, counted, _ = SOFTMAX_CROSS_ENTROPY.emit(
            logits, label, weights, ignore_index=self.ignore_index, smoothing=smoothing
        )
        return Term(total, builder.scalar(1.0, logits) if self.reduction == "sum" else counted)

    def _over_probabilities(self, logits: Tensor, target: Tensor) -> Term:
        check_same_shape(self.name, logits, target)
        builder = logits.builder
        log_p = builder.op("LogSoftmax", logits, axis=CLASS_AXIS)
        if self.label_smoothing:
            share = builder.scalar(self.label_smoothing, log_p) / builder.cast(class_count(log_p), log_p.dtype)
            target = target * (1.0 - self.label_smoothing) + share
        total = sum_of(-(target * self._weighted(log_p)))
        return Term(total, builder.scalar(1.0, log_p) if self.reduction == "sum" else positions(log_p))

    def _weighted(self, log_p: Tensor) -> Tensor:
        return log_p if self.weight is None else log_p * class_weight_column(self.weight, log_p)


cross_entropy = CrossEntropy


@dataclass(frozen=True, kw_only=True)
class NegativeLogLikelihood(LossBase):
    """``-w[y] * x[y]`` of log-probabilities x ``[N, C, d1, ...]`` and class indices y, as ``torch.nn.functional.nll_loss``.

    The mean divides by ``sum(w[y])`` over the positions whose label is not ignore_index; if all are ignored, the loss is 0.

    Attributes:
        ignore_index: label of positions that add neither a term nor a weight.
        weight: one finite number >= 0 per class, or None.
        reduction: ``mean`` as above; ``sum`` leaves the division out.
    """

    name = "nll"
    scale = "log_probabilities"
    readings = (Reading(takes="log_probabilities", class_axis=CLASS_AXIS),)
    default_metrics = ("accuracy",)

    ignore_index: int = -100
    weight: Sequence[float] | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        check_ignore_index(self.name, self.ignore_index)
        object.__setattr__(self, "weight", check_class_weight(self.name, self.weight))

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        return (class_labels(self.name, predictions[0], self.ignore_index, self.weight),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        (log_p,), (label,) = predictions, labels
        classified_shape(self.name, log_p, self.weight)
        labelled = Labelled(log_p, label, self.ignore_index, self.weight)
        term = labelled.pick(log_p)
        if labelled.weight is not None:
            term = labelled.weight * term
        total = sum_of(labelled.counted(-term))
        return (Term(total, log_p.builder.scalar(1.0, log_p) if self.reduction == "sum" else labelled.total_weight()),)


@dataclass(frozen=True, kw_only=True)
class KullbackLeibler(ElementwiseLoss):
    """``y * (log y - x)`` of log-probabilities x and probabilities y, as ``torch.nn.functional.kl_div``; 0 for y = 0.

    Attributes:
        log_target: True if the targets are log-probabilities too: ``exp(y) * (y - x)``.
        reduction: ``batchmean``, the divergence itself, averaged over axis 0; ``mean`` over every element, which is smaller by
            the number of elements of a sample; or ``sum``.
    """

    name = "kl_divergence"
    readings = (Reading(takes="log_probabilities"),)

    log_target: bool = False
    reduction: str = "batchmean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction, ("batchmean", "mean", "sum"))

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        (prediction,) = predictions
        if self.reduction == "batchmean" and not floating_shape(self.name, prediction):
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has no axis, and batchmean divides by the extent of axis 0: "
                "let the model give [batch, ...], or choose reduction='sum'"
            )
        (spec,) = super().label_specs(predictions)
        return (spec if self.log_target else replace(spec, minimum=0, maximum=1),)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        builder = prediction.builder
        if self.log_target:
            return builder.op("Exp", target) * (target - prediction)
        is_zero = builder.op("Equal", target, 0.0)
        # Replace 0 before the logarithm: an unselected infinity would still make the gradient NaN.
        logarithm = builder.op("Log", builder.op("Where", is_zero, builder.scalar(1.0, target), target, like=target))
        product = target * (logarithm - prediction)
        return builder.op("Where", is_zero, builder.scalar(0.0, product), product, like=product)

    def weight(self, prediction: Tensor) -> Tensor:
        if self.reduction == "batchmean":
            return samples_of(prediction, prediction.dtype)
        return super().weight(prediction)


kl_divergence = KullbackLeibler
nll = NegativeLogLikelihood

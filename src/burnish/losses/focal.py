"""Focal loss: cross-entropy in which confident right answers count for less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    SIGMOID,
    SOFTMAX,
    ElementwiseLoss,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Term,
    check_reduction,
    sum_of,
)
from burnish.losses.binary_cross_entropy import softplus
from burnish.losses.classes import check_class_weight, check_ignore_index, class_labels, classified_shape
from burnish.operators.loss import CLASS_AXIS, Labelled
from burnish.validation import check_number


@dataclass(frozen=True, kw_only=True)
class Focal(LossBase):
    """``w[y] * (1 - p[y])^gamma * -log p[y]`` of logits ``[N, C, d1, ...]`` and class indices y, with p their softmax.

    Lin et al. 2017, "Focal Loss for Dense Object Detection", for several classes. The mean is over the positions whose label
    is not ignore_index, whatever their weights.

    Attributes:
        gamma: 0 or more; 0 is cross-entropy.
        weight: the paper's alpha, one finite number >= 0 per class, or None.
        ignore_index: positions with this label do not count.
        reduction: ``mean`` or ``sum``.
    """

    name = "focal"
    scale = "logits"
    default_metrics = ("accuracy",)
    readings = (Reading(activation=SOFTMAX),)

    gamma: float = 2.0
    weight: Sequence[float] | None = None
    ignore_index: int = -100
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        check_number(self.name, "gamma", self.gamma, minimum=0)
        check_ignore_index(self.name, self.ignore_index)
        object.__setattr__(self, "weight", check_class_weight(self.name, self.weight))

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        return (class_labels(self.name, predictions[0], self.ignore_index, self.weight),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from logits ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``, int64."""
        (logits,), (label,) = predictions, labels
        classified_shape(self.name, logits, self.weight)
        builder = logits.builder
        labelled = Labelled(logits, label, self.ignore_index, self.weight)
        log_p = labelled.pick(builder.op("LogSoftmax", logits, axis=CLASS_AXIS))
        term = -log_p
        if self.gamma:
            term = term * _power(1.0 - builder.op("Exp", log_p), self.gamma)
        if labelled.weight is not None:
            term = term * labelled.weight
        weight = builder.scalar(1.0, logits) if self.reduction == "sum" else labelled.count()
        return (Term(sum_of(labelled.counted(term)), weight),)


@dataclass(frozen=True, kw_only=True)
class BinaryFocal(ElementwiseLoss):
    """The focal loss of yes-or-no questions, of logits x and targets y in [0, 1]; with p = sigmoid(x)::

        (alpha * y + (1 - alpha) * (1 - y)) * (1 - p_y)^gamma * bce_with_logits(x, y)
        1 - p_y = p * (1 - y) + (1 - p) * y

    Lin et al. 2017; the definition of ``torchvision.ops.sigmoid_focal_loss``.

    Attributes:
        gamma: 0 or more.
        alpha: weight of positive targets, between 0 and 1, or None for no weights.
    """

    name = "binary_focal"
    scale = "logits"
    readings = (Reading(activation=SIGMOID),)
    label_range = (0, 1)

    gamma: float = 2.0
    alpha: float | None = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "gamma", self.gamma, minimum=0)
        if self.alpha is not None and not 0 <= check_number(self.name, "alpha", self.alpha) <= 1:
            raise ConfigurationError(f"{self.name}: alpha must be between 0 and 1, or None, not {self.alpha!r}")

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        builder = prediction.builder
        negative = 1.0 - target
        element = negative * prediction + softplus(-prediction)
        if self.gamma:
            wrong = builder.op("Sigmoid", prediction) * negative + builder.op("Sigmoid", -prediction) * target
            element = element * _power(wrong, self.gamma)
        if self.alpha is not None:
            element = element * (target * self.alpha + negative * (1.0 - self.alpha))
        return element


def _power(base: Tensor, exponent: float) -> Tensor:
    """Emit ``base ** exponent`` of a base in [0, 1], with slope 0 where the base is 0 and the slope would be infinite."""
    if exponent >= 1:
        return base**exponent
    builder = base.builder
    is_zero = builder.op("Equal", base, 0.0)
    positive = builder.op("Where", is_zero, builder.scalar(1.0, base), base, like=base)
    return builder.op("Where", is_zero, builder.scalar(0.0, base), positive**exponent, like=base)


binary_focal = BinaryFocal
focal = Focal

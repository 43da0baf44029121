"""Binary cross-entropy, and focal loss, which gives confident right answers less weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from burnish.losses.cross_entropy import (
    check_class_weight,
    check_ignore_index,
    class_labels,
    class_weight_column,
    classified_shape,
)
from burnish.operators.loss import CLASS_AXIS, Labelled
from burnish.validation import check_number, is_number

LEAST_LOGARITHM = -100.0


def softplus(x: Tensor) -> Tensor:
    """Emit ``log(1 + exp(x))`` as ``max(x, 0) + log(1 + exp(-|x|))``, finite for every finite x.

    Both pieces change sides at 0, so their slopes add up to the sigmoid there too.
    """
    builder = x.builder
    is_positive = builder.op("GreaterOrEqual", x, 0.0)
    magnitude = builder.op("Where", is_positive, -x, x, like=x)
    positive = builder.op("Where", is_positive, x, builder.scalar(0.0, x), like=x)
    return positive + builder.op("Softplus", magnitude)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(ElementwiseLoss):
    """``-(y log p + (1 - y) log(1 - p))`` of probabilities p and targets y in [0, 1].

    Logarithms are clamped at -100, as in ``torch.nn.functional.binary_cross_entropy``, so p = 0 and p = 1 have a finite loss; a
    clamped logarithm has gradient 0. A prediction outside [0, 1] gives NaN. If the model ends in a sigmoid, prefer
    ``bce_with_logits``: it steps over the sigmoid and loses no digits.
    """

    name = "binary_cross_entropy"
    scale = "probabilities"
    readings = (Reading(takes="probabilities"),)
    label_range = (0, 1)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return -(target * bounded_log(prediction) + (1.0 - target) * bounded_log(1.0 - prediction))


def bounded_log(p: Tensor) -> Tensor:
    """Emit ``max(log p, -100)`` with gradient 0 at the bound; NaN for negative p."""
    builder = p.builder
    is_least = builder.op("LessOrEqual", p, math.exp(LEAST_LOGARITHM))
    is_least = builder.op("And", is_least, builder.op("GreaterOrEqual", p, 0.0))
    # Replace p before the logarithm: an unselected infinity would still make the gradient NaN.
    logarithm = builder.op("Log", builder.op("Where", is_least, builder.scalar(1.0, p), p, like=p))
    return builder.op("Where", is_least, builder.scalar(LEAST_LOGARITHM, p), logarithm, like=p)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropyWithLogits(ElementwiseLoss):
    """Binary cross-entropy of logits x and targets y in [0, 1], as ``torch.nn.functional.binary_cross_entropy_with_logits``.

    With w the weight of positive targets (default 1)::

        (1 - y) * x + (1 + (w - 1) * y) * log(1 + exp(-x))

    which is finite for every finite x.

    Attributes:
        pos_weight: one number above 0, or one per class along axis 1; above 1 it favours recall, below 1 precision.
    """

    name = "bce_with_logits"
    scale = "logits"
    readings = (Reading(activation=SIGMOID),)
    label_range = (0, 1)

    pos_weight: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pos_weight is None:
            return
        weight = tuple(self.pos_weight) if isinstance(self.pos_weight, Sequence) else self.pos_weight
        numbers = tuple(weight) if isinstance(weight, Iterable) else (weight,)
        if not numbers or not all(is_number(number) and number > 0 for number in numbers):
            raise ConfigurationError(f"{self.name}: pos_weight must hold finite numbers above 0, not {weight!r}")
        floats = tuple(float(number) for number in numbers)
        object.__setattr__(self, "pos_weight", floats if isinstance(weight, Iterable) else floats[0])

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        if isinstance(self.pos_weight, tuple):
            classified_shape(self.name, predictions[0], self.pos_weight, "pos_weight")
        return super().label_specs(predictions)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        weighted = softplus(-prediction)
        if isinstance(self.pos_weight, tuple):
            classified_shape(self.name, prediction, self.pos_weight, "pos_weight")
            excess = class_weight_column([weight - 1.0 for weight in self.pos_weight], prediction)
            weighted = weighted * (1.0 + target * excess)
        elif isinstance(self.pos_weight, float):
            weighted = weighted * (1.0 + target * (self.pos_weight - 1.0))
        return (1.0 - target) * prediction + weighted


binary_cross_entropy = BinaryCrossEntropy
bce_with_logits = BinaryCrossEntropyWithLogits


@dataclass(frozen=True, kw_only=True)
class Focal(LossBase):
    """``w[y] * (1 - p[y])^gamma * -log p[y]`` of logits ``[N, C, d1, ...]`` and class indices y, with p their softmax.

    This is Lin et al. 2017, "Focal Loss for Dense Object Detection", for several classes. The mean is over the positions whose
    label is not ignore_index, regardless of their weights.

    Attributes:
        gamma: 0 or more; 0 is cross-entropy.
        weight: the paper's alpha, one finite number >= 0 per class, or None.
        ignore_index: label of positions that do not count.
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
    """Focal loss of logits x and targets y in [0, 1], for yes-or-no questions; with p = sigmoid(x)::

        (alpha * y + (1 - alpha) * (1 - y)) * (1 - p_y)^gamma * bce_with_logits(x, y)
        1 - p_y = p * (1 - y) + (1 - p) * y

    Lin et al. 2017, as defined by ``torchvision.ops.sigmoid_focal_loss``.

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
    """Emit ``base ** exponent`` for a base in [0, 1], with slope 0 if the base is 0 and the slope would be infinite."""
    if exponent >= 1:
        return base**exponent
    builder = base.builder
    is_zero = builder.op("Equal", base, 0.0)
    positive = builder.op("Where", is_zero, builder.scalar(1.0, base), base, like=base)
    return builder.op("Where", is_zero, builder.scalar(0.0, base), positive**exponent, like=base)


binary_focal = BinaryFocal
focal = Focal

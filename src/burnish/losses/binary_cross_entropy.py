"""Binary cross-entropy: each element is a yes-or-no question of its own, answered by a probability or by a logit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import SIGMOID, ElementwiseLoss, LabelSpec, Reading
from burnish.losses.classes import class_weight_column, classified_shape
from burnish.validation import is_number

LEAST_LOGARITHM = -100.0


def softplus(x: Tensor) -> Tensor:
    """Emit ``log(1 + exp(x))`` as ``max(x, 0) + log(1 + exp(-|x|))``, finite for every finite x.

    Both pieces change sides at the same 0, so that their slopes add up to the sigmoid there too.
    """
    builder = x.builder
    is_positive = builder.op("GreaterOrEqual", x, 0.0)
    magnitude = builder.op("Where", is_positive, -x, x, like=x)
    positive = builder.op("Where", is_positive, x, builder.scalar(0.0, x), like=x)
    return positive + builder.op("Softplus", magnitude)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(ElementwiseLoss):
    """``-(y log p + (1 - y) log(1 - p))`` of probabilities p and targets y in [0, 1].

    As in ``torch.nn.functional.binary_cross_entropy`` no logarithm is less than -100, so that p = 0 and p = 1 have a finite
    loss; there it passes no gradient on. A prediction outside [0, 1] gives NaN. Where the model ends in a sigmoid,
    ``bce_with_logits`` is the better choice: it steps over the sigmoid and loses no digits.
    """

    name = "binary_cross_entropy"
    scale = "probabilities"
    readings = (Reading(takes="probabilities"),)
    label_range = (0, 1)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return -(target * bounded_log(prediction) + (1.0 - target) * bounded_log(1.0 - prediction))


def bounded_log(p: Tensor) -> Tensor:
    """Emit ``log p``, and -100 with gradient 0 where it would be less than that; NaN where p is negative."""
    builder = p.builder
    is_least = builder.op("LessOrEqual", p, math.exp(LEAST_LOGARITHM))
    is_least = builder.op("And", is_least, builder.op("GreaterOrEqual", p, 0.0))
    logarithm = builder.op("Log", builder.op("Where", is_least, builder.scalar(1.0, p), p, like=p))
    return builder.op("Where", is_least, builder.scalar(LEAST_LOGARITHM, p), logarithm, like=p)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropyWithLogits(ElementwiseLoss):
    """Binary cross-entropy of logits x and targets y in [0, 1], as ``torch.nn.functional.binary_cross_entropy_with_logits``.

    With w the weight of positive targets (1 where none is given)::

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

"""Dice loss: one minus the overlap of prediction and target, for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Tensor
from burnish.losses.base import (
    SIGMOID,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Scale,
    Term,
    check_number,
    check_reduction,
    check_same_shape,
    floating_shape,
    size_of,
    sum_of,
)
from burnish.losses.regions import RegionLoss, check_positions, sum_over_positions


@dataclass(frozen=True, kw_only=True)
class DiceBase(LossBase):
    """Of probabilities p and targets y in [0, 1], for each sample and class over all its positions::

        1 - (2 * sum(p * y) + smooth) / (sum(p) + sum(y) + smooth)

    Sudre et al. 2017; with ``squared`` the sums below are of squares (Milletari et al. 2016). The mean is over samples and
    classes, so that batches add up to the loss of the whole.

    Attributes:
        smooth: above 0; keeps the quotient defined where neither has anything.
        squared: square p and y in the denominator.
        reduction: ``mean`` over samples and classes, or ``sum``.
    """

    smooth: float = 1.0
    squared: bool = False
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        check_number(self.name, "smooth", self.smooth, above=0)

    def overlap(self, p: Tensor, target: Tensor) -> tuple[Term, ...]:
        """Emit the term, of two tensors of one shape ``[N, C, d1, ...]``."""
        both = sum_over_positions(p * p + target * target if self.squared else p + target)
        element = 1.0 - (sum_over_positions(p * target) * 2.0 + self.smooth) / (both + self.smooth)
        one = p.builder.scalar(1.0, element)
        return (Term(sum_of(element), one if self.reduction == "sum" else size_of(element, element.dtype)),)


@dataclass(frozen=True, kw_only=True)
class Dice(DiceBase, RegionLoss):
    """Dice loss of logits ``[N, C, d1, ...]``, with p their softmax, and class indices ``[N, d1, ...]``; see ``DiceBase``."""

    name: ClassVar[str] = "dice"

    def __post_init__(self) -> None:
        DiceBase.__post_init__(self)
        RegionLoss.__post_init__(self)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from logits ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``, int64."""
        return self.overlap(*self.probabilities_and_targets(predictions[0], labels[0]))


@dataclass(frozen=True, kw_only=True)
class BinaryDice(DiceBase):
    """Dice loss of logits ``[N, C, d1, ...]``, with p their sigmoid, and targets of that shape; see ``DiceBase``."""

    name: ClassVar[str] = "binary_dice"

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(activation=SIGMOID),)

    @property
    def scale(self) -> Scale | None:
        return "logits"

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the spec of ``targets``.

        Raises:
            ConfigurationError: the prediction is not floating-point, or has no positions.
        """
        (prediction,) = predictions
        check_positions(self.name, prediction)
        return (LabelSpec("targets", prediction.dtype, floating_shape(self.name, prediction), 0, 1),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from logits and targets ``[N, C, d1, ...]``."""
        (logits,), (target,) = predictions, labels
        check_positions(self.name, logits)
        check_same_shape(self.name, logits, target)
        return self.overlap(logits.builder.op("Sigmoid", logits), target)


def dice(*, smooth: float = 1.0, squared: bool = False, ignore_index: int = -100, reduction: Reduction = "mean") -> Dice:
    """Return the Dice loss over class indices; see ``Dice``."""
    return Dice(smooth=smooth, squared=squared, ignore_index=ignore_index, reduction=reduction)


def binary_dice(*, smooth: float = 1.0, squared: bool = False, reduction: Reduction = "mean") -> BinaryDice:
    """Return the Dice loss of yes-or-no questions; see ``BinaryDice``."""
    return BinaryDice(smooth=smooth, squared=squared, reduction=reduction)

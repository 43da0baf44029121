"""Dice loss: one minus the overlap of prediction and target, for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    SIGMOID,
    SOFTMAX,
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
from burnish.losses.classes import check_ignore_index, class_labels
from burnish.ops.labels import CLASS_AXIS, Labelled


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
        builder = p.builder
        assert p.rank is not None
        axes = builder.integers(range(CLASS_AXIS + 1, p.rank))

        def over_positions(tensor: Tensor) -> Tensor:
            return builder.op("ReduceSum", tensor, axes, keepdims=0)

        both = over_positions(p * p + target * target if self.squared else p + target)
        element = 1.0 - (over_positions(p * target) * 2.0 + self.smooth) / (both + self.smooth)
        one = builder.scalar(1.0, element)
        return (Term(sum_of(element), one if self.reduction == "sum" else size_of(element, element.dtype)),)

    def check_positions(self, prediction: Tensor) -> None:
        """Raise ConfigurationError for a prediction without positions."""
        shape = floating_shape(self.name, prediction)
        if len(shape) < 3:
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has shape {list(shape)}, and the overlap is measured over "
                "positions: the model must give [batch, classes, positions, ...]"
            )


@dataclass(frozen=True, kw_only=True)
class Dice(DiceBase):
    """Dice loss of logits ``[N, C, d1, ...]``, with p their softmax, and class indices ``[N, d1, ...]``; see ``DiceBase``.

    Attributes:
        ignore_index: positions with this label count neither as predicted nor as there.
    """

    name: ClassVar[str] = "dice"

    ignore_index: int = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ignore_index(self.name, self.ignore_index)

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(activation=SOFTMAX),)

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return ("accuracy",)

    @property
    def scale(self) -> Scale | None:
        return "logits"

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the spec of ``labels``.

        Raises:
            ConfigurationError: the prediction is not floating-point, has no positions, or an unknown number of classes.
        """
        (prediction,) = predictions
        self.check_positions(prediction)
        if prediction.dimension(CLASS_AXIS) is None:
            raise ConfigurationError(
                f"{self.name}: the number of classes of the prediction '{prediction.name}' (axis 1 of {prediction.shape}) is not "
                "known: give the model's output a fixed extent there"
            )
        return (class_labels(self.name, prediction, self.ignore_index),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from logits ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``, int64."""
        self.label_specs(predictions)
        (logits,), (label,) = predictions, labels
        builder = logits.builder
        classes, rank = logits.dimension(CLASS_AXIS), logits.rank
        assert classes is not None
        assert rank is not None
        p = builder.op("Softmax", logits, axis=CLASS_AXIS)
        numbers = builder.constant(np.arange(classes, dtype=np.int64).reshape(-1, *[1] * (rank - 2)))
        labelled = Labelled(logits, label, self.ignore_index)
        there = builder.cast(builder.op("Equal", labelled.on_class_axis(label), numbers), logits.dtype)
        counts = labelled.on_class_axis(labelled.is_counted())
        zero = builder.scalar(0.0, logits)
        return self.overlap(*(builder.op("Where", counts, tensor, zero, like=logits) for tensor in (p, there)))


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
        self.check_positions(prediction)
        return (LabelSpec("targets", prediction.dtype, floating_shape(self.name, prediction), 0, 1),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from logits and targets ``[N, C, d1, ...]``."""
        (logits,), (target,) = predictions, labels
        self.check_positions(logits)
        check_same_shape(self.name, logits, target)
        return self.overlap(logits.builder.op("Sigmoid", logits), target)


def dice(*, smooth: float = 1.0, squared: bool = False, ignore_index: int = -100, reduction: Reduction = "mean") -> Dice:
    """Return the Dice loss over class indices; see ``Dice``."""
    return Dice(smooth=smooth, squared=squared, ignore_index=ignore_index, reduction=reduction)


def binary_dice(*, smooth: float = 1.0, squared: bool = False, reduction: Reduction = "mean") -> BinaryDice:
    """Return the Dice loss of yes-or-no questions; see ``BinaryDice``."""
    return BinaryDice(smooth=smooth, squared=squared, reduction=reduction)

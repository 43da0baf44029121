"""Segmentation losses, which measure the overlap of predicted and true regions: Dice, Tversky and Lovász."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    SIGMOID,
    SOFTMAX,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Term,
    check_reduction,
    check_same_shape,
    floating_shape,
    mean_or_sum,
    sum_of,
)
from burnish.losses.cross_entropy import check_ignore_index, class_labels
from burnish.operators.elementwise import STOP_GRADIENT
from burnish.operators.loss import CLASS_AXIS, Labelled
from burnish.validation import check_number


@dataclass(frozen=True, kw_only=True)
class RegionLoss(LossBase):
    """A loss of logits ``[N, C, d1, ...]``, with p their softmax, and class indices ``[N, d1, ...]``.

    Attributes:
        ignore_index: label of positions that count neither as predicted nor as true.
    """

    scale = "logits"

    default_metrics = ("accuracy",)

    readings = (Reading(activation=SOFTMAX),)

    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_ignore_index(self.name, self.ignore_index)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        (prediction,) = predictions
        check_positions(self.name, prediction)
        if prediction.dimension(CLASS_AXIS) is None:
            raise ConfigurationError(
                f"{self.name}: the number of classes of the prediction '{prediction.name}' (axis 1 of {prediction.shape}) is not "
                "known: give the model's output a fixed extent there"
            )
        return (class_labels(self.name, prediction, self.ignore_index),)

    def probabilities_and_targets(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Emit the softmax and the one-hot labels; both ``[N, C, d1, ...]``, and 0 at ignored positions.

        Raises:
            ConfigurationError: ``label_specs`` rejects the logits.
        """
        self.label_specs((logits,))
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
        counted, targets = (builder.op("Where", counts, tensor, zero, like=logits) for tensor in (p, there))
        return counted, targets


def check_positions(loss: str, prediction: Tensor) -> None:
    """Raise ConfigurationError for a prediction without positions."""
    shape = floating_shape(loss, prediction)
    if len(shape) < 3:
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' has shape {list(shape)}, and the overlap is measured over "
            "positions: the model must give [batch, classes, positions, ...]"
        )


def sum_over_positions(tensor: Tensor) -> Tensor:
    """Emit the sums of ``[N, C, d1, ...]`` over the positions, ``[N, C]``."""
    assert tensor.rank is not None
    axes = tensor.builder.integers(range(CLASS_AXIS + 1, tensor.rank))
    return tensor.builder.op("ReduceSum", tensor, axes, keepdims=0)


@dataclass(frozen=True, kw_only=True)
class DiceBase(LossBase):
    """Dice loss of probabilities p and targets y in [0, 1], for each sample and class over all positions::

        1 - (2 * sum(p * y) + smooth) / (sum(p) + sum(y) + smooth)

    Sudre et al. 2017; with ``squared`` the sums in the denominator are of squares (Milletari et al. 2016). The mean is over
    samples and classes, so that batches add up to the loss of the whole.

    Attributes:
        smooth: above 0; keeps the quotient defined if prediction and target are both empty.
        squared: True to square p and y in the denominator.
        reduction: ``mean`` over samples and classes, or ``sum``.
    """

    smooth: float = 1.0
    squared: bool = False
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        check_number(self.name, "smooth", self.smooth, above=0)

    def overlap(self, p: Tensor, target: Tensor) -> tuple[Term, ...]:
        """Emit the term, from two tensors of the same shape ``[N, C, d1, ...]``."""
        both = sum_over_positions(p * p + target * target if self.squared else p + target)
        element = 1.0 - (sum_over_positions(p * target) * 2.0 + self.smooth) / (both + self.smooth)
        return mean_or_sum(element, self.reduction)


@dataclass(frozen=True, kw_only=True)
class Dice(DiceBase, RegionLoss):
    """Dice loss of logits ``[N, C, d1, ...]``, with p their softmax, and class indices ``[N, d1, ...]``; see ``DiceBase``."""

    name = "dice"

    def __post_init__(self) -> None:
        DiceBase.__post_init__(self)
        RegionLoss.__post_init__(self)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        return self.overlap(*self.probabilities_and_targets(predictions[0], labels[0]))


@dataclass(frozen=True, kw_only=True)
class BinaryDice(DiceBase):
    """Dice loss of logits ``[N, C, d1, ...]``, with p their sigmoid, and targets of the same shape; see ``DiceBase``."""

    name = "binary_dice"
    scale = "logits"
    readings = (Reading(activation=SIGMOID),)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        (prediction,) = predictions
        check_positions(self.name, prediction)
        return (LabelSpec("targets", prediction.dtype, floating_shape(self.name, prediction), 0, 1),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        (logits,), (target,) = predictions, labels
        check_positions(self.name, logits)
        check_same_shape(self.name, logits, target)
        return self.overlap(logits.builder.op("Sigmoid", logits), target)


@dataclass(frozen=True, kw_only=True)
class Tversky(RegionLoss):
    """Tversky loss of probabilities p and targets y in [0, 1], for each sample and class over all positions::

        hits  = sum(p * y)
        index = (hits + smooth) / (hits + alpha * sum(p * (1 - y)) + beta * sum((1 - p) * y) + smooth)
        loss  = (1 - index) ** gamma

    Salehi et al. 2017. With gamma other than 1 it is the focal Tversky loss of Abraham and Khan 2019, who write the inverse of
    gamma. With alpha = beta = 1/2 and gamma = 1 it is ``dice``, with alpha = beta = 1 one minus intersection over union.

    Attributes:
        alpha: weight of false positives, 0 or more.
        beta: weight of false negatives, 0 or more; above alpha, recall counts for more.
        smooth: above 0; keeps the quotient defined if prediction and target are both empty.
        gamma: exponent, above 0.
        reduction: ``mean`` over samples and classes, or ``sum``.
    """

    name = "tversky"

    alpha: float = 0.3
    beta: float = 0.7
    smooth: float = 1.0
    gamma: float = 1.0
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reduction(self.name, self.reduction)
        for option in ("alpha", "beta"):
            check_number(self.name, option, getattr(self, option), minimum=0)
        if self.alpha + self.beta == 0:
            raise ConfigurationError(f"{self.name}: alpha and beta are both 0, and nothing would be missed: give one above 0")
        check_number(self.name, "smooth", self.smooth, above=0)
        check_number(self.name, "gamma", self.gamma, above=0)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        p, target = self.probabilities_and_targets(predictions[0], labels[0])
        hits = sum_over_positions(p * target)
        misses = (sum_over_positions(p) - hits) * self.alpha + (sum_over_positions(target) - hits) * self.beta
        element = misses / (hits + misses + self.smooth)
        if self.gamma != 1:
            element = element**self.gamma
        return mean_or_sum(element, self.reduction)


@dataclass(frozen=True, kw_only=True)
class Lovasz(RegionLoss):
    """The Lovász extension of one minus intersection over union (Berman et al. 2018, Lovász-Softmax).

    For each sample and class, the errors ``|y - p|`` of all positions are sorted in descending order. Each is weighted by how
    much the index drops when its position is wrong in addition to those before it; the weight passes no gradient. The mean is
    over the classes present in each sample's labels, so that batches add up to the loss of the whole.

    Attributes:
        reduction: ``mean`` as above, or ``sum``.
    """

    name = "lovasz"

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reduction(self.name, self.reduction)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        p, target = (self._flat(tensor) for tensor in self.probabilities_and_targets(predictions[0], labels[0]))
        builder = p.builder
        width = builder.op("Shape", p, start=2, end=3)
        errors, order = builder.op("TopK", builder.op("Abs", target - p), width, axis=2, outputs=2)
        hits = builder.op("GatherElements", target, order, axis=2)
        there = builder.op("ReduceSum", target, builder.integers([2]), keepdims=1)
        place = builder.scalar(2, ir.DataType.INT64)
        covered = there - builder.op("CumSum", hits, place)
        union = there + builder.op("CumSum", 1.0 - hits, place)
        missed = 1.0 - covered / union
        # The union is never 0: a hit is in ``there``, and any other position adds to it.
        before = builder.op("Slice", missed, builder.integers([0]), builder.integers([-1]), builder.integers([2]))
        first = builder.op("Slice", missed, builder.integers([0]), builder.integers([1]), builder.integers([2]))
        weight = missed - builder.op("Concat", first * 0.0, before, axis=2)
        element = builder.op("ReduceSum", errors * STOP_GRADIENT(weight), builder.integers([2]), keepdims=0)
        present = builder.cast(builder.op("Greater", there, 0.0), p.dtype)
        present = builder.op("Squeeze", present, builder.integers([2]))
        one = builder.scalar(1.0, p)
        return (Term(sum_of(element * present), one if self.reduction == "sum" else sum_of(present)),)

    def _flat(self, tensor: Tensor) -> Tensor:
        builder = tensor.builder
        classes = tensor.dimension(CLASS_AXIS)
        assert classes is not None
        return builder.op("Reshape", tensor, builder.integers([0, classes, -1]))


binary_dice = BinaryDice
dice = Dice
lovasz = Lovasz
tversky = Tversky

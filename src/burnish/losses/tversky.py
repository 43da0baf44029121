"""Tversky and Lovász losses: how far predicted regions miss the right ones, for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Reduction, Term, check_number, check_reduction, size_of, sum_of
from burnish.losses.regions import RegionLoss, sum_over_positions
from burnish.operators.elementwise import STOP_GRADIENT
from burnish.operators.loss import CLASS_AXIS


@dataclass(frozen=True, kw_only=True)
class Tversky(RegionLoss):
    """Of probabilities p and targets y in [0, 1], for each sample and class over all its positions::

        hits  = sum(p * y)
        index = (hits + smooth) / (hits + alpha * sum(p * (1 - y)) + beta * sum((1 - p) * y) + smooth)
        loss  = (1 - index) ** gamma

    Salehi et al. 2017; with gamma other than 1 the focal Tversky loss of Abraham and Khan 2019, who write its inverse. With
    alpha = beta = 1/2 and gamma = 1 it is ``dice``, with alpha = beta = 1 one minus intersection over union.

    Attributes:
        alpha: weight of what is predicted and not there, 0 or more.
        beta: weight of what is there and not predicted, 0 or more; above alpha, recall counts for more.
        smooth: above 0; keeps the quotient defined where neither has anything.
        gamma: exponent, above 0.
        reduction: ``mean`` over samples and classes, or ``sum``.
    """

    name: ClassVar[str] = "tversky"

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
        """Emit one term, from logits ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``, int64."""
        p, target = self.probabilities_and_targets(predictions[0], labels[0])
        hits = sum_over_positions(p * target)
        misses = (sum_over_positions(p) - hits) * self.alpha + (sum_over_positions(target) - hits) * self.beta
        element = misses / (hits + misses + self.smooth)
        if self.gamma != 1:
            element = element**self.gamma
        one = element.builder.scalar(1.0, element)
        return (Term(sum_of(element), one if self.reduction == "sum" else size_of(element, element.dtype)),)


@dataclass(frozen=True, kw_only=True)
class Lovasz(RegionLoss):
    """The Lovász extension of one minus intersection over union (Berman et al. 2018, Lovász-Softmax).

    For each sample and class, the errors ``|y - p|`` of all positions are sorted, the largest first, and multiplied by what each
    takes from the index where the positions before it are wrong too. That weight is a constant of the gradient. The mean is over
    the classes that are in the labels of each sample, so that batches add up to the loss of the whole.

    Attributes:
        reduction: ``mean`` as above, or ``sum``.
    """

    name: ClassVar[str] = "lovasz"

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reduction(self.name, self.reduction)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from logits ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``, int64."""
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
        # The union of the first place is 0 where it is a hit of none, which cannot be: a hit is there, anything else adds to it.
        before = builder.op("Slice", missed, builder.integers([0]), builder.integers([-1]), builder.integers([2]))
        first = builder.op("Slice", missed, builder.integers([0]), builder.integers([1]), builder.integers([2]))
        weight = missed - builder.op("Concat", first * 0.0, before, axis=2)
        element = builder.op("ReduceSum", errors * STOP_GRADIENT(weight), builder.integers([2]), keepdims=0)
        present = builder.cast(builder.op("Greater", there, 0.0), p.dtype)
        present = builder.op("Squeeze", present, builder.integers([2]))
        one = builder.scalar(1.0, p)
        return (Term(sum_of(element * present), one if self.reduction == "sum" else sum_of(present)),)

    def _flat(self, tensor: Tensor) -> Tensor:
        """Emit ``[N, C, positions]``."""
        builder = tensor.builder
        classes = tensor.dimension(CLASS_AXIS)
        assert classes is not None
        return builder.op("Reshape", tensor, builder.integers([0, classes, -1]))


def tversky(
    *,
    alpha: float = 0.3,
    beta: float = 0.7,
    smooth: float = 1.0,
    gamma: float = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tversky:
    """Return the Tversky loss over class indices; see ``Tversky``."""
    return Tversky(alpha=alpha, beta=beta, smooth=smooth, gamma=gamma, ignore_index=ignore_index, reduction=reduction)


def lovasz(*, ignore_index: int = -100, reduction: Reduction = "mean") -> Lovasz:
    """Return the Lovász-Softmax loss over class indices; see ``Lovasz``."""
    return Lovasz(ignore_index=ignore_index, reduction=reduction)

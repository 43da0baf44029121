"""Margin losses, which are 0 once an answer is right by a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.losses.base import ElementwiseLoss, LabelSpec, LossBase, Reading, Reduction, Term, check_reduction, sum_of
from burnish.losses.cross_entropy import check_class_weight, class_labels, classified_shape
from burnish.operators.loss import CLASS_AXIS, Labelled
from burnish.validation import check_number, require


@dataclass(frozen=True, kw_only=True)
class Hinge(ElementwiseLoss):
    """``max(0, margin - y * x)`` of scores x and targets y in {-1, 1} (Cortes and Vapnik 1995), or its square.

    Attributes:
        margin: a finite number.
        squared: square each element.
    """

    name = "hinge"
    scale = "scores"
    readings = (Reading(takes="scores"),)
    label_range = (-1, 1)
    are_two_values = True

    margin: float = 1.0
    squared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "margin", self.margin)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        excess = prediction.builder.op("Relu", self.margin - target * prediction)
        return excess * excess if self.squared else excess


@dataclass(frozen=True, kw_only=True)
class HingeEmbedding(ElementwiseLoss):
    """Hinge loss of a distance x and a target y, as ``torch.nn.functional.hinge_embedding_loss``::

        x                    if y = 1: alike
        max(0, margin - x)   if y = -1: not alike

    Attributes:
        margin: a finite number.
    """

    name = "hinge_embedding"
    label_range = (-1, 1)
    are_two_values = True

    margin: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "margin", self.margin)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        builder = prediction.builder
        zero = builder.scalar(0.0, prediction)
        excess = builder.op("Relu", self.margin - prediction)
        apart = builder.op("Where", builder.op("Equal", target, 1.0), zero, excess, like=prediction)
        alike = builder.op("Where", builder.op("Equal", target, -1.0), zero, prediction, like=prediction)
        return alike + apart


@dataclass(frozen=True, kw_only=True)
class MultiMargin(LossBase):
    """Hinge over classes, of scores x ``[N, C, d1, ...]`` and class indices y, as ``torch.nn.functional.multi_margin_loss``::

        w[y] / C * sum over c != y of max(0, margin - x[y] + x[c]) ** p

    The mean is over the positions, regardless of their weights.

    Attributes:
        p: 1 or 2.
        margin: a finite number, 0 or more.
        weight: one finite number >= 0 per class, or None.
        reduction: ``mean`` over the positions, or ``sum``.
    """

    name = "multi_margin"
    scale = "scores"
    default_metrics = ("accuracy",)

    p: int = 1
    margin: float = 1.0
    weight: Sequence[float] | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        check_number(self.name, "margin", self.margin, minimum=0)
        require(self.p in (1, 2), self.name, "p", self.p, "1 or 2")
        object.__setattr__(self, "weight", check_class_weight(self.name, self.weight))

    @property
    def readings(self) -> tuple[Reading, ...]:
        # Probabilities differ by less than 1, so they can satisfy only a smaller margin.
        return (Reading(takes="scores" if self.margin >= 1 else None, class_axis=CLASS_AXIS),)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        return (class_labels(self.name, predictions[0], None, self.weight),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        (scores,), (label,) = predictions, labels
        classified_shape(self.name, scores, self.weight)
        builder = scores.builder
        labelled = Labelled(scores, label, None, self.weight)
        excess = builder.op("Relu", scores - labelled.on_class_axis(labelled.pick(scores)) + self.margin)
        if self.p == 2:
            excess = excess * excess
        # The mean includes class y, which adds the constant margin ** p: subtract it.
        own_margin = builder.scalar(self.margin**self.p, scores) / labelled.classes()
        term = builder.op("ReduceMean", excess, builder.integers([CLASS_AXIS]), keepdims=0) - own_margin
        if labelled.weight is not None:
            term = term * labelled.weight
        return (Term(sum_of(term), builder.scalar(1.0, scores) if self.reduction == "sum" else labelled.count()),)


hinge = Hinge
hinge_embedding = HingeEmbedding
multi_margin = MultiMargin

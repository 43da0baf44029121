"""Losses that read log-probabilities: negative log-likelihood of class indices, divergence from a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    ElementwiseLoss,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Term,
    check_reduction,
    floating_shape,
    samples_of,
    sum_of,
)
from burnish.losses.classes import check_class_weight, check_ignore_index, class_labels, classified_shape
from burnish.operators.loss import CLASS_AXIS, Labelled


@dataclass(frozen=True, kw_only=True)
class NegativeLogLikelihood(LossBase):
    """``-w[y] * x[y]`` of log-probabilities x ``[N, C, d1, ...]`` and class indices y, as ``torch.nn.functional.nll_loss``.

    The mean is over ``sum(w[y])``, of the positions whose label is not ignore_index; where all are ignored, the loss is 0.

    Attributes:
        ignore_index: positions with this label add neither a term nor a weight.
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
        """Emit one term, from log-probabilities ``[N, C, d1, ...]`` and class indices ``[N, d1, ...]``, int64."""
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
    """``y * (log y - x)`` of log-probabilities x and probabilities y, as ``torch.nn.functional.kl_div``; 0 where y = 0.

    Attributes:
        log_target: the targets are log-probabilities too: ``exp(y) * (y - x)``.
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
        logarithm = builder.op("Log", builder.op("Where", is_zero, builder.scalar(1.0, target), target, like=target))
        product = target * (logarithm - prediction)
        return builder.op("Where", is_zero, builder.scalar(0.0, product), product, like=product)

    def weight(self, prediction: Tensor) -> Tensor:
        if self.reduction == "batchmean":
            return samples_of(prediction, prediction.dtype)
        return super().weight(prediction)


kl_divergence = KullbackLeibler
nll = NegativeLogLikelihood

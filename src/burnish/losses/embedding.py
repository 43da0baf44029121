"""Losses over several embeddings of a model, which pull some together and push others apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Term,
    check_reduction,
    check_same_shape,
    floating_shape,
    mean_or_sum,
)
from burnish.validation import check_number

FEATURE_AXIS = 1
SQUARE_FLOOR = 1e-12


@dataclass(frozen=True, kw_only=True)
class EmbeddingLoss(LossBase):
    """A loss that reads several embeddings of the same shape.

    Attributes:
        outputs: names of the model's outputs, in order; None leaves the choice to ``compile``.
        reduction: ``mean`` over the samples, or ``sum``.
    """

    roles: ClassVar[tuple[str, ...]]

    outputs: tuple[str, ...] | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        if self.outputs is None:
            return
        names = () if isinstance(self.outputs, str) else tuple(self.outputs)
        if len(names) != len(self.roles) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"{self.name}: outputs must be {len(self.roles)} names of outputs ({', '.join(self.roles)}), not {self.outputs!r}"
            )
        object.__setattr__(self, "outputs", names)

    @property
    def readings(self) -> tuple[Reading, ...]:
        if self.outputs is not None:
            return tuple(Reading(output) for output in self.outputs)
        return tuple(Reading(position=position) for position in range(len(self.roles)))

    def check_embeddings(self, predictions: Sequence[Tensor], least_rank: int) -> None:
        """Raise ConfigurationError for embeddings that are not floating-point, have too few axes, or differ in shape."""
        for prediction in predictions:
            if len(floating_shape(self.name, prediction)) < least_rank:
                raise ConfigurationError(
                    f"{self.name}: the prediction '{prediction.name}' has shape {prediction.shape}: the model must give "
                    "[batch, features]; add an axis, or name another output (outputs=...)"
                )
            check_same_shape(self.name, predictions[0], prediction)

    def reduced(self, samples: Tensor) -> tuple[Term, ...]:
        return mean_or_sum(samples, self.reduction)


@dataclass(frozen=True, kw_only=True)
class CosineEmbedding(EmbeddingLoss):
    """Cosine loss of two embeddings ``[N, features]`` and a target y, as ``torch.nn.functional.cosine_embedding_loss``::

        1 - cos                if y = 1: alike
        max(0, cos - margin)   if y = -1: not alike

    with ``cos = a·b / sqrt((a·a + 1e-12) (b·b + 1e-12))``. Features are along axis 1; later axes are positions.

    Attributes:
        margin: between -1 and 1; 0 to 0.5 is usual.
    """

    name = "cosine_embedding"
    roles = ("first", "second")

    margin: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(check_number(self.name, "margin", self.margin)) > 1:
            raise ConfigurationError(f"{self.name}: margin must be between -1 and 1, not {self.margin!r}")

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        self.check_embeddings(predictions, FEATURE_AXIS + 1)
        shape = floating_shape(self.name, predictions[0])
        extents = shape[:FEATURE_AXIS] + shape[FEATURE_AXIS + 1 :]
        return (LabelSpec("targets", predictions[0].dtype, extents, -1, 1, two_values=True),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.check_embeddings(predictions, FEATURE_AXIS + 1)
        (first, second), (target,) = predictions, labels
        builder = first.builder

        def dot(left: Tensor, right: Tensor) -> Tensor:
            return builder.op("ReduceSum", left * right, builder.integers([FEATURE_AXIS]), keepdims=0)

        squares = (dot(first, first) + SQUARE_FLOOR) * (dot(second, second) + SQUARE_FLOOR)
        cosine = dot(first, second) / builder.op("Sqrt", squares)
        zero = builder.scalar(0.0, cosine)
        alike = builder.op("Where", builder.op("Equal", target, 1.0), 1.0 - cosine, zero, like=cosine)
        excess = builder.op("Relu", cosine - self.margin)
        return self.reduced(alike + builder.op("Where", builder.op("Equal", target, -1.0), excess, zero, like=cosine))


@dataclass(frozen=True, kw_only=True)
class TripletMargin(EmbeddingLoss):
    """``max(0, d(anchor, positive) - d(anchor, negative) + margin)``, as ``torch.nn.functional.triplet_margin_loss``.

    ``d(a, b)`` is the p-norm of ``a - b + eps`` along the last axis. The loss takes no labels: the data say which samples are
    alike, and the model reads them as three inputs.

    Attributes:
        margin: above 0.
        p: degree of the norm, 1 or more; ``inf`` is the largest difference.
        swap: True to use the distance between positive and negative if it is smaller than that of anchor and negative (Balntas et
            al. 2016).
        eps: added to the difference, to keep the norm's slope finite.
    """

    name = "triplet"
    roles = ("anchor", "positive", "negative")

    margin: float = 1.0
    p: float = 2.0
    swap: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "margin", self.margin, above=0)
        check_number(self.name, "eps", self.eps, minimum=0)
        if self.p in (math.inf, "inf"):
            object.__setattr__(self, "p", math.inf)
        else:
            check_number(self.name, "p", self.p, minimum=1)

    def options(self) -> dict[str, object]:
        options = super().options()
        return options | {"p": "inf"} if self.p == math.inf else options

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        self.check_embeddings(predictions, 1)
        return ()

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.check_embeddings(predictions, 1)
        anchor, positive, negative = predictions
        apart = self._distance(anchor, negative)
        if self.swap:
            apart = anchor.builder.op("Min", apart, self._distance(positive, negative))
        return self.reduced(anchor.builder.op("Relu", self._distance(anchor, positive) - apart + self.margin))

    def _distance(self, left: Tensor, right: Tensor) -> Tensor:
        builder = left.builder
        last = builder.integers([-1])
        difference = left - right + self.eps
        if self.p == 2:
            return _root(builder.op("ReduceSum", difference * difference, last, keepdims=0), 2)
        magnitude = builder.op("Abs", difference)
        if self.p == math.inf:
            return builder.op("ReduceMax", magnitude, last, keepdims=0)
        if self.p == 1:
            return builder.op("ReduceSum", magnitude, last, keepdims=0)
        return _root(builder.op("ReduceSum", magnitude**self.p, last, keepdims=0), self.p)


def _root(total: Tensor, degree: float) -> Tensor:
    """Emit the root, with slope 0 instead of infinity at 0."""
    builder = total.builder
    is_zero = builder.op("Equal", total, 0.0)
    positive = builder.op("Where", is_zero, builder.scalar(1.0, total), total, like=total)
    root = builder.op("Sqrt", positive) if degree == 2 else positive ** (1 / degree)
    return builder.op("Where", is_zero, builder.scalar(0.0, total), root, like=total)


cosine_embedding = CosineEmbedding
triplet = TripletMargin

"""What losses over values have in common: one number per element of the prediction, against a target of its shape."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Tensor
from burnish.losses.base import (
    LabelSpec,
    LossBase,
    Term,
    check_reduction,
    check_same_shape,
    floating_shape,
    size_of,
    sum_of,
)


@dataclass(frozen=True, kw_only=True)
class ElementwiseLoss(LossBase):
    """A loss with one number per element; input ``targets``, of the prediction's dtype and shape.

    Attributes:
        label_range: the smallest and the largest target that are valid, None where there is no bound.
        are_two_values: whether no target between them is valid.
        reduction: ``mean`` over every element of the batch, or ``sum`` (the sum of weights is then the constant 1).
    """

    label_range: ClassVar[tuple[int | None, int | None]] = (None, None)
    are_two_values: ClassVar[bool] = False

    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)

    @abstractmethod
    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emit the loss of each element, of the prediction's shape."""

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the spec of ``targets``: dtype and shape of the prediction.

        Raises:
            ConfigurationError: the prediction is not floating-point, or its rank is not known.
        """
        (prediction,) = predictions
        minimum, maximum = self.label_range
        shape = floating_shape(self.name, prediction)
        return (LabelSpec("targets", prediction.dtype, shape, minimum, maximum, two_values=self.are_two_values),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, the sum over all elements and their number; both inputs have one shape.

        Raises:
            ConfigurationError: the prediction is not floating-point, or the shapes are known to differ.
        """
        (prediction,), (target,) = predictions, labels
        floating_shape(self.name, prediction)
        check_same_shape(self.name, prediction, target)
        return (Term(sum_of(self.elements(prediction, target)), self.weight(prediction)),)

    def weight(self, prediction: Tensor) -> Tensor:
        """Emit what the sum is divided by, a scalar of the prediction's dtype."""
        if self.reduction == "sum":
            return prediction.builder.scalar(1.0, prediction)
        return size_of(prediction, prediction.dtype)

"""Losses over values: squared, absolute, and what is squared near zero and absolute far from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Tensor
from burnish.losses.base import Reduction
from burnish.losses.elementwise import ElementwiseLoss


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(ElementwiseLoss):
    """``(x - y)²`` of prediction x and target y, as ``torch.nn.functional.mse_loss``."""

    name: ClassVar[str] = "mean_squared_error"

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        return difference * difference


def mean_squared_error(*, reduction: Reduction = "mean") -> MeanSquaredError:
    """Return the mean squared error over values; see ``MeanSquaredError``."""
    return MeanSquaredError(reduction=reduction)

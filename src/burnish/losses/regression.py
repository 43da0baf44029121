"""Losses over values: squared, absolute, and losses that are squared near zero and absolute far from it."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.losses.base import ElementwiseLoss
from burnish.validation import check_number


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(ElementwiseLoss):
    """``(x - y)²`` of prediction x and target y, as ``torch.nn.functional.mse_loss``."""

    name = "mean_squared_error"

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        return difference * difference


@dataclass(frozen=True, kw_only=True)
class MeanAbsoluteError(ElementwiseLoss):
    """``|x - y|`` of prediction x and target y, as ``torch.nn.functional.l1_loss``, with gradient 0 at x = y."""

    name = "l1"

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction.builder.op("Abs", prediction - target)


@dataclass(frozen=True, kw_only=True)
class Huber(ElementwiseLoss):
    """Huber's loss (1964) of the error e = x - y, as ``torch.nn.functional.huber_loss``::

        e² / 2                  if |e| <= delta
        delta * (|e| - delta/2) otherwise

    Attributes:
        delta: largest |e| that is squared, above 0.
    """

    name = "huber"

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "delta", self.delta, above=0)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return _square_near_zero(prediction - target, self.delta)


@dataclass(frozen=True, kw_only=True)
class SmoothL1(ElementwiseLoss):
    """Huber's loss divided by its bound, as ``torch.nn.functional.smooth_l1_loss``; ``l1`` if beta = 0::

        e² / (2 beta)   if |e| < beta
        |e| - beta/2    otherwise

    Attributes:
        beta: bound below which |e| is squared, 0 or more.
    """

    name = "smooth_l1"

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "beta", self.beta, minimum=0)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        if self.beta == 0:
            return prediction.builder.op("Abs", difference)
        return _square_near_zero(difference, self.beta) / self.beta


def _square_near_zero(difference: Tensor, bound: float) -> Tensor:
    builder = difference.builder
    magnitude = builder.op("Abs", difference)
    near = builder.op("LessOrEqual", magnitude, bound)
    square = difference * difference * 0.5
    return builder.op("Where", near, square, (magnitude - bound / 2) * bound, like=difference)


mean_squared_error = MeanSquaredError
l1 = MeanAbsoluteError
huber = Huber
smooth_l1 = SmoothL1

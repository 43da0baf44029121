"""Losses over values: squared, absolute, and losses that are squared near zero and absolute far from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from burnish.graph import Tensor
from burnish.losses.base import Reduction, check_number
from burnish.losses.elementwise import ElementwiseLoss


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(ElementwiseLoss):
    """``(x - y)²`` of prediction x and target y, as ``torch.nn.functional.mse_loss``."""

    name: ClassVar[str] = "mean_squared_error"

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        difference = prediction - target
        return difference * difference


@dataclass(frozen=True, kw_only=True)
class MeanAbsoluteError(ElementwiseLoss):
    """``|x - y|`` of prediction x and target y, as ``torch.nn.functional.l1_loss``; where x = y, the gradient is 0."""

    name: ClassVar[str] = "l1"

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return prediction.builder.op("Abs", prediction - target)


@dataclass(frozen=True, kw_only=True)
class Huber(ElementwiseLoss):
    """Huber's loss (1964) of the error e = x - y, as ``torch.nn.functional.huber_loss``::

        e² / 2                  where |e| <= delta
        delta * (|e| - delta/2) elsewhere

    Attributes:
        delta: where the square ends, above 0.
    """

    name: ClassVar[str] = "huber"

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self.name, "delta", self.delta, above=0)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        return _square_near_zero(prediction - target, self.delta)


@dataclass(frozen=True, kw_only=True)
class SmoothL1(ElementwiseLoss):
    """Huber's loss divided by its bound, as ``torch.nn.functional.smooth_l1_loss``; with beta = 0 it is ``l1``::

        e² / (2 beta)   where |e| < beta
        |e| - beta/2    elsewhere

    Attributes:
        beta: where the square ends, 0 or more.
    """

    name: ClassVar[str] = "smooth_l1"

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


def mean_squared_error(*, reduction: Reduction = "mean") -> MeanSquaredError:
    """Return the mean squared error over values; see ``MeanSquaredError``."""
    return MeanSquaredError(reduction=reduction)


def l1(*, reduction: Reduction = "mean") -> MeanAbsoluteError:
    """Return the mean absolute error over values; see ``MeanAbsoluteError``."""
    return MeanAbsoluteError(reduction=reduction)


def huber(*, delta: float = 1.0, reduction: Reduction = "mean") -> Huber:
    """Return Huber's loss over values; see ``Huber``."""
    return Huber(delta=delta, reduction=reduction)


def smooth_l1(*, beta: float = 1.0, reduction: Reduction = "mean") -> SmoothL1:
    """Return the smooth absolute error over values; see ``SmoothL1``."""
    return SmoothL1(beta=beta, reduction=reduction)

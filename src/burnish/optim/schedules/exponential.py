"""The same factor at every step."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import check_not_negative, power
from burnish.optim.schedules.base import StatelessSchedule, check_positive, double


@dataclass(frozen=True)
class Exponential(StatelessSchedule):
    """rate(t) = lr * gamma^t; ``torch.optim.lr_scheduler.ExponentialLR``."""

    name = "exponential"
    lr: float
    gamma: float

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)
        check_positive(self.name, gamma=self.gamma)

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        return power(builder, self.gamma, double(step)) * self.lr


def exponential(lr: float, gamma: float) -> Exponential:
    """Return the rate that is multiplied by ``gamma`` after every step; without an end.

    Args:
        lr: rate of the first step.
        gamma: factor from step to step, such as 0.999.

    Raises:
        ConfigurationError: a negative or non-finite rate, or a gamma that is not above 0.
    """
    return Exponential(lr, gamma)

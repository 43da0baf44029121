"""Exponential decay by the same factor at every step."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.arithmetic import double
from burnish.optim.schedules.base import StatelessSchedule, check_positive
from burnish.validation import check_not_negative


@dataclass(frozen=True)
class Exponential(StatelessSchedule):
    """rate(t) = lr * gamma^t; ``torch.optim.lr_scheduler.ExponentialLR``.

    Args:
        lr: rate of the first step.
        gamma: factor from step to step, such as 0.999.

    Raises:
        ConfigurationError: a negative or non-finite rate, or a gamma that is not above 0.
    """

    name = "exponential"
    lr: float
    gamma: float

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)
        check_positive(self.name, gamma=self.gamma)

    def at(self, step: Tensor) -> Tensor:
        return self.gamma ** double(step) * self.lr


exponential = Exponential

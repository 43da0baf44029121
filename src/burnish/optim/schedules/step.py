"""Stairs: the same factor every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import check_not_negative, power
from burnish.optim.schedules.base import StatelessSchedule, check_counts, check_positive, double


@dataclass(frozen=True)
class Step(StatelessSchedule):
    """rate(t) = lr * gamma^floor(t / every); ``torch.optim.lr_scheduler.StepLR``."""

    name = "step"
    lr: float
    every: int
    gamma: float

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)
        check_counts(self.name, every=self.every)
        check_positive(self.name, gamma=self.gamma)

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        return power(builder, self.gamma, double(builder.op("Div", step, self.every))) * self.lr


def step(lr: float, every: int, gamma: float = 0.1) -> Step:
    """Return the rate that is multiplied by ``gamma`` after every ``every`` steps; without an end.

    Args:
        lr: rate of the first step.
        every: steps of one stair.
        gamma: factor from stair to stair.

    Raises:
        ConfigurationError: a negative or non-finite rate, fewer than one step, or a gamma that is not above 0.
    """
    return Step(lr, every, gamma)

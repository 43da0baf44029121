"""Decay with the inverse square root of the step."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.arithmetic import double, sqrt
from burnish.optim.schedules.base import StatelessSchedule
from burnish.validation import check_count, check_not_negative


@dataclass(frozen=True)
class InverseSquareRoot(StatelessSchedule):
    """rate(t) = lr / sqrt(1 + t / timescale).

    After a warm-up of ``timescale`` steps this is lr * sqrt(timescale / step), the schedule of Vaswani et al., "Attention is all
    you need", 2017.

    Args:
        lr: rate of the first step.
        timescale: a third of the steps after which the rate is half of ``lr``; use the length of the preceding warm-up.

    Raises:
        ConfigurationError: a negative or non-finite rate, or a timescale that is not a whole number of at least 1.
    """

    name = "inverse_square_root"
    lr: float
    timescale: int = 1

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)
        check_count(self.name, timescale=self.timescale)

    def at(self, step: Tensor) -> Tensor:
        return self.lr / sqrt(double(step) / float(self.timescale) + 1.0)


inverse_square_root = InverseSquareRoot

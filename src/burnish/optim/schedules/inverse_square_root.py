"""One over the root of the step."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import check_not_negative
from burnish.optim.schedules.base import StatelessSchedule, check_counts, double


@dataclass(frozen=True)
class InverseSquareRoot(StatelessSchedule):
    """rate(t) = lr / sqrt(1 + t / timescale).

    Behind a warm-up of ``timescale`` steps this is lr * sqrt(timescale / step), the schedule of Vaswani et al., "Attention is
    all you need", 2017.
    """

    name = "inverse_square_root"
    lr: float
    timescale: int

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)
        check_counts(self.name, timescale=self.timescale)

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        return self.lr / builder.op("Sqrt", double(step) / float(self.timescale) + 1.0)


def inverse_square_root(lr: float, timescale: int = 1) -> InverseSquareRoot:
    """Return the rate that falls with one over the root of the step; without an end.

    Args:
        lr: rate of the first step.
        timescale: after three times so many steps the rate is half of ``lr``. Give the length of the warm-up before it.

    Raises:
        ConfigurationError: a negative or non-finite rate, or a timescale that is no whole number of at least 1.
    """
    return InverseSquareRoot(lr, timescale)

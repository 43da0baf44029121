"""The same rate at every step."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.base import check_not_negative
from burnish.optim.schedules.base import StatelessSchedule, number


@dataclass(frozen=True)
class Constant(StatelessSchedule):
    """rate(t) = lr. In the graph, where a plain number as ``lr`` is an input that every step may override."""

    name = "constant"
    lr: float

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        return number(builder, self.lr)


def constant(lr: float) -> Constant:
    """Return the schedule that stays at ``lr``: to be warmed up, or where a program shall have no input for the rate.

    Raises:
        ConfigurationError: a negative or non-finite rate.
    """
    return Constant(lr)

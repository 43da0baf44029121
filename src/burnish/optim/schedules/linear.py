"""A straight line from one rate to another."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.schedules.base import Descent


@dataclass(frozen=True)
class Linear(Descent):
    """rate(t) = final + (lr - final) * (1 - t / steps); ``torch.optim.lr_scheduler.LinearLR`` with factors of ``lr``."""

    name = "linear"

    def __post_init__(self) -> None:
        self.check()

    def within(self, builder: Builder, step: Tensor) -> Tensor:
        return self.descended(self.remaining(step))


def linear(lr: float, steps: int, final: float = 0.0, past_end: str = "error") -> Linear:
    """Return a straight line from ``lr`` at the first step to ``final`` at the first one past the end.

    Args:
        lr: rate of the first step.
        steps: how many steps there are.
        final: where the line ends; above ``lr`` for one that rises.
        past_end: ``error`` refuses steps past the end, ``hold`` goes on with ``final``.

    Raises:
        ConfigurationError: a negative or non-finite rate, fewer than one step, or an unknown ``past_end``.
    """
    return Linear(lr, steps, final, past_end)

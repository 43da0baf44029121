"""A linear change from one rate to another, and powers of the remaining share."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.schedules.base import Descent, check_positive


@dataclass(frozen=True)
class Linear(Descent):
    """rate(t) = final + (lr - final) * (1 - t / steps); ``torch.optim.lr_scheduler.LinearLR`` with factors of ``lr``.

    Args:
        lr: rate of the first step.
        steps: number of steps.
        final: rate at the end; above ``lr`` for a rising rate.
        past_end: ``error`` refuses steps after the end, ``hold`` continues with ``final``.

    Raises:
        ConfigurationError: a negative or non-finite rate, fewer than one step, or an unknown ``past_end``.
    """

    name = "linear"
    lr: float
    steps: int
    final: float = 0.0
    past_end: str = "error"

    def within(self, step: Tensor) -> Tensor:
        return self.descended(self.remaining(step))


@dataclass(frozen=True)
class Polynomial(Descent):
    """rate(t) = final + (lr - final) * (1 - t / steps)^power; ``torch.optim.lr_scheduler.PolynomialLR`` if final is 0.

    Args:
        lr: rate of the first step.
        steps: number of steps.
        power: 1 is a straight line; with more the rate falls fast at first, with less fast at the end.
        final: rate at the end.
        past_end: ``error`` refuses steps after the end, ``hold`` continues with ``final``.

    Raises:
        ConfigurationError: a negative or non-finite rate, a power that is not above 0, fewer than one step, or an unknown
            ``past_end``.
    """

    name = "polynomial"
    lr: float
    steps: int
    power: float = 2.0
    final: float = 0.0
    past_end: str = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, power=self.power)

    def within(self, step: Tensor) -> Tensor:
        return self.descended(self.remaining(step) ** float(self.power))


linear = Linear
polynomial = Polynomial

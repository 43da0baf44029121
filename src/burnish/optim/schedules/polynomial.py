"""A straight line from one rate to another, and powers of what is left of the way."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.graph import Tensor
from burnish.optim.schedules.base import Descent, check_positive


@dataclass(frozen=True)
class Linear(Descent):
    """rate(t) = final + (lr - final) * (1 - t / steps); ``torch.optim.lr_scheduler.LinearLR`` with factors of ``lr``.

    Args:
        lr: rate of the first step.
        steps: how many steps there are.
        final: where the line ends; above ``lr`` for one that rises.
        past_end: ``error`` refuses steps past the end, ``hold`` goes on with ``final``.

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
    """rate(t) = final + (lr - final) * (1 - t / steps)^power; ``torch.optim.lr_scheduler.PolynomialLR`` where final is 0.

    Args:
        lr: rate of the first step.
        steps: how many steps there are.
        power: 1 is a straight line; above it the rate falls fast first, below it fast at the end.
        final: where it ends.
        past_end: ``error`` refuses steps past the end, ``hold`` goes on with ``final``.

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

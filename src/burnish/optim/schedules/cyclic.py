"""Cycles between two rates."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.optim.arithmetic import double
from burnish.optim.schedules.base import StatelessSchedule, check_positive
from burnish.validation import check_count, check_not_negative, require

SHAPES = ("triangular", "triangular2", "exponential")


@dataclass(frozen=True)
class Cyclic(StatelessSchedule):
    """rate(t) = lr + (highest - lr) * height * amplitude.

    The height rises from 0 to 1 in ``rising`` steps and falls back in ``falling``. The amplitude is 1 (``triangular``), half that
    of the previous cycle (``triangular2``), or gamma^t (``exponential``). Source: Smith, "Cyclical learning rates for training
    neural networks", 2017; ``torch.optim.lr_scheduler.CyclicLR``, which calls the last one ``exp_range``.

    Args:
        lr: the lower rate, also that of the first step.
        highest: the upper rate.
        rising: steps from the lower rate to the upper.
        falling: steps back; by default as many.
        shape: ``triangular``, ``triangular2`` (each cycle half as high as the one before) or ``exponential`` (height times
            gamma^step).
        gamma: only for the shape ``exponential``.

    Raises:
        ConfigurationError: a negative or non-finite rate, fewer than one step, an unknown shape, a gamma that is not above 0, or
            one that the shape does not use.
    """

    name = "cyclic"
    lr: float
    highest: float
    rising: int
    falling: int | None = None
    shape: str = "triangular"
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if self.falling is None:
            object.__setattr__(self, "falling", self.rising)
        check_not_negative(self.name, lr=self.lr, highest=self.highest)
        check_count(self.name, rising=self.rising, falling=self._falling)
        require(self.shape in SHAPES, self.name, "shape", self.shape, " or ".join(map(repr, SHAPES)))
        check_positive(self.name, gamma=self.gamma)
        if (self.shape == "exponential") == (self.gamma == 1.0):
            raise ConfigurationError(
                f"{self.name}: shape='{self.shape}' with gamma={self.gamma:g}: a gamma other than 1 is for shape='exponential', "
                "which changes nothing without one: give both, or neither"
            )

    def at(self, step: Tensor) -> Tensor:
        builder = step.builder
        period = self.rising + self._falling
        position = double(builder.op("Mod", step, period))
        height = builder.op("Min", position / float(self.rising), (float(period) - position) / float(self._falling))
        if self.shape == "triangular2":
            height = height * 0.5 ** double(builder.op("Div", step, period))
        elif self.shape == "exponential":
            height = height * self.gamma ** double(step)
        return height * (self.highest - self.lr) + self.lr

    @property
    def _falling(self) -> int:
        return self.rising if self.falling is None else self.falling


cyclic = Cyclic

"""Piecewise constant rates: one rate, rates between given steps, stairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.optim.arithmetic import double, number
from burnish.optim.schedules.base import StatelessSchedule, check_positive
from burnish.validation import check_count, check_not_negative


@dataclass(frozen=True)
class Constant(StatelessSchedule):
    """rate(t) = lr, fixed in the graph; a plain number as ``lr`` is instead an input that every step may override.

    Raises:
        ConfigurationError: a negative or non-finite rate.
    """

    name = "constant"
    lr: float

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)

    def at(self, step: Tensor) -> Tensor:
        return number(step.builder, self.lr)


@dataclass(frozen=True)
class Step(StatelessSchedule):
    """rate(t) = lr * gamma^floor(t / every); ``torch.optim.lr_scheduler.StepLR``.

    Args:
        lr: rate of the first step.
        every: steps per stair.
        gamma: factor from stair to stair.

    Raises:
        ConfigurationError: a negative or non-finite rate, fewer than one step, or a gamma that is not above 0.
    """

    name = "step"
    lr: float
    every: int
    gamma: float = 0.1

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr)
        check_count(self.name, every=self.every)
        check_positive(self.name, gamma=self.gamma)

    def at(self, step: Tensor) -> Tensor:
        return self.gamma ** double(step.builder.op("Div", step, self.every)) * self.lr


@dataclass(frozen=True)
class Piecewise(StatelessSchedule):
    """rate(t) = rates[n], with n the number of boundaries up to t; PyTorch's ``MultiStepLR`` with arbitrary rates.

    Args:
        boundaries: the first steps of each next rate, ascending, each at least 1.
        rates: one more than there are boundaries.

    Raises:
        ConfigurationError: a negative or non-finite rate, boundaries that do not ascend, or another number of rates.
    """

    name = "piecewise"
    boundaries: tuple[int, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("boundaries", "rates"):
            if not isinstance(getattr(self, name), tuple | list):
                raise ConfigurationError(f"{self.name}: {name} must be a list of numbers, not {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_count(self.name, **{f"boundaries[{index}]": boundary for index, boundary in enumerate(self.boundaries)})
        check_not_negative(self.name, **{f"rates[{index}]": rate for index, rate in enumerate(self.rates)})
        if any(earlier >= later for earlier, later in pairwise(self.boundaries)):
            raise ConfigurationError(f"{self.name}: boundaries must ascend, not {[*self.boundaries]}")
        if len(self.rates) != len(self.boundaries) + 1:
            raise ConfigurationError(
                f"{self.name}: there must be one rate more than boundaries, not {len(self.rates)} rates for "
                f"{len(self.boundaries)} boundaries"
            )

    def at(self, step: Tensor) -> Tensor:
        builder = step.builder
        boundaries = builder.integers(self.boundaries)
        passed = builder.cast(builder.op("LessOrEqual", boundaries, step), boundaries.dtype)
        piece = builder.op("ReduceSum", passed, keepdims=0)
        return builder.op("Gather", builder.constant(np.array(self.rates, np.float64)), piece)


constant = Constant
piecewise = Piecewise
step = Step

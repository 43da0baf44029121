"""Half a cosine wave, once or repeated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, repeat, takewhile

import numpy as np

from burnish.graph import Tensor
from burnish.optim.arithmetic import double
from burnish.optim.schedules.base import Descent, StatelessSchedule
from burnish.validation import check_count, check_not_negative

LAST_STEP = 1 << 53
"""Largest number up to which float64 holds every whole number."""


def half_wave(remaining: Tensor) -> Tensor:
    """Emit (1 + cos(pi * (1 - remaining))) / 2, as a squared sine, which keeps its digits close to zero."""
    sine = remaining.builder.op("Sin", remaining * (math.pi / 2))
    return sine * sine


@dataclass(frozen=True)
class Cosine(Descent):
    """rate(t) = final + (lr - final) * (1 + cos(pi * t / steps)) / 2.

    Source: Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017, one cycle;
    ``torch.optim.lr_scheduler.CosineAnnealingLR``.

    Args:
        lr: rate of the first step.
        steps: number of steps.
        final: rate at the end.
        past_end: ``error`` refuses steps after the end, ``hold`` continues with ``final``.

    Raises:
        ConfigurationError: a negative or non-finite rate, fewer than one step, or an unknown ``past_end``.
    """

    name = "cosine"
    lr: float
    steps: int
    final: float = 0.0
    past_end: str = "error"

    def within(self, step: Tensor) -> Tensor:
        return self.descended(half_wave(self.remaining(step)))


@dataclass(frozen=True)
class CosineRestarts(StatelessSchedule):
    """rate(t) = final + (lr - final) * (1 + cos(pi * (t - s) / T)) / 2, in a cycle from step s of length T = period * growth^n.

    Source: Loshchilov and Hutter, "SGDR: stochastic gradient descent with warm restarts", 2017;
    ``torch.optim.lr_scheduler.CosineAnnealingWarmRestarts``.

    Args:
        lr: rate at the beginning of each cycle.
        period: steps of the first cycle.
        growth: ratio of each cycle's length to the one before.
        final: rate that each cycle falls towards.

    Raises:
        ConfigurationError: a negative or non-finite rate, or a period or growth that is not a whole number of at least 1.
    """

    name = "cosine_restarts"
    lr: float
    period: int
    growth: int = 1
    final: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr, final=self.final)
        check_count(self.name, period=self.period, growth=self.growth)

    def at(self, step: Tensor) -> Tensor:
        builder = step.builder
        if self.growth == 1:
            remaining = 1.0 - double(builder.op("Mod", step, self.period)) / float(self.period)
        else:
            # A logarithm would find the cycle too, but not reliably at its first step.
            lengths = accumulate(repeat(self.growth), lambda length, growth: length * growth, initial=self.period)
            known = [*takewhile(lambda length: length < LAST_STEP, lengths)]
            starts = builder.integers([0, *accumulate(known)])
            begun = builder.cast(builder.op("LessOrEqual", starts, step), starts.dtype)
            index = builder.op("ReduceSum", begun, keepdims=0) - 1
            length = builder.op("Gather", builder.constant(np.array([*known, LAST_STEP], np.int64)), index)
            remaining = 1.0 - double(step - builder.op("Gather", starts, index)) / double(length)
        return half_wave(remaining) * (self.lr - self.final) + self.final


cosine = Cosine
cosine_restarts = CosineRestarts

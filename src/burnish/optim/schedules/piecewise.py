"""A rate of its own between one given step and the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import check_not_negative
from burnish.optim.schedules.base import StatelessSchedule, check_counts


@dataclass(frozen=True)
class Piecewise(StatelessSchedule):
    """rate(t) = rates[n], where n is how many boundaries are at most t; ``MultiStepLR`` of PyTorch with free rates."""

    name = "piecewise"
    boundaries: tuple[int, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("boundaries", "rates"):
            if not isinstance(getattr(self, name), tuple | list):
                raise ConfigurationError(f"{self.name}: {name} must be a list of numbers, not {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_counts(self.name, **{f"boundaries[{index}]": boundary for index, boundary in enumerate(self.boundaries)})
        check_not_negative(self.name, **{f"rates[{index}]": rate for index, rate in enumerate(self.rates)})
        if any(earlier >= later for earlier, later in pairwise(self.boundaries)):
            raise ConfigurationError(f"{self.name}: boundaries must ascend, not {[*self.boundaries]}")
        if len(self.rates) != len(self.boundaries) + 1:
            raise ConfigurationError(
                f"{self.name}: there must be one rate more than boundaries, not {len(self.rates)} rates for "
                f"{len(self.boundaries)} boundaries"
            )

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        boundaries = builder.integers(self.boundaries)
        passed = builder.cast(builder.op("LessOrEqual", boundaries, step), boundaries.dtype)
        piece = builder.op("ReduceSum", passed, keepdims=0)
        return builder.op("Gather", builder.constant(np.array(self.rates, np.float64)), piece)


def piecewise(boundaries: Sequence[int], rates: Sequence[float]) -> Piecewise:
    """Return ``rates[0]`` up to the first boundary, ``rates[1]`` from that step on, and so forth; without an end.

    Args:
        boundaries: the steps from which the next rate holds, ascending, each at least 1.
        rates: one more than there are boundaries.

    Raises:
        ConfigurationError: a negative or non-finite rate, boundaries that do not ascend, or another number of rates.
    """
    return Piecewise(boundaries, rates)  # type: ignore[arg-type]  # made tuples there

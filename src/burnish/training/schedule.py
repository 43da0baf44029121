"""The learning rate over a run, as a factor that depends on the step alone, so that a resumed run goes on as it would have."""

from __future__ import annotations

import math
from collections.abc import Callable

from burnish import optim
from burnish.errors import ConfigurationError

Schedule = Callable[[int, int], float]


def constant(step: int, steps: int) -> float:
    """Return 1 at every step."""
    return 1.0


def cosine(step: int, steps: int) -> float:
    """Return (1 + cos(pi * step / steps)) / 2: from 1 down to nearly 0 (Loshchilov and Hutter 2017, "SGDR", one cycle)."""
    return (1 + math.cos(math.pi * step / steps)) / 2


SCHEDULES: dict[str, Schedule] = {"constant": constant, "cosine": cosine}


def get(schedule: str | Schedule) -> Schedule:
    """Return a schedule by name, or the function itself: (step from 0, steps of the whole run) -> factor.

    Raises:
        ConfigurationError: there is no schedule of that name.
    """
    if callable(schedule):
        return schedule
    if isinstance(schedule, optim.Schedule):
        raise ConfigurationError(
            f"schedule: '{schedule.name}' of burnish.optim.schedules is computed in the program: compile with it as lr of the "
            "optimizer, and leave schedule out here"
        )
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"there is no learning-rate schedule '{schedule}'; there is {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[schedule]

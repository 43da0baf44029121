"""The learning rate over a run, as a factor that depends on the step alone, so that a resumed run goes on as it would have."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

from burnish import optim
from burnish.errors import ConfigurationError
from burnish.optim.base import is_schedule
from burnish.settings import is_number

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
        ConfigurationError: there is no schedule of that name; it is one of ``burnish.optim.schedules``, or what makes one; or it
            cannot be called with two numbers.
    """
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ConfigurationError(f"there is no learning-rate schedule '{schedule}'; there is {', '.join(sorted(SCHEDULES))}")
        return SCHEDULES[schedule]
    computed = _computed_by_programs(schedule)
    if computed is not None:
        raise ConfigurationError(
            f"schedule: '{computed}' of burnish.optim.schedules is computed in the program: compile with it as lr of the "
            "optimizer, and leave schedule out here"
        )
    if isinstance(schedule, type) or not callable(schedule):
        raise ConfigurationError(
            f"schedule: {schedule!r} is none: give {' or '.join(map(repr, sorted(SCHEDULES)))}, or a function of (step from 0, "
            "steps of the run) that returns the factor of the learning rate"
        )
    _check_call(schedule)
    return schedule


def _computed_by_programs(schedule: object) -> str | None:
    """The name of a schedule of ``burnish.optim``, or of the function or class that makes one."""
    if any(schedule is make for make in optim.schedules.SCHEDULES.values()):
        return str(getattr(schedule, "__name__", schedule))
    if isinstance(schedule, type):
        return schedule.__name__ if schedule.__module__.startswith(optim.schedules.__name__) else None
    return schedule.name if is_schedule(schedule) else None


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return what a schedule says of a step.

    Raises:
        ConfigurationError: that is no finite number.
    """
    value = schedule(step, steps)
    if not is_number(value):
        raise ConfigurationError(
            f"schedule: the function returned {value!r} for step {step} of {steps}: let it return the factor of the learning "
            "rate, a finite number"
        )
    return float(value)


def _check_call(schedule: Schedule) -> None:
    try:
        inspect.signature(schedule).bind(0, 1)
    except TypeError as error:
        raise ConfigurationError(
            f"schedule: the function {schedule!r} cannot be called with a step and the steps of the run ({error}): give a "
            "function of these two, such as lambda step, steps: 1 - step / steps"
        ) from error
    except ValueError:  # a function of an extension module may have no signature to look at
        return

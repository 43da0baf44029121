"""Factors of learning rates that a trainer computes, from the step and the steps of the run, for programs that take a rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from burnish.errors import ConfigurationError
from burnish.optim import schedules
from burnish.optim.base import is_schedule
from burnish.settings import check_call, is_number

Factor = Callable[[int, int], float]
"""(step from 0, steps of the run) -> factor of the rate. It depends on these alone: a resumed run goes on as it would have."""


def constant(step: int, steps: int) -> float:
    """Return 1 at every step."""
    return 1.0


def cosine(step: int, steps: int) -> float:
    """Return (1 + cos(pi * step / steps)) / 2: from 1 down to nearly 0 (Loshchilov and Hutter 2017, "SGDR", one cycle)."""
    return (1 + math.cos(math.pi * step / steps)) / 2


FACTORS: dict[str, Factor] = {"constant": constant, "cosine": cosine}


def get(factor: str | Factor) -> Factor:
    """Return a factor by name, or the function itself.

    Raises:
        ConfigurationError: there is none of that name; it is a schedule that programs compute, or what makes one; or it cannot be
            called with two numbers.
    """
    if isinstance(factor, str):
        if factor not in FACTORS:
            raise ConfigurationError(f"there is no learning-rate schedule '{factor}'; choose among {', '.join(FACTORS)}")
        return FACTORS[factor]
    computed: Any = factor
    is_class = isinstance(computed, type) and computed.__module__.startswith(schedules.__name__)
    if is_schedule(computed) or is_class or computed in schedules.SCHEDULES.values():
        name = getattr(computed, "__name__", None) or computed.name
        raise ConfigurationError(
            f"schedule: '{name}' of burnish.optim.schedules is computed in the program: compile with it as lr of the "
            "optimizer, and leave schedule out here"
        )
    if isinstance(factor, type) or not callable(factor):
        raise ConfigurationError(
            f"schedule: {factor!r} is none: give {' or '.join(map(repr, FACTORS))}, or a function of (step from 0, steps of the "
            "run) that returns the factor of the learning rate"
        )
    check_call("schedule", factor, "a step and the steps of the run", "lambda step, steps: 1 - step / steps")
    return factor


def factor_at(factor: Factor, step: int, steps: int) -> float:
    """Return the factor of a step.

    Raises:
        ConfigurationError: it is no finite number.
    """
    value = factor(step, steps)
    if not is_number(value):
        raise ConfigurationError(
            f"schedule: the function returned {value!r} for step {step} of {steps}: let it return the factor of the learning "
            "rate, a finite number"
        )
    return float(value)

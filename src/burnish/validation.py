"""Checks of settings: each raises a ConfigurationError that says whose setting it is, what it must be and what it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from burnish.errors import ConfigurationError

NOT_NEGATIVE = "a finite number that is not negative"
MOST = 2**62
"""Counts stay below it: in graphs they are int64, and are added up there."""
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether something is a finite number that float32 can hold, of Python's or NumPy's, and no truth value."""
    import numpy as np

    is_one = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_one and abs(value) <= LARGEST_FLOAT32  # type: ignore[arg-type]


def is_whole(value: object) -> TypeGuard[int]:
    """Whether something is a whole number, of Python's or NumPy's, and no truth value."""
    import numpy as np

    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def require(is_valid: bool, owner: str, name: str, value: object, wanted: str) -> None:
    """Raise ConfigurationError for a value that is not valid.

    Args:
        is_valid: whether it is.
        owner: whose setting it is: ``sgd``.
        name: of the setting.
        value: what was given.
        wanted: what it must be: ``a number above 0``.
    """
    if not is_valid:
        raise ConfigurationError(f"{owner}: {name} must be {wanted}, not {value!r}")


def check_finite(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError for what is not a finite number."""
    for name, number in numbers.items():
        require(is_number(number), owner, name, number, "a finite number")


def check_not_negative(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError for what is not a finite number or is negative."""
    for name, number in numbers.items():
        require(is_number(number) and number >= 0, owner, name, number, NOT_NEGATIVE)


def check_positive(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError for what is not a finite number or is not above 0."""
    for name, number in numbers.items():
        require(is_number(number) and number > 0, owner, name, number, "a finite number above 0")


def check_fraction(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError for what is not a number in [0, 1)."""
    for name, number in numbers.items():
        require(is_number(number) and 0 <= number < 1, owner, name, number, "at least 0 and less than 1")


def check_number(owner: str, name: str, number: object, minimum: float = -math.inf, above: float = -math.inf) -> float:
    """Return a finite number of at least ``minimum`` that is larger than ``above``.

    Raises:
        ConfigurationError: it is something else.
    """
    if is_number(number) and number >= minimum and number > above:
        return float(number)
    bound = f" above {above:g}" if above > -math.inf else f" of at least {minimum:g}" if minimum > -math.inf else ""
    raise ConfigurationError(f"{owner}: {name} must be a finite number{bound}, not {number!r}")


def check_count(owner: str, least: int = 1, **counts: int) -> None:
    """Raise ConfigurationError for what is no whole number, is below ``least``, or is too large for int64."""
    needed = f"of at least {least}" if least else "that is not negative"
    for name, count in counts.items():
        require(is_whole(count) and count >= least, owner, name, count, f"a whole number {needed}")
        if count >= MOST:
            raise ConfigurationError(f"{owner}: {name} must be below 2^62, not {count}: give a smaller one")


def check_choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigurationError for what is not among the choices."""
    *others, last = map(repr, choices)
    require(value in choices, owner, name, value, f"{', '.join(others)} or {last}")

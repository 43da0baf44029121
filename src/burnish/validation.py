"""Checks of settings. Each raises a ConfigurationError with the owner of the setting, the valid values and the given one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from burnish.errors import ConfigurationError

NOT_NEGATIVE = "a finite number that is not negative"
MOST = 2**62
"""Upper bound of counts: graphs add them as int64."""
LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a finite Python or NumPy number within the range of float32; booleans are no numbers."""
    import numpy as np

    is_one = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return is_one and abs(value) <= LARGEST_FLOAT32  # type: ignore[arg-type]


def is_whole(value: object) -> TypeGuard[int]:
    """True for a Python or NumPy integer; booleans are no integers."""
    import numpy as np

    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def require(is_valid: bool, owner: str, name: str, value: object, wanted: str) -> None:
    """Raise ConfigurationError for an invalid value.

    Args:
        is_valid: True if the value is valid.
        owner: owner of the setting: ``sgd``.
        name: name of the setting.
        value: the given value.
        wanted: description of valid values: ``a number above 0``.
    """
    if not is_valid:
        raise ConfigurationError(f"{owner}: {name} must be {wanted}, not {value!r}")


def check_finite(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError unless each is a finite number."""
    for name, number in numbers.items():
        require(is_number(number), owner, name, number, "a finite number")


def check_not_negative(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError unless each is a finite number of at least 0."""
    for name, number in numbers.items():
        require(is_number(number) and number >= 0, owner, name, number, NOT_NEGATIVE)


def check_positive(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError unless each is a finite number above 0."""
    for name, number in numbers.items():
        require(is_number(number) and number > 0, owner, name, number, "a finite number above 0")


def check_fraction(owner: str, **numbers: float) -> None:
    """Raise ConfigurationError unless each is a number in [0, 1)."""
    for name, number in numbers.items():
        require(is_number(number) and 0 <= number < 1, owner, name, number, "at least 0 and less than 1")


def check_number(owner: str, name: str, number: object, minimum: float = -math.inf, above: float = -math.inf) -> float:
    """Return a finite number of at least ``minimum`` and above ``above``, as a float.

    Raises:
        ConfigurationError: it is anything else.
    """
    if is_number(number) and number >= minimum and number > above:
        return float(number)
    bound = f" above {above:g}" if above > -math.inf else f" of at least {minimum:g}" if minimum > -math.inf else ""
    raise ConfigurationError(f"{owner}: {name} must be a finite number{bound}, not {number!r}")


def check_count(owner: str, least: int = 1, **counts: int) -> None:
    """Raise ConfigurationError unless each is a whole number of at least ``least`` and below 2^62."""
    needed = f"of at least {least}" if least else "that is not negative"
    for name, count in counts.items():
        require(is_whole(count) and count >= least, owner, name, count, f"a whole number {needed}")
        if count >= MOST:
            raise ConfigurationError(f"{owner}: {name} must be below 2^62, not {count}: give a smaller one")


def check_choice(owner: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigurationError unless the value is among the choices."""
    *others, last = map(repr, choices)
    require(value in choices, owner, name, value, f"{', '.join(others)} or {last}")

"""What options of all kinds share: settings behind a name, patterns of names, and what comes near a name that there is not."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

from burnish.errors import ConfigurationError

# A comma inside brackets belongs to a value.
_COMMA = re.compile(r",(?![^\[]*\])")


def read_settings(kind: str, text: str) -> tuple[str, dict[str, Any]]:
    """Read ``huber:delta=0.5,reduction=sum`` or ``adamw:betas=[0.8,0.9]``: a name, and settings behind a colon.

    Args:
        kind: what it is, for the message: ``loss``.
        text: a value in it is JSON where it can be read as such, else text.

    Raises:
        ConfigurationError: a setting without a value, or one that is given twice.
    """
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, _COMMA.split(rest)):
        setting, separator, value = (word.strip() for word in part.partition("="))
        if not separator:
            raise ConfigurationError(f"{kind} '{text}': settings are written name=value, with commas between, not '{part}'")
        if setting in settings:
            raise ConfigurationError(f"{kind} '{text}' gives {setting} twice: give it once")
        try:
            settings[setting] = json.loads(value)
        except json.JSONDecodeError:
            settings[setting] = value
    return name.strip(), settings


def is_number(value: object) -> bool:
    """Whether something is a finite number of Python's, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Whether something is a whole number of Python's, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def matches_pattern(name: str, pattern: str) -> bool:
    """Whether a name is the pattern, or fits it as a shell-style pattern; upper and lower case differ."""
    return name == pattern or fnmatchcase(name, pattern)


def nearest(name: str, known: Collection[str]) -> str:
    """Return up to three of the known names, quoted: those that come near, else the first."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
    return ", ".join(f"'{other}'" for other in close)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return `` (did you mean 'sgd'?)`` where a known name comes near, else nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""

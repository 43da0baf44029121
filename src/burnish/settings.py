"""What options of all kinds share: settings behind a name, patterns of names, and what comes near a name that there is not."""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from burnish.errors import ConfigurationError

Made = TypeVar("Made")

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


def with_settings(what: str, make: Callable[..., Made], settings: Mapping[str, Any]) -> Made:
    """Return what ``make`` makes of settings by name.

    Args:
        what: what it makes, for the message: ``optimizer 'sgd'``.
        make: a function or class.
        settings: its keyword arguments.

    Raises:
        ConfigurationError: a setting that it does not take, one that it needs and was not given, or a value that it cannot use.
    """
    parameters = inspect.signature(make).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes = [one.name for one in named]
    if all(one.kind is not one.VAR_KEYWORD for one in parameters):
        for name in settings:
            if name not in takes:
                raise ConfigurationError(
                    f"{what} has no option '{name}'{suggestion(name, takes)}; it takes {', '.join(takes) or 'none'}"
                )
    for one in named:
        if one.default is one.empty and one.name not in settings:
            raise ConfigurationError(f"{what} needs the option '{one.name}': give it")
    try:
        return make(**settings)
    except TypeError as error:
        raise ConfigurationError(f"{what}: {error}; it was given the options {dict(settings)}") from error


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

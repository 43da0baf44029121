"""Parsing and checking of settings, name patterns, and suggestions for unknown names."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import operator
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any, Protocol, TypeVar, runtime_checkable

from burnish.errors import ConfigurationError

Made = TypeVar("Made")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[KMG]i?B|B)?", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE)
_MOST_DIGITS = 18
_LONGEST_NAME = 200
"""Longest name, in characters, that is compared with the known names."""
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def is_number_text(text: str) -> bool:
    """True if a text is a number in the digits 0 to 9, NaN or infinity. Python's ``float`` would read ``1_0`` as 10."""
    return _NUMBER.fullmatch(text.strip()) is not None


def is_natural_text(text: str) -> bool:
    """True if a text consists of 1 to 18 digits 0 to 9. Python's ``isdigit`` also accepts others, such as ``²``."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def read_number(text: str) -> float:
    """Return the number in a text.

    Raises:
        ValueError: it is no number, or has underscores or digits other than 0 to 9.
    """
    if not is_number_text(text):
        raise ValueError(f"{text!r} is no number in the digits 0 to 9")
    return float(text)


def read_whole(text: str) -> int:
    """Return the whole number in a text, with the rules of ``read_number``.

    Raises:
        ValueError: it is not a whole number.
    """
    if not is_number_text(text):
        raise ValueError(f"{text!r} is no whole number in the digits 0 to 9")
    return int(text)


def read_settings(kind: str, text: str, first: str | None = None) -> tuple[str, dict[str, Any]]:
    """Parse a name with settings, such as ``huber:delta=0.5,reduction=sum`` or ``adamw:betas=[0.8,0.9]``.

    Args:
        kind: the kind of object, for the message: ``loss``.
        text: the text. Each value is parsed as JSON, a number, ``True``, ``False`` or ``None`` if possible, and is text
            otherwise.
        first: the setting that may be given first without its name: ``ghost:32``. If empty, the value itself is used as the name.

    Raises:
        ConfigurationError: a setting has no value or is repeated, or no settings follow the colon.
    """
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if colon and not rest:
        raise ConfigurationError(f"{kind} '{text}': no settings stand after the colon: give some, or leave the colon out")
    settings: dict[str, Any] = {}
    for index, part in enumerate(filter(None, _parts(rest))):
        setting, separator, value = (word.strip() for word in part.partition("="))
        if not separator and index == 0 and first is not None:
            setting, value = first or setting, setting
        elif not separator:
            raise ConfigurationError(f"{kind} '{text}': settings are written name=value, with commas between, not '{setting}'")
        if setting in settings:
            raise ConfigurationError(f"{kind} '{text}' gives {setting} twice: give it once")
        settings[setting] = _value(value)
    return name, settings


def _parts(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _value(text: str) -> Any:
    for read in (json.loads, read_number):
        try:
            return read(_PYTHON_WORDS.get(text, text))
        except (ValueError, RecursionError):
            continue
    return text


def split(values: Sequence[str]) -> list[str]:
    """Return the values of an option that may be repeated or hold a comma-separated list."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def is_switched_off(variable: str) -> bool:
    """True if an environment variable is ``off``.

    Raises:
        ConfigurationError: it is neither ``on``, ``off`` nor empty.
    """
    text = os.environ.get(variable, "")
    if text not in ("", "on", "off"):
        raise ConfigurationError(f"{variable} is {text!r} in the environment: write off, or leave it out")
    return text == "off"


def memory_size(text: str) -> int | None:
    """Return the number of bytes in a text such as ``1.5GB``, ``64 MiB`` or ``1000``; None if it is not a size."""
    found = _SIZE.fullmatch(text)
    return None if found is None else int(float(found["number"]) * _UNITS[(found["unit"] or "B").upper()])


def with_settings(what: str, make: Callable[..., Made], settings: Mapping[str, Any]) -> Made:
    """Return ``make(**settings)``.

    Args:
        what: the object, for the message: ``optimizer 'sgd'``.
        make: a function or class.
        settings: its keyword arguments.

    Raises:
        ConfigurationError: a setting is unknown, missing or invalid.
    """
    check_settings(what, make, settings)
    try:
        return make(**settings)
    except TypeError as error:
        raise ConfigurationError(f"{what}: {error}; it was given the options {dict(settings)}") from error


def check_settings(what: str, make: Callable[..., object], settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if ``make`` does not take one of the settings, or requires one that is missing."""
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


class PlainSettings:
    """Base of frozen dataclasses of settings. It converts NumPy scalars to Python numbers before other checks.

    Scalars nested in tuples, lists and dictionaries are converted too. A field declared ``bool`` must be True or False, since any
    text would count as true. Both steps run before a subclass's ``__post_init__``.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check = cls.__dict__.get("__post_init__")
        if check is None:
            return

        @functools.wraps(check)
        def checked(self: PlainSettings) -> None:
            PlainSettings.__post_init__(self)
            check(self)

        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        _make_plain(self)
        for field in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            flag = getattr(self, field.name)
            if field.type in (bool, "bool") and not isinstance(flag, bool):
                raise ConfigurationError(f"{self.owner}: {field.name} must be True or False, not {flag!r}")

    @property
    def owner(self) -> str:
        """Name of the object with the settings, for messages."""
        return getattr(self, "name", type(self).__name__)


class NamedSettings(PlainSettings):
    """Plain settings with a name, which can be restored from their options.

    Fields with ``compare=False`` are no settings: ``burnish.compile`` sets them.
    """

    @property
    def name(self) -> str:
        """Registered name; subclasses set it as ``name = "sgd"``."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values from which an equal object can be made."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.compare}  # type: ignore[arg-type]
        return {"name": self.name} | {name: as_option(value) for name, value in settings.items()}


@runtime_checkable
class HasOptions(Protocol):
    """An object that can be restored from its options."""

    def options(self) -> dict[str, Any]: ...


def as_option(value: Any) -> Any:
    """Return a setting as a JSON-compatible value."""
    if isinstance(value, HasOptions):
        return value.options()
    return list(value) if isinstance(value, tuple) else value


def _make_plain(settings: PlainSettings) -> None:
    for field in fields(settings):  # type: ignore[arg-type]  # its subclasses are dataclasses
        value = getattr(settings, field.name)
        converted = plain(value)
        if converted is not value:
            object.__setattr__(settings, field.name, converted)


def plain(value: Any) -> Any:
    """Return a setting with NumPy scalars replaced by Python numbers and booleans; the same object if it has none."""
    import numpy as np  # imported here to keep the command's help fast

    if isinstance(value, np.bool_ | np.integer | np.floating):
        return bool(value) if isinstance(value, np.bool_) else int(value) if isinstance(value, np.integer) else float(value)
    if type(value) in (tuple, list):
        parts = [plain(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if type(value) is dict:
        items = {key: plain(part) for key, part in value.items()}
        return value if all(items[key] is part for key, part in value.items()) else items
    return value


def check_call(option: str, function: Callable[..., Any], arguments: str, example: str) -> None:
    """Raise ConfigurationError if a function cannot be called with two arguments.

    Args:
        option: the option that takes the function, for the message.
        function: the function.
        arguments: its two arguments, in words.
        example: a valid function, as Python text.
    """
    try:
        inspect.signature(function).bind(0, 1)
    except TypeError as error:
        raise ConfigurationError(
            f"{option}: the function {function!r} cannot be called with {arguments} ({error}): give a function of these two, "
            f"such as {example}"
        ) from error
    except ValueError:  # functions of extension modules may have no signature
        return


def call_hint(value: object) -> str:
    """Return ``: call it, as in cosine(...)`` if a class or function was given instead of an object, else an empty text."""
    if not isinstance(value, type | FunctionType):
        return ""
    name = value.name if isinstance(value, type) and issubclass(value, NamedSettings) else value.__name__
    return f": call it, as in {name}(...)"


def matches_pattern(name: str, pattern: str) -> bool:
    """True if a name equals a pattern or matches it as a shell-style pattern; case-sensitive."""
    return name == pattern or fnmatchcase(name, pattern)


def nearest(name: str, known: Collection[str]) -> str:
    """Return up to three known names, quoted: the most similar ones, or the first if none is similar."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
    return ", ".join(f"'{other}'" for other in close)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return `` (did you mean 'sgd'?)`` if a known name is similar, else an empty text."""
    close = difflib.get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else ()
    return f" (did you mean '{close[0]}'?)" if close else ""

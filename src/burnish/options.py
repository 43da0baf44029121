"""Options declared once, as fields of a frozen dataclass, and used for keyword arguments and the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from burnish.errors import ConfigurationError
from burnish.settings import suggestion

Keywords = ParamSpec("Keywords")
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")
Asked = TypeVar("Asked", covariant=True)
Result = TypeVar("Result")

DECLARED = "declared"
"""Metadata key of a field that ``option`` made."""


@dataclass(frozen=True)
class Declaration:
    """The declaration of an option, in addition to its type and default.

    Attributes:
        check: converts a given value, such as a name to its object; raises ConfigurationError for a value that is wrong for any
            model or data. Not applied to the default.
        help: help of the command line: one sentence without the default, and after an empty line the text that ``--help-all``
            adds; None hides the option from the command line.
        shown_default: text for the default in the help, if the value itself is not clear.
        is_common: True if ``--help`` lists the option; ``--help-all`` lists all options.
        short: one-letter form on the command line, such as ``-e``.
        metavar: name of the value in the help.
        several: True if it may be repeated; ``read`` then takes a list.
        kind: type of the value on the command line.
        least: the smallest number.
        spelled: name on the command line; by default the field name with dashes.
        read: parses the value from the command line; raises ConfigurationError for an invalid text.
    """

    check: Callable[[Any], Any] | None = None
    help: str | None = None
    shown_default: str | None = None
    is_common: bool = False
    short: str | None = None
    metavar: str | None = None
    several: bool = False
    kind: type = str
    least: int | None = None
    spelled: str | None = None
    read: Callable[[Any], Any] = lambda given: given


def option(default: Any = MISSING, *, compare: bool = True, **declared: Any) -> Any:
    """Declare an option, as a field of a subclass of ``Options``. ``declared`` takes the fields of ``Declaration``."""
    return field(default=default, compare=compare, metadata={DECLARED: Declaration(**declared)})


def same_option(options: type[Any], name: str, default: Any = MISSING, **changed: Any) -> Any:
    """Declare the same option as another class, with another default or changes to its ``Declaration``."""
    other, declared = declarations(options)[name]
    return field(default=other.default if default is MISSING else default, metadata={DECLARED: replace(declared, **changed)})


def declarations(options: type[Any]) -> dict[str, tuple[Field[Any], Declaration]]:
    """Return the field and the declaration of each option, by name, in order."""
    return {one.name: (one, one.metadata.get(DECLARED, Declaration())) for one in fields(options)}


@dataclass(frozen=True)
class Options:
    """Base class of the options of one topic.

    Subclasses are frozen dataclasses with fields from ``option``, documented in their docstrings.

    Raises:
        ConfigurationError: an option has an invalid value.
    """

    def __post_init__(self) -> None:
        for name, (one, declared) in declarations(type(self)).items():
            value = getattr(self, name)
            if declared.check is not None and not (type(value) is type(one.default) and value == one.default):
                object.__setattr__(self, name, declared.check(value))


class Taker(Protocol[Keywords, Asked]):
    """A decorator that adds keyword arguments for options; ``takes`` returns it."""

    @overload
    def __call__(self, function: Callable[[First, Asked], Result], /) -> Callable[Concatenate[First, Keywords], Result]: ...

    @overload
    def __call__(
        self, function: Callable[[First, Second, Asked], Result], /
    ) -> Callable[Concatenate[First, Second, Keywords], Result]: ...

    @overload
    def __call__(
        self, function: Callable[[First, Second, Third, Asked], Result], /
    ) -> Callable[Concatenate[First, Second, Third, Keywords], Result]: ...


def takes(options: Callable[Keywords, Asked], otherwise: str = "") -> Taker[Keywords, Asked]:
    """Return a decorator for a function whose last parameter is ``options``: it then takes each option as a keyword argument.

    The options are added to its signature and its docstring.

    Args:
        options: a subclass of ``Options``.
        otherwise: the function or class to suggest for an unknown option.
    """
    remedy = f"; for anything else use {otherwise}" if otherwise else ""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function)
        leading = [*own.parameters.values()][:-1]
        keywords = [*inspect.signature(options).parameters.values()]
        signature = own.replace(parameters=[*leading, *keywords])
        names = [one.name for one in keywords]

        @functools.wraps(function)
        def taking(*arguments: Any, **given: Any) -> Any:
            for name in given:
                if name not in signature.parameters:
                    known = list(signature.parameters)
                    called = function.__qualname__.removesuffix(".__init__")
                    problem = f"{called} has no option '{name}'{suggestion(name, known)}"
                    raise ConfigurationError(f"{problem}: see help(burnish.{called}) for its options{remedy}")
            bound = signature.bind(*arguments, **given).arguments
            asked = options(**{name: bound.pop(name) for name in names if name in bound})  # type: ignore[call-arg]
            return function(*bound.values(), asked)

        taking.__signature__ = signature  # type: ignore[attr-defined]
        taking.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        taking.__annotations__["return"] = signature.return_annotation
        taking.__doc__ = _with_arguments(function.__doc__, options.__doc__)
        return taking

    return decorate


def _with_arguments(function: str | None, options: str | None) -> str | None:
    """Return a function's docstring with the arguments of its options after its own."""
    if function is None or options is None:  # Python was started with -OO
        return function
    text, added = inspect.cleandoc(function) + "\n", _arguments(inspect.cleandoc(options))
    own = _arguments(text)
    return text.replace(own, own + added, 1)


def _arguments(text: str) -> str:
    lines = text.partition("\nArgs:\n")[2].splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if not line.startswith("    ")), len(lines))
    return "".join(lines[:end]).rstrip("\n") + "\n"


def read_options(options: type[Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return option values by name, parsed from the command line or a file; None and empty lists are skipped.

    Raises:
        ConfigurationError: a text is not a valid value.
    """
    declared = declarations(options)
    return {name: declared[name][1].read(given) for name, given in texts.items() if given not in (None, [])}

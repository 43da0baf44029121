"""Options that are declared once: fields of a frozen dataclass, from which keyword arguments and the command line are derived."""

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
"""The metadata of a field that ``option`` made."""


@dataclass(frozen=True)
class Declaration:
    """What an option is declared with beside its type and its default.

    Attributes:
        check: returns the value that is kept of the one that is given, such as an object for its name; raises
            ConfigurationError for a value that is wrong whatever the model or the data. The default is kept as it is.
        help: of the command line: one sentence without the default, and after an empty line what ``--help-all`` adds; None for
            an option that the command line does not have.
        shown_default: what the help calls the default, if the value itself does not say it.
        is_common: True for an option that most people need: ``--help`` lists it, and ``--help-all`` the rest.
        short: its name of one letter on the command line, such as ``-e``.
        metavar: what the help calls the value.
        several: may be given several times: ``read`` takes a list.
        kind: the type of a value on the command line.
        least: the smallest number.
        spelled: how the command line writes it; by default its name, with dashes.
        read: returns the value of what the command line gives; raises ConfigurationError for a text that says none.
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
    """Declare an option, as a field of a subclass of ``Options``; ``declared`` is what ``Declaration`` takes."""
    return field(default=default, compare=compare, metadata={DECLARED: Declaration(**declared)})


def same_option(options: type[Any], name: str, default: Any = MISSING, **changed: Any) -> Any:
    """Declare an option as another class does, but for another default, or what changes of its ``Declaration``."""
    other, declared = declarations(options)[name]
    return field(default=other.default if default is MISSING else default, metadata={DECLARED: replace(declared, **changed)})


def declarations(options: type[Any]) -> dict[str, tuple[Field[Any], Declaration]]:
    """Return the field and the declaration of each option, by name, in their order."""
    return {one.name: (one, one.metadata.get(DECLARED, Declaration())) for one in fields(options)}


@dataclass(frozen=True)
class Options:
    """Options of one topic. A subclass is a frozen dataclass whose fields ``option`` makes; its docstring says what each is.

    Raises:
        ConfigurationError: a value that an option cannot have.
    """

    def __post_init__(self) -> None:
        for name, (one, declared) in declarations(type(self)).items():
            value = getattr(self, name)
            if declared.check is not None and not (type(value) is type(one.default) and value == one.default):
                object.__setattr__(self, name, declared.check(value))


class Taker(Protocol[Keywords, Asked]):
    """What gives a function the options of a class; ``takes`` returns it."""

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
    """Let a function whose last parameter is ``options`` take each of them as a keyword argument.

    Its signature and its docstring have them too, as they have them in the class.

    Args:
        options: a subclass of ``Options``.
        otherwise: for an option that it does not have: the function or class that may have it.
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
    """Return the docstring of a function with the arguments of its options at the end of its own."""
    if function is None or options is None:  # Python was started with -OO
        return function
    text, added = inspect.cleandoc(function) + "\n", _arguments(inspect.cleandoc(options))
    own = _arguments(text)
    return text.replace(own, own + added, 1)


def _arguments(text: str) -> str:
    """Return the lines below ``Args:``."""
    lines = text.partition("\nArgs:\n")[2].splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if not line.startswith("    ")), len(lines))
    return "".join(lines[:end]).rstrip("\n") + "\n"


def read_options(options: type[Any], texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options by name, from what the command line or a file gives; None and no texts give nothing.

    Raises:
        ConfigurationError: a text that says no value.
    """
    declared = declarations(options)
    return {name: declared[name][1].read(given) for name, given in texts.items() if given not in (None, [])}

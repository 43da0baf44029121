"""Options that belong together: a dataclass with a field for each, which commands take as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer


@dataclass(frozen=True)
class OptionGroup:
    """Options of one topic. Each field of a subclass is an option of the commands that take it (``takes_options``).

    Attributes:
        named: the fields that the command line names; it leaves the others at their defaults.
    """

    named: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def first_named(self) -> str | None:
        """The first of these options that the command line names, as it is written; None where it names none."""
        return f"--{self.named[0].replace('_', '-')}" if self.named else None


def takes_options(*left_out: str, only: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of the ``OptionGroup``s among its parameters.

    Args:
        left_out: fields that stay at their defaults.
        only: the only fields that become options; empty for all.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        takes_context = "context" in parameters
        expanded_parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        groups: dict[str, type[OptionGroup]] = {}
        options: dict[str, list[str]] = {}
        for name, parameter in parameters.items():
            if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, OptionGroup):
                groups[name] = parameter.annotation
                fields = _options_of(parameter.annotation, left_out, only)
                options[name] = [field.name for field in fields]
                expanded_parameters += fields
            elif name != "context":
                expanded_parameters.append(parameter)

        @functools.wraps(command)
        def expanded(context: typer.Context, **values: Any) -> None:
            arguments: dict[str, Any] = {"context": context} if takes_context else {}
            for name, group in groups.items():
                named = tuple(option for option in options[name] if _names(context, option))
                arguments[name] = group(**{option: values.pop(option) for option in options[name]}, named=named)
            command(**arguments, **values)

        # Typer reads a command's options from these two, and calls it with names alone.
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded_parameters}
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in expanded_parameters]
        expanded.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return expanded

    return decorate


def _options_of(group: type[OptionGroup], left_out: Sequence[str], only: Sequence[str]) -> list[inspect.Parameter]:
    parameters = inspect.signature(group, eval_str=True).parameters.values()
    return [
        parameter
        for parameter in parameters
        if parameter.name != "named" and parameter.name not in left_out and (not only or parameter.name in only)
    ]


def _names(context: typer.Context, option: str) -> bool:
    """Whether the command line names an option, where it may be at its default otherwise."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"

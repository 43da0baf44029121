"""Groups of related options: a dataclass with a field for each, which commands take as one parameter."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Annotated, Any, ClassVar, get_args

import typer

from burnish.errors import ConfigurationError
from burnish.options import Options, declarations, read_options

COMMON = "common"
"""Marks a common option in its ``Annotated``: ``--help`` lists it, and ``--help-all`` also lists the others."""


@dataclass(frozen=True)
class OptionGroup:
    """Options of one topic.

    Each field of a subclass is an option of its commands, a group, or ``Options`` that are declared for Python and the command
    line at once (``takes_options``).

    Attributes:
        panel: heading of these options in the help.
        placed: options that the help lists after another, named one, or first for None.
        named: options given on the command line; the others have their defaults.
    """

    panel: ClassVar[str | None] = None
    placed: ClassVar[Mapping[str, str | None]] = {}
    named: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def first_named(self) -> str | None:
        """The first of these options given on the command line, with dashes, or None."""
        return f"--{self.named[0].replace('_', '-')}" if self.named else None


def takes_options(
    *left_out: str, only: Sequence[str] = (), defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of the ``OptionGroup``s among its parameters.

    Args:
        left_out: options that keep their defaults.
        only: the only options of the command; empty for all.
        defaults: defaults in words, for options whose default the command chooses itself.
    """

    said = defaults or {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(command, eval_str=True).parameters
        groups = {name: parameter.annotation for name, parameter in declared.items() if _is_group(parameter)}
        parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
        for name, parameter in declared.items():
            if name in groups:
                options = _options_of(groups[name])
                own = [option for option in options if option.name not in left_out and (not only or option.name in only)]
                parameters += [_with_default(option, said[option.name]) if option.name in said else option for option in own]
            elif name != "context":
                parameters.append(parameter)

        @functools.wraps(command)
        def expanded(context: typer.Context, **values: Any) -> None:
            arguments: dict[str, Any] = {"context": context} if "context" in declared else {}
            named = [name for name in values if _names(context, name)]
            arguments |= {name: _built(group, values, named) for name, group in groups.items()}
            command(**arguments, **{name: value for name, value in values.items() if name in declared and name not in groups})

        # Typer reads a command's options from these two, and calls it with keywords only.
        expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        expanded.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return expanded

    return decorate


def values_of(options: type[Any], **texts: Any) -> dict[str, Any]:
    """Return the values of the options given on the command line, by name.

    Raises:
        typer.BadParameter: a text is not a valid value.
    """
    try:
        return read_options(options, texts)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error


def declared_option(options: type[Any], name: str, panel: str | None = None) -> Any:
    """Return the command-line option for one that ``options`` declares."""
    field, declared = declarations(options)[name]
    names = [declared.spelled or f"--{name.replace('_', '-')}", *filter(None, [declared.short])]
    shown: Any = declared.shown_default or (declared.several and field.default) or True
    return typer.Option(
        *names, metavar=declared.metavar, help=declared.help, min=declared.least, rich_help_panel=panel, show_default=shown
    )


def _declared_parameter(options: type[Any], name: str) -> inspect.Parameter:
    field, declared = declarations(options)[name]
    kind: Any = GenericAlias(list, (declared.kind,)) if declared.several else declared.kind
    is_given = isinstance(field.default, declared.kind) and not declared.several
    default = field.default if is_given else None
    kind = kind if is_given else kind | None
    marks = (COMMON,) if declared.is_common else ()
    declared_as = Annotated[kind, declared_option(options, name), *marks]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=declared_as)


def _is(parameter: inspect.Parameter, kind: type) -> bool:
    return isinstance(parameter.annotation, type) and issubclass(parameter.annotation, kind)


def _is_group(parameter: inspect.Parameter) -> bool:
    return _is(parameter, OptionGroup)


def _fields_of(group: type[OptionGroup]) -> Mapping[str, inspect.Parameter]:
    """Return the options and groups inside a group, by name; first those inherited from ``Options``."""
    hints: dict[str, Any] = {}
    for each in reversed(group.__mro__):
        if issubclass(each, OptionGroup):
            hints |= inspect.get_annotations(each, eval_str=True)
    declared = declarations(group)
    options = {name: one for name, one in inspect.signature(group).parameters.items() if name != "named"}
    found = {
        name: one.replace(annotation=hints[name]) if name in hints else _declared_parameter(group, name)
        for name, one in options.items()
        if name in hints or declared[name][1].help is not None
    }
    names = [name for name in found if name not in group.placed]
    for name, before in group.placed.items():
        names.insert(0 if before is None else names.index(before) + 1, name)
    return {name: found[name] for name in names}


def _options_of(group: type[OptionGroup]) -> Sequence[inspect.Parameter]:
    """Return the options of a group in order, including nested groups and ``Options``.

    A field with the name of a declared option replaces it.
    """
    own, placed = _fields_of(group), set[str]()
    options: list[inspect.Parameter] = []

    def add(name: str) -> None:
        if name in placed:
            return
        placed.add(name)
        parameter = own[name]
        if _is_group(parameter):
            options.extend(_options_of(parameter.annotation))
        elif _is(parameter, Options):
            for each, (_, declared) in declarations(parameter.annotation).items():
                if each in own:
                    add(each)
                elif declared.help is not None:
                    options.append(_in_panel(_declared_parameter(parameter.annotation, each), group.panel))
        else:
            options.append(_in_panel(parameter, group.panel))

    for name in own:
        add(name)
    return options


def _with_default(option: inspect.Parameter, text: str) -> inspect.Parameter:
    kind, info, *marks = get_args(option.annotation)
    info = copy.copy(info)
    info.show_default = text
    return option.replace(annotation=Annotated[kind, info, *marks])


def _in_panel(option: inspect.Parameter, panel: str | None) -> inspect.Parameter:
    kind, info, *marks = get_args(option.annotation)
    info = copy.copy(info)
    info.rich_help_panel = info.rich_help_panel or panel
    return option.replace(annotation=Annotated[kind, info, *marks])


def _built(group: type[OptionGroup], values: Mapping[str, Any], named: Sequence[str]) -> OptionGroup:
    """Return a group with the values of its options; options that the command lacks have their defaults."""
    arguments, own = {}, _fields_of(group)
    for name, parameter in own.items():
        if _is_group(parameter):
            arguments[name] = _built(parameter.annotation, values, named)
        elif _is(parameter, Options):
            declared = declarations(parameter.annotation)
            texts = {each: values[each] for each in declared if each in values and each not in own}
            arguments[name] = parameter.annotation(**values_of(parameter.annotation, **texts))
        elif name in values:
            arguments |= values_of(group, **{name: values[name]})
    return group(**arguments, named=tuple(option.name for option in _options_of(group) if option.name in named))


def _names(context: typer.Context, option: str) -> bool:
    """True if the command line gives an option, which otherwise may have its default."""
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"

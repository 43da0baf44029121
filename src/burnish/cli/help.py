"""The help of a command: ``--help`` lists the options that most people need, ``--help-all`` all of them, by group."""

from __future__ import annotations

import copy
import inspect
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import typer
from typer.core import TyperCommand

from burnish.cli.option_groups import COMMON

FEW = 14
"""Most options that ``--help`` lists completely."""
HELP_ALL = "--help-all"
WIDEST = 100
"""Most characters of a line, on terminals of any width."""
WIDEST_NAMES = 27
"""Most characters of the column of names; after a longer name, the text begins on the next line."""
OTHERS = "Options"
"""The group of options without a group."""


@dataclass(frozen=True)
class Described:
    """An option or an argument, as the help lists it.

    Attributes:
        long: its name, or names, with the value: ``--data DATA``.
        short: one-letter name, ``-d``, or empty.
        text: one sentence.
        details: text after that sentence, or empty.
        default: default in words; empty if there is none, as for ``--help``.
        group: heading in the list.
        is_common: True if most people need it.
        is_argument: True for an argument.
        is_repeated: True for an argument that may be given several times.
    """

    long: str
    short: str
    text: str
    details: str = ""
    default: str = ""
    group: str = OTHERS
    is_common: bool = False
    is_argument: bool = False
    is_repeated: bool = False

    @property
    def names(self) -> str:
        """``-d, --data DATA``; without a short name, aligned with other long names."""
        if self.is_argument:
            return self.long
        return f"{self.short}, {self.long}" if self.short else f"    {self.long}"


class Command(TyperCommand):
    """A command with ``--help-all``."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters, plain = super().get_params(ctx), self.get_help_option(ctx)
        if plain is None:
            return parameters
        if not hasattr(self, "_help_all"):
            option: Any = copy.copy(plain)
            option.name, option.opts, option.callback = "help_all", [HELP_ALL], _print_all
            self._help_all = option
        return [*parameters, self._help_all]

    def get_help(self, ctx: Any) -> str:
        return command_page(self, ctx)


def _print_all(context: Any, _: Any, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        typer.echo(command_page(context.command, context, has_all=True))
        context.exit()


def described(command: Any) -> list[Described]:
    """Return the arguments and options of a command in their order, without ``--help``."""
    declared = inspect.signature(command.callback, eval_str=True).parameters
    return [
        _described(parameter, _annotation(declared, parameter.name)) for parameter in command.params if not _is_hidden(parameter)
    ]


def _annotation(declared: Mapping[str, inspect.Parameter], name: str) -> Any:
    return declared[name].annotation if name in declared else None


def command_page(command: Any, context: Any, has_all: bool = False) -> str:
    """Return the help of a command.

    Args:
        command: the command.
        context: context of the call, with the path of the command.
        has_all: True for all options by group; False for those that most people need.
    """
    listed = described(command)
    arguments, options = ([one for one in listed if one.is_argument is is_argument] for is_argument in (True, False))
    shown = options if has_all or len(options) <= FEW else [one for one in options if one.is_common]
    left = len(options) - len(shown)
    help_option = Described("--help", "-h", "Show this help.")
    lines = [f"{_heading('Usage:')} {usage(context.command_path, listed)}", "", *_wrapped(summary(command.help))]
    if arguments:
        lines += ["", _heading("Arguments:"), *_rows(arguments, has_all)]
    groups = list(dict.fromkeys(one.group for one in shown)) if has_all else [OTHERS]
    for group in sorted(groups, key=lambda name: name == OTHERS):
        rows = [one for one in shown if one.group == group] if has_all else shown
        own = [help_option] if group == OTHERS else []
        lines += ["", _heading(f"{group}:"), *_rows([*rows, *own], has_all)]
    if OTHERS not in groups:
        lines += ["", _heading(f"{OTHERS}:"), *_rows([help_option], has_all)]
    if left:
        lines += ["", f"{left} more options: {context.command_path} {HELP_ALL}"]
    return "\n".join(lines)


def usage(path: str, listed: Sequence[Described]) -> str:
    """Return the usage of a command: ``burnish train MODEL --data DATA [OPTIONS]``."""
    called = [(one, one.long + "..." * one.is_repeated) for one in listed if one.is_argument]
    arguments = [f"[{name}]" if one.default != REQUIRED else name for one, name in called]
    required = [one.long for one in listed if not one.is_argument and one.default == REQUIRED]
    return " ".join([path, *arguments, *required, "[OPTIONS]"])


def group_page(group: Any, context: Any) -> str:
    """Return the help of ``burnish`` itself: its commands and its options."""
    commands = [Described(name, "", _first_sentence(one.help), is_argument=True) for name, one in group.commands.items()]
    options = [*(replace(one, default="") for one in described(group)), Described("--help", "-h", "Show this help.")]
    return "\n".join(
        [
            f"{_heading('Usage:')} {context.command_path} COMMAND [OPTIONS]",
            "",
            *_wrapped(group.help),
            "",
            _heading("Commands:"),
            *_rows(commands, has_all=False),
            "",
            _heading("Options:"),
            *_rows(options, has_all=False),
            "",
            f"The options of a command: {context.command_path} COMMAND --help",
        ]
    )


REQUIRED = "required"


def _is_hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False))


def _described(parameter: Any, annotation: Any) -> Described:
    """Return the help entry of a parameter; its annotation in the command's signature gives its type."""
    is_argument = parameter.param_type_name == "argument"
    kind = _kind(annotation)
    if is_argument:
        long, short = parameter.metavar or parameter.name.upper(), ""
    else:
        names = [name for name in parameter.opts if name.startswith("--")]
        long = " / ".join([names[0], *parameter.secondary_opts]) + _value_of(parameter, names[0], kind)
        short = next((name for name in parameter.opts if not name.startswith("--")), "")
    text, _, details = (parameter.help or "").partition("\n\n")
    return Described(
        long,
        short,
        text,
        " ".join(details.split()),
        _default(parameter),
        getattr(parameter, "rich_help_panel", None) or OTHERS,
        COMMON in getattr(annotation, "__metadata__", ()),
        is_argument,
        is_argument and parameter.nargs == -1,
    )


def _kind(annotation: Any) -> Any:
    """Return the type of one value: int for ``Annotated[list[int] | None, ...]``."""
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    kinds = [each for each in get_args(kind) if each is not type(None)]
    if kinds and (len(kinds) == 1 or getattr(kind, "__origin__", None) is None):
        return _kind(kinds[0])
    return kind


def _value_of(parameter: Any, name: str, kind: Any) -> str:
    """Return the name of an option's value, after a space; empty for a flag."""
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return f" {parameter.metavar}"
    if parameter.nargs != 1:
        return " N" * parameter.nargs
    return {int: " N", float: " NUMBER", Path: " PATH"}.get(kind, " " + name.lstrip("-").rpartition("-")[2].upper())


def _default(parameter: Any) -> str:
    if parameter.required:
        return REQUIRED
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    default = parameter.default
    if isinstance(default, bool):
        names = parameter.opts if default else getattr(parameter, "secondary_opts", [])
        return names[0].lstrip("-") if getattr(parameter, "secondary_opts", []) else "on" if default else "off"
    if default is None or default == [] or default == () or parameter.is_eager:
        return "none"
    return ",".join(map(str, default)) if isinstance(default, list | tuple) else str(default)


def _rows(listed: Iterable[Described], has_all: bool) -> list[str]:
    listed = list(listed)
    column = min(max(len(one.names) for one in listed), WIDEST_NAMES)
    lines = []
    for one in listed:
        default = "" if not one.default else f"[{REQUIRED}]" if one.default == REQUIRED else f"[default: {one.default}]"
        texts = [one.text, one.details if has_all else "", default if not one.is_argument or one.default == REQUIRED else ""]
        text = _wrapped(" ".join(filter(None, texts)), column + 4) or [""]
        name = _name(one.names)
        if len(one.names) > column:
            lines += [f"  {name}", *(" " * (column + 4) + line for line in text)]
        else:
            lines += [f"  {name}{' ' * (column - len(one.names))}  {text[0]}", *(" " * (column + 4) + line for line in text[1:])]
    return lines


def _wrapped(text: str, indent: int = 0) -> list[str]:
    width = min(shutil.get_terminal_size().columns, WIDEST) - indent
    lines = [textwrap.wrap(part, max(width, 20), break_long_words=False, break_on_hyphens=False) for part in text.split("\n\n")]
    return [line for number, part in enumerate(lines) for line in ([""] if number else []) + part]


def summary(text: str | None, code: str = "") -> str:
    """Return the docstring of a command, with ``code`` in place of double backticks."""
    return inspect.cleandoc(text or "").replace("``", code)


def _first_sentence(text: str | None) -> str:
    return summary(text).partition("\n\n")[0].replace("\n", " ")


def _heading(text: str) -> str:
    return _styled(text, bold=True)


def _name(text: str) -> str:
    return _styled(text, fg="cyan")


def _styled(text: str, **style: Any) -> str:
    """Return a text in a style, which ``typer.echo`` drops outside a terminal."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **style)

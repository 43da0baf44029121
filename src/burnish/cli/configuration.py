"""Options in a file: ``--config run.toml`` reads them, and every run writes the file that repeats it.

The file is TOML, with a table for the command and in it the options by their names, without the dashes in front::

    [train]
    model = "model.onnx"
    data = "data.npz"
    batch-size = 32
    freeze = ["stem.*"]

Paths are those of the command line: relative to the folder in which the command runs. What the command line names goes before.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import OptionGroup
from burnish.errors import ConfigurationError
from burnish.settings import suggestion
from burnish.version import __version__

CONFIGURATION = "run.toml"
"""The file in the folder of a run."""
OF_ONE_RUN = frozenset({"config", "output", "resume", "overwrite", "export", "profile", "report", "seeds", "tensorboard", "log"})
"""Options that say what becomes of a run, and are not repeated with it."""
ALWAYS = frozenset({"seed", "epochs", "batch-size"})
"""Options that are written at their defaults too, which another version may change."""


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Let a file give the options that the command line does not name."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_configuration(context, path)}
    return path


@dataclass(frozen=True)
class Repetition(OptionGroup):
    """Runs that are repeated: from a file, or with other seeds."""

    panel: ClassVar = "Repetition"
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=_read,
            help=f"Take options from a TOML file, such as {CONFIGURATION} of another run; those of the command line go before.",
        ),
    ] = None
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            min=1,
            metavar="NUMBER",
            help="Train so often, with --seed and the seeds after it, in folders of their own; mean and standard deviation of "
            "the figures are printed, and written to seeds.csv.",
        ),
    ] = 1


def read_configuration(context: typer.Context, path: Path) -> dict[str, Any]:
    """Return the options that a file gives to a command, by the names of its parameters.

    Raises:
        ConfigurationError: the file cannot be read, is of another command, or holds an unknown option or a value that it does
            not take.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--config '{path}' cannot be read: {error}. Give a TOML file, such as the {CONFIGURATION} of a run"
        ) from error
    command = context.command.name or ""
    options = content.get(command)
    if not isinstance(options, dict):
        tables = ", ".join(f"[{name}]" for name, value in content.items() if isinstance(value, dict)) or "none"
        raise ConfigurationError(f"--config '{path}' has no table [{command}] with the options of this command; it has {tables}")
    known = {key: parameter for parameter in context.command.params if (key := _key(parameter)) not in ("config", "help")}
    values = {}
    for key, value in options.items():
        parameter = known.get(key)
        if parameter is None:
            raise ConfigurationError(
                f"--config '{path}': burnish {command} has no option '{key}'{suggestion(key, known)}; its options are in "
                f"burnish {command} --help"
            )
        values[parameter.name] = _checked(context, parameter, value, f"--config '{path}': {key} = {_toml(value)}")
    return values


def configuration_of(context: typer.Context, **chosen: Any) -> str:
    """Return the file that repeats a run.

    Args:
        context: of the command.
        chosen: values that the command decided, by the names of its parameters, in place of those that it was given.
    """
    command = context.command.name or ""
    lines = [f"# Repeats this run: burnish {command} --config {CONFIGURATION} --output FOLDER", f"# burnish {__version__}", ""]
    lines.append(f"[{command}]")
    for parameter in context.command.params:
        key, name = _key(parameter), parameter.name or ""
        if key in OF_ONE_RUN or name not in context.params:
            continue
        value = chosen.get(name, context.params[name])
        source = context.get_parameter_source(name)
        is_default = source is None or source.name == "DEFAULT"
        if value is not None and (not is_default or name in chosen or key in ALWAYS):
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _key(parameter: Any) -> str:
    """The name of an option without its dashes, or of an argument."""
    names = [option.lstrip("-") for option in parameter.opts if option.startswith("--")]
    return names[0] if names else str(parameter.name)


def _checked(context: typer.Context, parameter: Any, value: Any, place: str) -> Any:
    """The value as the command line would give it: what converts a text there converts it here too."""
    is_list = getattr(parameter, "multiple", False) or parameter.nargs != 1
    is_flag = getattr(parameter, "is_flag", False)
    items = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not is_list:
        raise ConfigurationError(f"{place}: it takes one value, not a list")
    for item in items:
        if is_flag != isinstance(item, bool) or not isinstance(item, bool | int | float | str):
            raise ConfigurationError(f"{place}: give {'true or false' if is_flag else 'a number or a text'}")
    given = value if is_flag else [_text(item) for item in items] if is_list else _text(value)
    try:
        parameter.process_value(context, given)
    except typer.BadParameter as error:
        raise ConfigurationError(f"{place}: {error.message}") from error
    return given


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else repr(value)


def _toml(value: Any) -> str:
    """A value as TOML: a list, a text, a number, true or false."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items()) + "}"
    # TOML's basic strings escape as JSON's do, but for the character that JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

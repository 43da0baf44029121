"""Repeated runs: with options from a file, or with other seeds.

The file is TOML, with a table for the command that has the options by name, without leading dashes::

    [train]
    model = "model.onnx"
    data = "data.npz"
    batch-size = 32
    freeze = ["stem.*"]

Paths are relative to the folder in which the command runs, as on the command line. Options on the command line take precedence.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.console import output, print_table, write_csv
from burnish.cli.data_options import Pixels
from burnish.cli.option_groups import OptionGroup
from burnish.cli.run_folders import CONFIGURATION
from burnish.cli.train_options import Course, Data, Results, Watching
from burnish.distributed.exchange_options import ExchangeOptions
from burnish.errors import ConfigurationError
from burnish.files.file_writing import check_output
from burnish.options import declarations
from burnish.settings import suggestion
from burnish.untrusted_files import read_toml_file
from burnish.version import __version__

if TYPE_CHECKING:
    from burnish.training import TrainingResult


OF_ONE_RUN = frozenset(
    {"config", "output", "name", "resume", "overwrite", "export", "profile", "report", "seeds", "tensorboard", "log"}
)
"""Options for the results of a run, which are not repeated with it."""
ALWAYS = frozenset({"seed", "epochs", "batch-size"})
"""Options written even at their defaults, which another version may change."""
OF_ONE_START = frozenset({"start-from", "reinitialize", "nodes", "node-rank", "master-address", "master-port"})
"""Options for the start of a run, which a resumed run does not inherit."""
OF_WORKERS = frozenset({"workers", "max-restarts"})
OF_SEVERAL = OF_WORKERS | {"worker-timeout", *(name.replace("_", "-") for name in declarations(ExchangeOptions))}
"""Options for several workers, which a resumed run with one worker does not inherit."""
STARTED = "burnish.started"
"""Key in a command's notes for these options of the run to resume, as in its file."""
_BYTES = re.compile(r"\\u(dc[89a-f][0-9a-f])")
"""Escapes of bytes in names that are not UTF-8, which TOML cannot express."""


def _read(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        context.default_map = {**(context.default_map or {}), **read_configuration(context, path)}
    return path


@dataclass(frozen=True)
class Repetition(OptionGroup):
    """Options to repeat runs: from a file, or with other seeds."""

    panel: ClassVar = "Repetition"
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=_read,
            help=f"Take options from a TOML file, such as {CONFIGURATION} of another run; the command line wins.",
        ),
    ] = None
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds",
            min=1,
            metavar="NUMBER",
            help="Train this many times, with --seed and the seeds after it; mean and deviation go to seeds.csv.",
        ),
    ] = 1


def read_configuration(context: typer.Context, path: Path, *, of_run: bool = False) -> dict[str, Any]:
    """Return the options for a command from a file, by the names of its parameters.

    Args:
        context: context of the command.
        path: path of the file.
        of_run: True for the file of a run to resume, False for a file given by ``--config``.

    Raises:
        ConfigurationError: the file cannot be read, is for another command, or has an unknown option or an invalid value.
    """
    asked = "--resume" if of_run else "--config"
    try:
        content = read_toml_file(path)
    except (OSError, ValueError) as error:
        remedy = (
            "Remove it, and give the options of the run again"
            if of_run
            else f"Give a TOML file, such as the {CONFIGURATION} of a run"
        )
        raise ConfigurationError(f"{asked} '{path}' cannot be read: {error}. {remedy}") from error
    command = context.command.name or ""
    options = content.get(command)
    commands = getattr(context.parent and context.parent.command, "commands", {command: None})
    for name, value in content.items():
        if not isinstance(value, dict):
            raise ConfigurationError(f"{asked} '{path}': '{name}' stands in no table: write options below a line [{command}]")
        if name not in commands:
            raise ConfigurationError(
                f"{asked} '{path}' has a table [{name}], and burnish has no command of that name{suggestion(name, commands)}"
            )
    if options is None:
        tables = ", ".join(f"[{name}]" for name in content) or "none"
        other = next((name for name in content if name in ("train", "finetune")), None) if of_run else None
        remedy = "" if other is None else f": go on with the run by burnish {other} --resume"
        raise ConfigurationError(
            f"{asked} '{path}' has no table [{command}] with the options of this command; it has {tables}{remedy}"
        )
    known = {key: parameter for parameter in context.command.params if (key := key_of(parameter)) not in ("config", "help")}
    if of_run:
        context.meta[STARTED] = {key: value for key, value in options.items() if key in OF_ONE_START}
        options = {key: value for key, value in options.items() if key in known and key not in OF_ONE_RUN | OF_ONE_START}
    values = {}
    for key, value in options.items():
        parameter = known.get(key)
        if parameter is None:
            raise ConfigurationError(
                f"{asked} '{path}': burnish {command} has no option '{key}'{suggestion(key, known)}; its options are in "
                f"burnish {command} --help"
            )
        values[parameter.name] = read_value(context, parameter, value, f"{asked} '{path}': {key} = {_toml(value)}")
    return values


def configuration_of(context: typer.Context, **chosen: Any) -> str:
    """Return the text of the file that repeats a run.

    Args:
        context: context of the command.
        chosen: values that the command chose, by the names of its parameters, instead of the given ones.
    """
    command = context.command.name or ""
    lines = [f"# Repeats this run: burnish {command} --config {CONFIGURATION} --output FOLDER", f"# burnish {__version__}", ""]
    lines.append(f"[{command}]")
    for parameter in context.command.params:
        key, name = key_of(parameter), parameter.name or ""
        if key in OF_ONE_RUN or name not in context.params:
            continue
        value = chosen.get(name, context.params[name])
        source = context.get_parameter_source(name)
        is_default = source is None or source.name == "DEFAULT"
        started = context.meta.get(STARTED, {}) if is_default else {}
        if key in started:
            lines.append(f"{key} = {_toml(started[key])}")
        elif value is not None and (not is_default or name in chosen or key in ALWAYS):
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def key_of(parameter: Any) -> str:
    """Return the name of an option without its dashes, or of an argument."""
    names = [option.lstrip("-") for option in parameter.opts if option.startswith("--")]
    return names[0] if names else str(parameter.name)


def read_value(context: typer.Context, parameter: Any, value: Any, place: str) -> Any:
    """Return a value from a file in the form of the command line, after the same conversion as a check.

    Raises:
        ConfigurationError: the parameter rejects it; the message begins with ``place``.
    """
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
    return as_it_was(value) if isinstance(value, str) else repr(value)


def as_it_was(text: str) -> str:
    """Return a text from a file as on the command line, with the bytes of names that are not UTF-8."""
    return _BYTES.sub(lambda found: chr(int(found[1], 16)), text)


def _toml(value: Any) -> str:
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
    # TOML's basic strings escape like JSON's, except for one character that JSON leaves unescaped.
    text = str(value).encode("utf-8", "backslashreplace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


TABLE = "seeds.csv"


def check_run(
    model: Path, folder: Path, data: Data, pixels: Pixels, results: Results, watching: Watching, seeds: int, workers: int = 1
) -> None:
    """Reject contradictory options and unusable output paths of a run, before anything is read.

    Of several workers, only the first writes.

    Raises:
        typer.BadParameter: options contradict each other, or have no meaning for the data or for several runs.
        ConfigurationError: as ``check_output``; or a logger is unknown.
    """
    if launch.other_rank() is None:
        check_output(folder, "--output", is_folder=True)
        for option, path in (("--export", results.export), ("--report", watching.report)):
            if path is not None:
                check_output(path, option, read=(model, data.data, data.eval_data))
        if watching.tensorboard is not None:
            check_output(watching.tensorboard, "--tensorboard", is_folder=True)
    watching.check()
    if seeds > 1 and workers > 1:
        raise typer.BadParameter(f"--seeds {seeds} trains one run after the other, and --workers shares each: give one of them")
    if seeds > 1 and results.export is not None:
        raise typer.BadParameter(
            f"--seeds {seeds}: --export would let each run replace the model of the one before; leave it out, each folder has "
            "its tuned.onnx"
        )
    if seeds > 1 and watching.report is not None:
        raise typer.BadParameter(
            f"--seeds {seeds}: --report would let each run replace the report of the one before; leave it out, and report a run "
            "by burnish report FOLDER"
        )
    data.check_reading(pixels)


def train_with_seeds(
    seeds: int, course: Course, results: Results, folder: Path, train: Callable[[Course, Results], TrainingResult | None]
) -> None:
    """Train with each seed in a separate folder; print and write the figures.

    Args:
        seeds: number of seeds; the first is the course's.
        course, results: options of the command. With ``--resume``, existing runs are resumed and the others begin.
        folder: folder of all the runs.
        train: function that trains once.
    """
    if seeds == 1:
        train(course, results)
        return
    from burnish.training.run_files import CheckpointFolder, exported_figures

    console = output()
    figures: dict[int, dict[str, float]] = {}
    tells_best = False
    for seed in range(course.seed, course.seed + seeds):
        console.print(f"seed {seed}, {len(figures) + 1} of {seeds}")
        own = folder / f"seed-{seed}"
        resumes = results.resume and CheckpointFolder(own / "checkpoints").exists
        result = train(replace(course, seed=seed), replace(results, folder=own, resume=resumes))
        if result is not None:
            exported = exported_figures(own, [*result.metrics])
            figures[seed] = exported or result.metrics
            tells_best = tells_best or exported is not None
    names = list(next(iter(figures.values())))
    rows: list[list[Any]] = [[seed, *(values[name] for name in names)] for seed, values in figures.items()]
    columns = [[values[name] for values in figures.values()] for name in names]
    rows += [["mean", *map(statistics.fmean, columns)], ["standard deviation", *map(statistics.stdev, columns)]]
    print_table(console, ["seed", *names], rows)
    write_csv(folder / TABLE, ["seed", *names], rows)
    which = "of the best epoch, which each tuned.onnx holds" if tells_best else "after the last epoch"
    console.print(f"{folder / TABLE}: the figures {which}; the deviation is that of a sample, over n - 1")

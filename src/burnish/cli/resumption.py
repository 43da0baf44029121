"""``--resume``: continue a run with the options in its folder, and its model and data at their present paths."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from burnish.cli.early_interrupt import ended_by_sigterm
from burnish.cli.help import Command
from burnish.cli.repetition import (
    OF_ONE_RUN,
    OF_ONE_START,
    OF_SEVERAL,
    OF_WORKERS,
    as_it_was,
    key_of,
    read_configuration,
    read_value,
)
from burnish.cli.run_folders import RUNS, configuration_in, newest
from burnish.data.text.settings import TOKENIZER
from burnish.distributed.connection.environment import is_worker
from burnish.errors import ConfigurationError, DataError
from burnish.settings import suggestion

UsageError = typer.BadParameter.__mro__[1]
OTHERWISE = "burnish.otherwise"
"""Key in a command's notes for options that differ from those of the run to resume."""
OWN_OPTIONS, WORKING_FOLDER = "own_options", "working_folder"
"""Keys in the record of a run: options that ``run.toml`` leaves out but resuming needs, and the working folder."""
OWN = ("export", "report", "tensorboard", "log", "seeds")
MAY_CHANGE = OF_SEVERAL | {
    *("model", "data", "eval-data", "tokenizer", "epochs", "engine", "device", "threads", "kernels", "data-workers"),
    *("checkpoint-every", "keep-checkpoints", "journal", "tables", "step-timeout", "fold", "save-adapter", "save-adapters"),
    "patience",
}
"""Options that may differ when a run is resumed: locations, length, and engine."""
RATES = frozenset({"lr", "schedule", "warmup"})
"""Further such options of ``burnish train``; ``finetune`` keeps its choices."""
READ, WRITTEN = ("model", "data", "eval-data", "tokenizer"), ("export", "report", "tensorboard", "tables")
"""Options that are paths."""


class RunCommand(Command):
    """A command that trains. SIGTERM ends it like Ctrl-C.

    With ``--resume``, the folder of a run may replace the model, and options not on the command line are those that the run was
    started with.
    """

    def invoke(self, ctx: Any) -> Any:
        with ended_by_sigterm():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = self._given(ctx, args)
        if not given.get("resume"):
            return super().parse_args(ctx, args)
        run, is_model = self._run(given)
        path = None if run is None else configuration_in(run)
        if run is None or path is None:
            if is_model:
                raise ConfigurationError(_no_run(run or Path()))
            return super().parse_args(ctx, args)
        started = self._started(ctx, run, path, given, is_model)
        ctx.default_map = {**(ctx.default_map or {}), **started}
        rest = super().parse_args(ctx, args)
        if is_model:
            _set(ctx, "model", Path(started["model"]))
        if "folder" not in given or given["folder"] is None:
            _set(ctx, "folder", run)
        ctx.meta[OTHERWISE] = self._otherwise(ctx, run, started)
        return rest

    def _given(self, ctx: Any, args: list[str]) -> dict[str, Any]:
        """The raw values on the command line, by the names of the parameters; empty if it is invalid."""
        given: dict[str, Any] = {}
        with suppress(UsageError):  # reported when it is parsed for use
            given = self.make_parser(ctx).parse_args(list(args))[0]
        return {name: value for name, value in given.items() if value is not None}

    def _run(self, given: Mapping[str, Any]) -> tuple[Path | None, bool]:
        """Return the folder of the run to resume, and True if it replaces the model argument.

        Raises:
            ConfigurationError: the command names no run.
        """
        folder, model, name = given.get("folder"), given.get("model"), given.get("name")
        if folder is not None:
            return Path(str(folder)), False
        if model is not None and not _is_model(Path(str(model))):
            return Path(str(model)), True
        if name is None and model is None:
            raise ConfigurationError(f"--resume: name the run that is to go on: burnish {self.name} --resume {_some_run()}")
        suffix = "-finetuned" if self.name == "finetune" else ""
        return newest(RUNS / (str(name) if name is not None else f"{Path(str(model)).stem}{suffix}")), False

    def _started(self, ctx: Any, run: Path, path: Path, given: Mapping[str, Any], is_model: bool) -> dict[str, Any]:
        from burnish.training.run_files import read_record

        started = read_configuration(ctx, path, of_run=True)
        # Another launcher sets the number of workers, and a run may be resumed with one.
        is_alone = str(given.get("workers") or started.get("workers") or 1) == "1" and not given.get("nodes")
        left_out = OF_WORKERS if is_worker() else OF_SEVERAL if is_alone else frozenset()
        record = read_record(path.parent)
        known = {key_of(parameter): parameter for parameter in self.params}
        own = record.get(OWN_OPTIONS)
        for key, value in own.items() if isinstance(own, dict) else ():
            if key in OWN and key in known and value is not None:
                started[known[key].name or ""] = read_value(ctx, known[key], value, f"'{path.parent}': {key}")
        started = {name: value for name, value in started.items() if name.replace("_", "-") not in left_out}
        places = {key: known[key].name or "" for key in (*READ, *WRITTEN) if key in known}
        worked_in = record.get(WORKING_FOLDER)
        for key, name in places.items():
            if isinstance(started.get(name), str) and isinstance(worked_in, str):
                started[name] = _placed(started[name], worked_in, is_read=key in READ)
        taken = [places[key] for key in READ if places.get(key) in started and places[key] not in given]
        if is_model and "model" in started:
            taken.append("model")
        self._check_there(run, started, taken)
        return started

    def _check_there(self, run: Path, started: dict[str, Any], taken: list[str]) -> None:
        """Raise DataError or ConfigurationError for a model or data that have moved."""
        from burnish.data.formats import format_of

        for name in dict.fromkeys(taken):
            value = as_it_was(str(started[name]))
            if os.path.exists(value):
                continue
            if name == "model" and self.name == "train":
                raise ConfigurationError(
                    f"The run in '{run}' trains the model '{value}', which is not there any more: put it back, or say where it "
                    f"is: burnish train MODEL --resume --output {run}"
                )
            if name == "tokenizer" and (run / TOKENIZER).is_file():
                started[name] = str(run / TOKENIZER)
            if name not in ("data", "eval_data"):
                continue
            try:
                format_of(value)
            except DataError:
                option = f"--{name.replace('_', '-')}"
                raise DataError(
                    f"The run in '{run}' was started with {option} '{value}', which is not there any more: put it back, or say "
                    f"where it is: burnish {self.name} --resume {run} {option} PATH"
                ) from None

    def _otherwise(self, ctx: Any, run: Path, started: Mapping[str, Any]) -> list[str]:
        """The options on the command line that differ from the run's.

        Raises:
            ConfigurationError: an option may not differ.
        """
        found = {key_of(each): text for each in self.params if (text := _named_otherwise(ctx, each, started))}
        may_change = MAY_CHANGE | (RATES if self.name == "train" else frozenset())
        if refused := [text for key, text in found.items() if key not in may_change]:
            one = len(refused) == 1
            new = f"begin another in its state: --start-from {run}" if self.name == "train" else "begin another"
            raise ConfigurationError(
                f"--resume '{run}': {'; '.join(refused)}: a run goes on as it was started: leave "
                f"{'it' if one else 'them'} out, or {new}"
            )
        return list(found.values())


def own_options(context: typer.Context) -> dict[str, Any]:
    """Return the options that resuming a run needs but repeating it does not, JSON-compatible."""
    found: dict[str, Any] = {}
    for parameter in context.command.params:
        key, value = key_of(parameter), context.params.get(parameter.name or "")
        if key in OWN and value and value != parameter.get_default(context, call=True):
            found[key] = (
                [*map(str, value)] if isinstance(value, list | tuple) else value if isinstance(value, int) else str(value)
            )
    return found


def _is_model(path: Path) -> bool:
    """True for a model or a compiled program, False for the folder of a run."""
    from burnish.files.folder import MANIFEST

    return os.path.isfile(path) or os.path.isfile(path / MANIFEST)


def _set(ctx: Any, name: str, value: Any) -> None:
    ctx.params[name] = value
    ctx.set_parameter_source(name, type(ctx.get_parameter_source("resume")).DEFAULT_MAP)


def _placed(text: str, worked_in: str, is_read: bool) -> str:
    """A relative path of a command that ran in another folder, resolved there if it exists there."""
    path = as_it_was(text)
    there = os.path.join(worked_in, path)
    if is_read:
        return there if not os.path.exists(path) and os.path.exists(there) else text
    return there if os.path.isdir(worked_in) and not os.path.samefile(worked_in, os.getcwd()) else text


def _runs() -> Iterator[Path]:
    with suppress(OSError):
        yield from sorted(path for path in RUNS.iterdir() if configuration_in(path) is not None)


def _some_run() -> str:
    return str(next(_runs(), RUNS / "model"))


def _no_run(folder: Path) -> str:
    what = "holds no run that can go on" if folder.is_dir() else "is not there"
    near = suggestion(str(folder), [str(run) for run in _runs()])
    return f"--resume: '{folder}' {what}{near}: give the folder of a run, such as {_some_run()}, or begin one without --resume"


def _named_otherwise(context: typer.Context, parameter: Any, started: Mapping[str, Any]) -> str | None:
    """Return a description of an option that differs from the run's, or None."""
    key, name = key_of(parameter), parameter.name or ""
    source = context.get_parameter_source(name)
    if key in OF_ONE_RUN | OF_ONE_START or source is None or source.name != "COMMANDLINE":
        return None
    before = started[name] if name in started else parameter.get_default(context, call=True)
    with suppress(UsageError):
        before = parameter.process_value(context, before)
    now = context.params.get(name)
    if now == before or (not before and not now):
        return None
    option = f"--{key}" if parameter.param_type_name == "option" else name.upper()
    return f"{option} {_shown(now)} (the run was started {f'with {_shown(before)}' if before else 'without it'})"


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

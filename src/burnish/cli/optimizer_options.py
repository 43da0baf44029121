"""Options for the optimizer, its wrappers and its learning rate over a run, including resumed runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.option_groups import COMMON, OptionGroup
from burnish.errors import CheckpointError, ConfigurationError
from burnish.settings import split
from burnish.untrusted_files import UNREADABLE, read_json_file

if TYPE_CHECKING:
    from burnish.optim import Optimizer, Schedule
    from burnish.optim.groups import Overrides
    from burnish.program import Program
    from burnish.training.checkpoint import Checkpoint


COMPILATION = "Compilation"
CONSTANT, ONE_CYCLE = "constant", "one_cycle"
AVERAGE = "average"
"""The name of an optimizer's average in evaluation and export."""


@dataclass(frozen=True)
class OptimizerOptions(OptionGroup):
    """The optimizer and its wrappers."""

    panel: ClassVar = "Optimizer"
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="Optimizer: sgd, adamw or another, with settings behind a colon (rmsprop:centered=true).",
        ),
        COMMON,
    ] = "sgd"
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate.", show_default="the optimizer's"), COMMON] = None
    momentum: Annotated[
        float | None, typer.Option("--momentum", help="Momentum, for optimizers that have one.", show_default="0.9 for sgd")
    ] = None
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", help="Weight decay.", show_default="the optimizer's")
    ] = None
    decay_on: Annotated[
        str,
        typer.Option(
            "--decay-on",
            metavar="WHICH",
            help="Weight decay on all parameters, or only on weights, not biases and normalization (weights).",
        ),
    ] = "all"
    transform: Annotated[
        list[str] | None,
        typer.Option(
            "--transform",
            metavar="NAME:SETTINGS",
            help="Transform of the gradients, such as clip_by_global_norm:max_norm=1; repeatable, applied in order.",
        ),
    ] = None
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="PATTERN=SETTINGS",
            help="Settings for some parameters: 'stem*=lr_scale=0.1', 'stem*=frozen', 'embed*=adamw:lr=0.001'; repeatable.",
        ),
    ] = None
    freeze: Annotated[
        list[str] | None,
        typer.Option(
            "--freeze",
            metavar="PATTERN",
            help="Freeze parameters of this name or pattern, such as 'stem*'; repeatable.",
        ),
    ] = None
    layer_decay: Annotated[
        float | None,
        typer.Option(
            "--layer-decay",
            metavar="FACTOR",
            help="Factor of the learning rate from each layer to the one before it, such as 0.9.",
        ),
    ] = None
    accumulate: Annotated[
        int,
        typer.Option(
            "--accumulate",
            min=1,
            metavar="STEPS",
            help="Steps to an update, by the mean of their gradients; --warmup and --schedule count updates.",
        ),
    ] = 1
    average: Annotated[
        str | None,
        typer.Option(
            "--average",
            metavar="NAME",
            help="Average of the weights to keep, evaluate and export: ema, swa or ema:decay=0.99.",
        ),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule",
            help="Schedule of the learning rate: constant, cosine, linear, one_cycle or step:every=100.",
            rich_help_panel=COMPILATION,
        ),
    ] = CONSTANT
    warmup: Annotated[
        int,
        typer.Option("--warmup", min=0, help="Steps in which the learning rate rises at first.", rich_help_panel=COMPILATION),
    ] = 0

    def built(self) -> Optimizer:
        """Return the optimizer, wrapped in groups, gradient transforms, an average, and accumulation outermost.

        Raises:
            typer.BadParameter: the optimizer lacks an option, or options contradict each other or cannot be read.
            ConfigurationError: an optimizer, transform or setting is unknown.
        """
        from burnish import optim
        from burnish.optim.chain import TRANSFORMS
        from burnish.registry import Registry

        optimizer = self._grouped(self._plain())
        if self.layer_decay is not None:
            optimizer = optim.layerwise_decay(optimizer, self.layer_decay)
        if self.transform:
            optimizer = optim.chain(*map(TRANSFORMS.resolve, self.transform), optimizer)
        if self.average is not None:
            averages: Registry[Optimizer] = Registry("average", {"ema": optim.ema, "swa": optim.swa})
            name, settings = averages.read(self.average)
            optimizer = averages.make(name, {"optimizer": optimizer, **settings})
        return optim.accumulate(optimizer, self.accumulate) if self.accumulate > 1 else optimizer

    def _plain(self) -> Optimizer:
        """Return the optimizer without wrappers; sgd has a momentum of 0.9 unless another is set."""
        from burnish import optim

        name, settings = optim.OPTIMIZERS.read(self.optimizer)
        supported = optim.get(name).options()
        for key in ("lr", "momentum", "weight_decay"):
            value, option = getattr(self, key), f"--{key.replace('_', '-')}"
            if value is None:
                continue
            if key not in supported:
                raise typer.BadParameter(
                    f"{name} takes no {option}; leave it out, or choose an optimizer that has one, such as sgd"
                )
            if key in settings:
                raise typer.BadParameter(f"{option} and '{self.optimizer}' both give the {key} of {name}: give one of them")
            settings[key] = value
        if name == "sgd":
            settings.setdefault("momentum", 0.9)
        return optim.get({"name": name, **settings})

    def _grouped(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer with its parameter groups; frozen parameters take precedence over other groups."""
        from burnish import optim

        if self.decay_on not in ("all", "weights"):
            raise typer.BadParameter(f"--decay-on {self.decay_on}: give all, or weights to leave out biases and normalization")
        patterns: dict[str, Overrides] = {}
        for text in self.group or ():
            pattern, overrides = _read_group(text)
            if pattern in patterns:
                raise typer.BadParameter(f"--group gives '{pattern}' twice: give its settings at once, with commas between")
            patterns[pattern] = overrides
        for pattern in split(self.freeze or ()):
            patterns.pop(pattern, None)
            patterns[pattern] = "frozen"
        return optim.groups(optimizer, patterns, decay=self.decay_on) if patterns or self.decay_on != "all" else optimizer


def _read_group(text: str) -> tuple[str, Overrides]:
    """Return the pattern of a group and its settings.

    Raises:
        typer.BadParameter: the text is not ``PATTERN=SETTINGS``.
        ConfigurationError: the optimizer is unknown, or lacks a setting.
    """
    from burnish import optim
    from burnish.optim.groups import FROZEN
    from burnish.settings import read_settings

    pattern, _, what = (part.strip() for part in text.partition("="))
    if not pattern or not what:
        raise typer.BadParameter(f"--group {text}: give PATTERN=SETTINGS, such as 'stem*=lr_scale=0.1' or 'stem*=frozen'")
    if what == FROZEN:
        return pattern, FROZEN
    if ":" in what.partition("=")[0] or "=" not in what:
        return pattern, optim.get(what)  # type: ignore[return-value]  # no wrapper has a name that it is given by
    return pattern, read_settings(f"--group {pattern}", f"settings:{what}")[1]


def rate_of(options: dict[str, Any]) -> Any:
    """Return the learning rate in the options of an optimizer, or of the first optimizer inside it that has one."""
    while "lr" not in options and "optimizer" in options:
        options = options["optimizer"]
    return options.get("lr")


def kept_average(program: Program) -> str | None:
    """Return ``average``, for evaluation and export, if a program's optimizer keeps one; else None."""
    from burnish.optim.slots import slot_of

    return AVERAGE if any(slot_of(entry.name) == AVERAGE for entry in program.signature.state) else None


TAKEOVER = "takeover.json"
"""File in a run folder while its checkpoints are rewritten for another learning rate: the program's options without one."""


def schedule_names() -> tuple[str, ...]:
    """Return the names for ``--schedule``: all of ``burnish.optim.schedules`` except the warm-up, a separate option."""
    from burnish.optim.schedules import SCHEDULES

    return tuple(name for name in SCHEDULES if name != "warmup")


def has_end(schedule: str) -> bool:
    """True if a schedule of the command line ends with the steps of a run."""
    from burnish.optim.schedules import SCHEDULES

    name, settings = SCHEDULES.read(schedule)
    return "steps" in SCHEDULES.takes(name) and "steps" not in settings


def check_schedule(schedule: str, warmup: int, rate: float | None) -> None:
    """Check these options before a model is compiled.

    Args:
        schedule: name, with settings after a colon (``step:every=100,gamma=0.5``).
        warmup: steps of a linear rise before it.
        rate: separately given rate; None for the optimizer's own.

    Raises:
        ConfigurationError: the schedule is unknown, lacks a setting, or needs one that is not given.
        typer.BadParameter: the rate is in the wrong place, or there is a second warm-up.
    """
    from burnish.optim.schedules import SCHEDULES

    name, settings = SCHEDULES.read(schedule)
    if name not in schedule_names():
        raise ConfigurationError(
            f"--schedule {schedule}: choose among {', '.join(schedule_names())}; a warm-up is --warmup STEPS"
        )
    if "lr" in settings:
        raise typer.BadParameter(f"--schedule {schedule}: give the rate with --lr")
    if rate is not None and "lr" not in SCHEDULES.takes(name):
        raise typer.BadParameter(f"--lr: {name} has rates of its own; leave it out, or choose another --schedule")
    # Placeholders for the values that the command fills in.
    command = {setting: ... for setting in ("lr", "steps") if setting in SCHEDULES.takes(name)}
    SCHEDULES.check(name, command | settings)
    if name == ONE_CYCLE and warmup:
        raise typer.BadParameter(
            "--warmup: one_cycle begins with a warm-up of its own; leave it out, or choose another --schedule"
        )


def with_schedule(
    program: Program,
    schedule: str,
    warmup: int,
    steps: int | None,
    remedy: str,
    updates: int = 0,
    optimizer: Optimizer | None = None,
) -> Program:
    """Return the program with a learning rate computed from the step. A constant rate without warm-up changes nothing.

    Args:
        program: program compiled with a number as its rate.
        schedule: schedule that passed ``check_schedule``.
        warmup: steps of a linear rise before it.
        steps: total steps, including the rise; None if unknown. For an optimizer that accumulates, the schedule counts updates.
        remedy: remedy for missing or too few steps.
        updates: steps that the initial state has already taken; the schedule begins after them.
        optimizer: replacement for the program's optimizer, with a number as its rate; None keeps that.

    Raises:
        typer.BadParameter: there are too few steps.
    """
    from burnish import optim
    from burnish.optim.accumulate import steps_to_an_update

    if schedule == CONSTANT and not warmup:
        return program if optimizer is None else program.with_optimizer(optimizer)
    options = program.options["optimizer"] if optimizer is None else optimizer.options()
    every = steps_to_an_update(options)
    steps = None if steps is None else -(-steps // every)
    if has_end(schedule) and (steps is None or steps <= warmup):
        what = "updates" if every > 1 else "steps"
        has = f"needs to know its {what}" if steps is None else f"has {steps:,} {what}, {warmup:,} of them for the warm-up"
        raise typer.BadParameter(f"--schedule {schedule} {has}: {remedy}")

    def follow(rate: Any) -> Schedule:
        return _built(schedule, rate, warmup, steps, updates)

    return program.with_optimizer(_scheduled(optim.get(options), follow, schedule))


def updates_of(checkpoint: Checkpoint, program: Program) -> int:
    """Return the number of updates in the state of a checkpoint, as a program's optimizer counts them."""
    from burnish.optim.accumulate import UPDATES, steps_to_an_update

    if steps_to_an_update(program.options["optimizer"]) == 1:
        return checkpoint.step
    return int(checkpoint.state.get(UPDATES.entry(), 0))


def _scheduled(optimizer: Optimizer, follow: Callable[[Any], Schedule], schedule: str) -> Optimizer:
    """Return an optimizer with schedules for all its rates, including those of groups.

    Raises:
        typer.BadParameter: a group has its own rate, and the schedule cannot use it.
    """
    from burnish.optim import Groups
    from burnish.optim.base import RatedOptimizer
    from burnish.optim.schedules import SCHEDULES

    if isinstance(optimizer, RatedOptimizer):
        return replace(optimizer, lr=follow(optimizer.lr))
    changes: dict[str, Any] = {"optimizer": _scheduled(optimizer.optimizer, follow, schedule)}  # type: ignore[attr-defined]
    if isinstance(optimizer, Groups):
        patterns = []
        for pattern, overrides in optimizer.patterns:
            has_rate = isinstance(overrides, RatedOptimizer) or (isinstance(overrides, Mapping) and "lr" in overrides)
            if has_rate and "lr" not in SCHEDULES.takes(SCHEDULES.read(schedule)[0]):
                raise typer.BadParameter(
                    f"--schedule {schedule} has rates of its own, and so has --group '{pattern}': give the group an lr_scale"
                )
            if isinstance(overrides, RatedOptimizer):
                overrides = replace(overrides, lr=follow(overrides.lr))
            elif has_rate and isinstance(overrides, Mapping):
                overrides = {**overrides, "lr": follow(overrides["lr"])}
            patterns.append((pattern, overrides))
        changes["patterns"] = tuple(patterns)
    return replace(optimizer, **changes)  # type: ignore[type-var]


def _built(name: str, lr: Any, warmup: int, steps: int | None, updates: int) -> Schedule:
    from burnish.optim import schedules

    kind, settings = schedules.SCHEDULES.read(name)
    if "lr" in schedules.SCHEDULES.takes(kind):
        settings["lr"] = lr
    if has_end(name):
        settings["steps"] = (steps or 0) - warmup
    schedule = schedules.get({"name": kind, **settings})
    schedule = schedules.warmup(schedule, warmup) if warmup else schedule
    # A rise that begins at its top is a delay.
    return schedules.warmup(schedule, updates, start=1.0) if updates else schedule


def take_over_checkpoints(folder: Path, program: Program) -> None:
    """Convert the checkpoints of a run to a program that differs only in its learning rate.

    The checkpoints are rewritten for the program, which then replaces the run's. A record exists until this is done: after a
    kill, the next call continues from any partial state, with either rate. If anything else differs, nothing is done, and
    resuming reports the difference.

    Raises:
        CheckpointError: a file cannot be written.
    """
    from burnish.files.file_writing import remove_left_behind, replacing
    from burnish.training.checkpoint import ProgramIdentity, read_checkpoint, write_checkpoint

    options = json.loads(json.dumps(program.options))  # tuples are lists in a file
    record = folder / TAKEOVER
    remove_left_behind(record)
    if not _differs_in_rate(folder, record, options):
        return
    with replacing(record) as partial:
        partial.write_text(json.dumps(_without_rate(options)), encoding="utf-8")
    identity = ProgramIdentity.of(program)
    for path in sorted((folder / "checkpoints").glob("*.safetensors")):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:  # resuming skips it with a message
            continue
        differing = {name for name, value in identity.graphs.items() if checkpoint.identity.graphs.get(name) != value}
        if differing and differing <= {"init", "step", "apply"}:
            write_checkpoint(
                path,
                checkpoint.state,
                step=checkpoint.step,
                identity=identity,
                engine=checkpoint.engine,
                extra=checkpoint.extra,
                metadata=checkpoint.metadata,
                base=checkpoint.base,
            )
    program.save(folder / "program")
    record.unlink()


def _differs_in_rate(folder: Path, record: Path, options: dict[str, Any]) -> bool:
    """True if the folder of a run has a program that differs from these options only in the learning rate."""
    from burnish.files.folder import MANIFEST

    try:
        if record.exists():
            return bool(read_json_file(record) == _without_rate(options))
        earlier = read_json_file(folder / "program" / MANIFEST)["options"]
        return bool(earlier != options and _without_rate(earlier) == _without_rate(options))
    except UNREADABLE:
        return False


def _without_rate(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "optimizer": _unrated(options["optimizer"])}


def _unrated(optimizer: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in optimizer.items() if name != "lr"}
    if "optimizer" in rest:
        rest["optimizer"] = _unrated(rest["optimizer"])
    if optimizer["name"] == "groups":
        rest["patterns"] = [
            [pattern, _unrated({"name": None, **overrides}) if isinstance(overrides, dict) else overrides]
            for pattern, overrides in optimizer["patterns"]
        ]
    return rest

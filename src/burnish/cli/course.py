"""The learning rate over a run: from what the command line says to a schedule in the program, also of a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from burnish.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from burnish.optim import Schedule
    from burnish.program import Program

CONSTANT, ONE_CYCLE = "constant", "one_cycle"
NAMES = (CONSTANT, "cosine", "linear", ONE_CYCLE, "polynomial")


def check_schedule(schedule: str, warmup: int) -> None:
    """Raise what is wrong with these options by themselves, before a model is compiled.

    Raises:
        ConfigurationError: there is no schedule of that name.
        typer.BadParameter: a second warm-up.
    """
    if schedule not in NAMES:
        raise ConfigurationError(
            f"there is no learning-rate schedule '{schedule}' on the command line; there is {', '.join(NAMES)}, "
            "and more in burnish.optim.schedules"
        )
    if schedule == ONE_CYCLE and warmup:
        raise typer.BadParameter(
            "--warmup: one_cycle begins with a warm-up of its own; leave it out, or choose another --schedule"
        )


def with_schedule(program: Program, schedule: str, warmup: int, steps: int | None, remedy: str, taken: int = 0) -> Program:
    """Return a program that computes its learning rate from the step; the same one for a rate that is constant from the first.

    Args:
        program: compiled with a number as its rate.
        schedule: one of ``NAMES``, as ``check_schedule`` lets through.
        warmup: steps of a linear rise before it.
        steps: steps of the whole, the rise included; None where they are not known.
        remedy: what to do where steps are missing or too few.
        taken: steps that the state to begin with has taken already; the schedule begins behind them.

    Raises:
        typer.BadParameter: too few steps.
    """
    from burnish import optim
    from burnish.optim.base import RatedOptimizer

    if schedule == CONSTANT and not warmup:
        return program
    if schedule != CONSTANT and (steps is None or steps <= warmup):
        has = "needs to know its steps" if steps is None else f"has {steps:,} steps, {warmup:,} of them for the warm-up"
        raise typer.BadParameter(f"--schedule {schedule} {has}: {remedy}")
    optimizer = optim.get(program.options["optimizer"])
    assert isinstance(optimizer, RatedOptimizer)
    return program.with_optimizer(replace(optimizer, lr=_built(schedule, optimizer.lr, warmup, steps, taken)))


def _built(name: str, lr: Any, warmup: int, steps: int | None, taken: int) -> Schedule:
    from burnish.optim import schedules

    make: Callable[..., Schedule] = schedules.SCHEDULES[name]
    schedule = make(lr) if name == CONSTANT else make(lr, (steps or 0) - warmup)
    schedule = schedules.warmup(schedule, warmup) if warmup else schedule
    # A rise that begins at its top is a delay.
    return schedules.warmup(schedule, taken, start=1.0) if taken else schedule


def take_over_checkpoints(folder: Path, program: Program) -> None:
    """Let the checkpoints of a run go on with a program that differs from the run's own in its learning rate alone.

    The program is saved in the place of the run's, and the checkpoints are written for it. Where more differs, nothing is done:
    resuming then says what.
    """
    from burnish.program.persistence import MANIFEST
    from burnish.training.checkpoint import ProgramIdentity, read_checkpoint, write_checkpoint

    try:
        earlier = json.loads((folder / "program" / MANIFEST).read_text(encoding="utf-8"))["options"]
        wanted = json.loads(json.dumps(program.options))  # tuples are lists in a file
        same = _without_rate(earlier) == _without_rate(wanted)
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not same or earlier == wanted:
        return
    identity = ProgramIdentity.of(program)
    program.save(folder / "program")
    for path in sorted((folder / "checkpoints").glob("*.safetensors")):
        try:
            checkpoint = read_checkpoint(path)
        except CheckpointError:  # resuming passes over it, and says so
            continue
        differing = {name for name, value in identity.graphs.items() if checkpoint.identity.graphs.get(name) != value}
        if differing and differing <= {"init", "step", "apply"}:
            write_checkpoint(
                path, checkpoint.state, step=checkpoint.step, identity=identity, engine=checkpoint.engine, extra=checkpoint.extra
            )


def _without_rate(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "optimizer": {name: value for name, value in options["optimizer"].items() if name != "lr"}}

"""The learning rate of each step of a run, and warnings about options that take effect after its last step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.graph.annotations import masked_weights
from burnish.optim import schedules
from burnish.optim.accumulate import steps_to_an_update
from burnish.optim.base import is_schedule
from burnish.program import Program, Role
from burnish.settings import check_call
from burnish.training.inputs import check_hyperparameters
from burnish.validation import is_number
from burnish.warn import warn

RATE = "lr"
MONITORED = "monitored"


Factor = Callable[[int, int], float]
"""(step from 0, steps of the run) -> factor of the rate. It depends only on these, so a resumed run continues unchanged."""


def _constant(step: int, steps: int) -> float:
    return 1.0


def _cosine(step: int, steps: int) -> float:
    """Return (1 + cos(pi * step / steps)) / 2: from 1 down to nearly 0 (Loshchilov and Hutter 2017, "SGDR", one cycle)."""
    return (1 + math.cos(math.pi * step / steps)) / 2


FACTORS: dict[str, Factor] = {"constant": _constant, "cosine": _cosine}


def factor_of(factor: str | Factor) -> Factor:
    """Return a factor by name, or the function itself.

    Raises:
        ConfigurationError: the name is unknown; the value is a schedule computed in programs, or its class; or it cannot be
            called with two numbers.
    """
    if isinstance(factor, str):
        if factor not in FACTORS:
            raise ConfigurationError(f"there is no learning-rate schedule '{factor}'; choose among {', '.join(FACTORS)}")
        return FACTORS[factor]
    computed: Any = factor
    if is_schedule(computed) or computed in schedules.SCHEDULES.values():
        name = computed.name
        raise ConfigurationError(
            f"schedule: '{name}' of burnish.optim.schedules is computed in the program: compile with it as lr of the "
            "optimizer, and leave schedule out here"
        )
    if isinstance(factor, type) or not callable(factor):
        raise ConfigurationError(
            f"schedule: {factor!r} is none: give {' or '.join(map(repr, FACTORS))}, or a function of (step from 0, steps of the "
            "run) that returns the factor of the learning rate"
        )
    check_call("schedule", factor, "a step and the steps of the run", "lambda step, steps: 1 - step / steps")
    return factor


def factor_at(factor: Factor, step: int, steps: int) -> float:
    """Return the factor of a step.

    Raises:
        ConfigurationError: it is not a finite number.
    """
    value = factor(step, steps)
    if not is_number(value):
        raise ConfigurationError(
            f"schedule: the function returned {value!r} for step {step} of {steps}: let it return the factor of the learning "
            "rate, a finite number"
        )
    return float(value)


@dataclass(frozen=True)
class Rates:
    """The learning rates of the steps of a run.

    Attributes:
        start: rate that ``schedule`` changes; None if the program takes none.
        groups: rates of parameter groups that have their own, by input; ``schedule`` changes them too.
        schedule: (step from 0, steps of the run) -> factor.
        computed: outputs with the rates that the program computes.
        monitored: inputs of a program whose rate falls on a plateau.
        figure: value for these inputs after each epoch: loss or a metric.
        every: steps per update; only one of them reads these inputs. More than 1 if the optimizer accumulates.
        end: number of steps of the program's own schedule; None without an end.
    """

    start: float | None
    groups: Mapping[str, float]
    schedule: Factor
    computed: tuple[str, ...]
    monitored: tuple[str, ...]
    figure: str
    every: int
    end: int | None

    @classmethod
    def of(cls, program: Program, lr: float | None, schedule: str | Factor, monitor: str | None, figures: Sequence[str]) -> Rates:
        """Return the rates of a run.

        Args:
            program: the trained program.
            lr: rate that replaces the program's.
            schedule: as in ``Trainer``.
            monitor: as in ``Trainer``.
            figures: names of the loss and the metrics.

        Raises:
            ConfigurationError: a rate or a schedule for a program that has none or computes its own, an unknown schedule or
                figure, or a figure for a program that monitors none.
        """
        signature = program.signature["step"]
        inputs = {entry.name: entry for entry in signature.inputs_of(Role.HYPERPARAMETER)}
        computed = tuple(entry.name for entry in signature.outputs_of(Role.RATE))
        factor = factor_of(schedule)
        groups = {
            name: entry.default for name, entry in inputs.items() if name.startswith(f"{RATE}:") and entry.default is not None
        }
        if RATE not in inputs:
            change = f"lr={lr}" if lr is not None else None if factor is _constant or groups else "schedule"
            if change and computed:
                raise ConfigurationError(
                    f"{change}: this program computes its learning rate from the step, by the schedule that it was compiled "
                    "with: leave it out, or compile with a number as lr"
                )
            if change:
                raise ConfigurationError(f"{change}: the optimizer of this program has no learning rate 'lr' to change")
        elif lr is not None:
            check_hyperparameters(signature, {RATE: lr})
            lr = float(lr)
        # The inputs of parameter groups are named monitored:<group>.
        monitored = tuple(name for name in inputs if name.partition(":")[0] == MONITORED)
        if monitor is not None and not monitored:
            raise ConfigurationError(f"monitor={monitor!r}: the schedule of this program monitors nothing: leave it out")
        if monitor is not None and monitor not in figures:
            raise ConfigurationError(f"monitor={monitor!r}: there is no such figure; there is {', '.join(figures)}")
        start = lr if lr is not None or RATE not in inputs else inputs[RATE].default
        return cls(
            start,
            groups,
            factor,
            computed,
            monitored,
            monitor or figures[0],
            steps_to_an_update(program.options.get("optimizer")),
            signature.end,
        )

    def at(self, step: int, steps: int) -> float | None:
        """Return the rate for a step; None if the program computes its own, or has none."""
        return None if self.start is None else self.start * factor_at(self.schedule, step, steps)

    def hyperparameters(self, step: int, steps: int, latest: Mapping[str, float]) -> dict[str, float]:
        """Return the hyperparameters of a step.

        Args:
            step: number of the step, from 0.
            steps: steps of the run.
            latest: figures that are new since the last step, or empty.
        """
        rate = self.at(step, steps)
        figure = latest.get(self.figure, math.nan)
        fits = abs(figure) <= float(np.finfo(np.float32).max)
        rates = {} if rate is None else {RATE: rate}
        if self.schedule is not _constant:
            factor = factor_at(self.schedule, step, steps)
            rates |= {name: start * factor for name, start in self.groups.items()}
        return rates | (dict.fromkeys(self.monitored, figure) if fits else {})

    def used(self, hyperparameters: Mapping[str, float], results: Mapping[str, float]) -> float | None:
        """Return the rate of a step from its hyperparameters and results; the first if there are several."""
        return results[self.computed[0]] if self.computed else hyperparameters.get(RATE)

    def check_end(self, done: int, left: int) -> None:
        """Raise ConfigurationError if the remaining steps go past the end of the program's own schedule.

        Args:
            done: steps that the state has taken.
            left: remaining steps of the run.
        """
        if self.end is not None and left and done + left > self.end:
            already = f" after the {done:,} that the state has taken" if done else ""
            raise ConfigurationError(
                f"The run has {left:,} steps{already}, and the learning-rate schedule of this program ends after {self.end:,}: "
                f"compile with a schedule of {done + left:,} steps or with past_end='hold', or train fewer epochs"
            )


def warn_of_what_is_not_reached(program: Program, steps: int, meets: bool) -> None:
    """Warn of options that have no effect, or only a partial one, because the run ends too early.

    Args:
        program: the trained program.
        steps: steps at the end of the run, including those before it.
        meets: True if workers step separately and meet.
    """
    options = program.options.get("optimizer")
    for problem in (*_of_optimizer(options, steps // steps_to_an_update(options), meets), *_of_masks(program, steps)):
        warn(ObjectiveWarning(problem))


def _of_optimizer(options: Any, updates: int, meets: bool) -> Iterator[str]:
    longer = "or train for more epochs or with smaller batches"
    for each in _named(options):
        match each["name"]:
            case "swa" if each["start"] > updates:
                yield (
                    f"swa: the average begins after update {each['start']:,}, and the run ends after {updates:,}, so that it is "
                    f"the parameters themselves: give a smaller start, {longer}"
                )
            case "warmup" if each["steps"] > updates:
                yield (
                    f"warmup: the learning rate rises over {each['steps']:,} updates, and the run ends after {updates:,}, before "
                    f"it is what was asked for: give a shorter warmup, {longer}"
                )
            case "diloco" if not meets:
                yield (
                    "diloco changes nothing: its outer step is taken where workers meet, and none do. Give "
                    "DataParallel(synchronize_every=...), such as 100, or compile with the optimizer inside alone"
                )


def _of_masks(program: Program, steps: int) -> Iterator[str]:
    marks = {mark for _, mark in masked_weights(program.predict.graph) if mark.changes and mark.end > steps}
    for mark in sorted(marks, key=lambda mark: mark.end):
        yield (
            f"prune: the part of the weights that is masked grows from step {mark.begin:,} to {mark.end:,}, and the run ends "
            f"after {steps:,}, before it is {mark.sparsity:g}: give a smaller end, or train for more epochs or with smaller "
            "batches"
        )


def _named(options: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(options, Mapping):
        if isinstance(options.get("name"), str):
            yield options
        options = list(options.values())
    if isinstance(options, list | tuple):
        for each in options:
            yield from _named(each)

"""What a program asks for that begins, or ends, only after the last step of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from burnish.errors import ObjectiveWarning
from burnish.graph.pruning_mark import masked_weights
from burnish.optim.accumulate import steps_to_an_update
from burnish.program import Program


def warn_of_what_is_not_reached(program: Program, steps: int, meets: bool) -> None:
    """Warn of options that change nothing in a run, or do only a part of what they say, because it ends before.

    Args:
        program: what trains.
        steps: that have been taken where the run ends, with those before it.
        meets: whether the run has workers that step alone and meet.
    """
    options = program.options.get("optimizer")
    for problem in (*_of_optimizer(options, steps // steps_to_an_update(options), meets), *_of_masks(program, steps)):
        warnings.warn(ObjectiveWarning(problem), stacklevel=4)


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
    """The settings of optimizers and schedules in the options of an optimizer, at any depth."""
    if isinstance(options, Mapping):
        if isinstance(options.get("name"), str):
            yield options
        options = list(options.values())
    if isinstance(options, list | tuple):
        for each in options:
            yield from _named(each)

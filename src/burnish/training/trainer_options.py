"""What a trainer is asked for, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Collection

from burnish.distributed import DataParallel
from burnish.errors import ConfigurationError
from burnish.metrics.base import total_of
from burnish.program import Program, Role
from burnish.program.state import averages
from burnish.random import check_seed
from burnish.settings import is_number, is_whole
from burnish.stopping import TimeLimit
from burnish.training.run_data import RunData


def check_run(seed: int, parallel: DataParallel | None, **numbers: int | None) -> None:
    """Raise ConfigurationError for a seed, workers, or numbers by name that a run cannot have."""
    for name, number in numbers.items():
        if number is not None and (not is_whole(number) or number < 1):
            raise ConfigurationError(f"{name}={number!r}: give a whole number of 1 or more")
    check_seed(seed)
    DataParallel.check(parallel)


def time_limit(step_timeout: float | None) -> TimeLimit | None:
    """Return what stops a step that takes longer than so many seconds; None where nothing does.

    Raises:
        ConfigurationError: it is no number above 0.
    """
    if step_timeout is None:
        return None
    if not is_number(step_timeout) or not 0 < step_timeout < math.inf:
        raise ConfigurationError(f"step_timeout={step_timeout!r}: give a number of seconds above 0, or leave it out for no limit")
    return TimeLimit(float(step_timeout))


def evaluated_parameters(program: Program, parameters: str | None) -> str | None:
    """Return what is evaluated after each epoch; raise ConfigurationError for an average that the program does not keep."""
    if parameters is not None:
        averages(program.signature, parameters)
    return parameters


def evaluation_only(program: Program, reported: Collection[str]) -> list[str]:
    """Return the figures that evaluation gives and a step does not: those of whole data sets, such as an average precision."""
    totals = (total_of(entry.name) for entry in program.signature["evaluate"].outputs)
    names = dict.fromkeys(total[0] for total in totals if total is not None)
    return [name for name in names if name not in reported and name.partition(":")[0] != "loss"]


def watched_figure(program: Program, best_metric: str | None, data: RunData) -> str:
    """Return the figure that decides which epoch is the best; one of whole data sets where there is one to evaluate on."""
    signature = program.signature["step"]
    reported = [entry.name for entry in (*signature.outputs_of(Role.METRIC), *signature.outputs_of(Role.LOSS))]
    # Metrics first: among what is reported stand the terms of a loss too.
    metrics = [name for name in program.options.get("metrics", ()) if name in reported or data.evaluation is not None]
    names = [*metrics, *(name for name in reported if name not in metrics)]
    if best_metric is None:
        return names[0]
    if best_metric not in names:
        raise ConfigurationError(
            f"best_metric: the program reports no '{best_metric}'; it reports {', '.join(repr(name) for name in names)}. "
            "Name one of these, or compile with metrics=[...]"
        )
    return best_metric

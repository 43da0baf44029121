"""Options that change nothing in a run because it ends before they begin, or does not have what they act on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import burnish
from burnish import optim, surgery
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.optim import schedules
from oracles.small_networks import perceptron

DATA = {"x": np.ones((12, 12), np.float32), "labels": np.arange(12) % 3}


def trainer(path: Path, program: burnish.Program, **options: Any) -> burnish.Trainer:
    """A run of six steps."""
    return burnish.Trainer(program, DATA, epochs=2, batch_size=4, run_directory=path, progress=False, **options)


def with_optimizer(optimizer: optim.Optimizer) -> burnish.Program:
    return burnish.compile(perceptron(), optimizer=optimizer)


def masked(end: int) -> burnish.Program:
    return burnish.compile(surgery.prune(perceptron(), 0.5, begin=1, end=end))


def warm(steps: int) -> optim.Optimizer:
    return optim.sgd(lr=schedules.warmup(schedules.constant(0.1), steps))


@pytest.mark.parametrize(
    ("late", "in_time", "message"),
    [
        (
            lambda: with_optimizer(optim.swa(optim.sgd(), start=7)),
            lambda: with_optimizer(optim.swa(optim.sgd(), start=6)),
            "swa: the average begins after update 7, and the run ends after 6, .* give a smaller start, or train for more",
        ),
        (
            lambda: with_optimizer(optim.accumulate(optim.swa(optim.sgd(), start=4), 2)),
            lambda: with_optimizer(optim.accumulate(optim.swa(optim.sgd(), start=3), 2)),
            "swa: the average begins after update 4, and the run ends after 3",
        ),
        (
            lambda: with_optimizer(optim.groups(optim.sgd(), {"*": {"lr": schedules.warmup(schedules.constant(0.1), 7)}})),
            lambda: with_optimizer(warm(6)),
            "warmup: the learning rate rises over 7 updates, and the run ends after 6, before it is .* give a shorter warmup",
        ),
        (
            lambda: masked(7),
            lambda: masked(6),
            "prune: the part of the weights that is masked grows from step 1 to 7, and the run ends after 6, before it is 0.5",
        ),
        (
            lambda: with_optimizer(optim.diloco(optim.sgd())),
            lambda: with_optimizer(optim.sgd()),
            r"diloco changes nothing: its outer step is taken where workers meet, .* DataParallel\(synchronize_every=",
        ),
    ],
    ids=["swa", "swa of updates", "warmup of a group", "masks", "diloco"],
)
def test_what_a_run_does_not_reach_is_named(
    late: Callable[[], burnish.Program], in_time: Callable[[], burnish.Program], message: str, tmp_path: Path
) -> None:
    with pytest.warns(ObjectiveWarning, match=message) as said:
        trainer(tmp_path / "late", late())
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        run = trainer(tmp_path / "run", in_time())
        run.run()
    assert run.session.step_count in (3, 6)


def test_steps_before_a_resumed_run_count(tmp_path: Path) -> None:
    program = masked(9)
    with pytest.warns(ObjectiveWarning, match="ends after 6, before it is 0.5"):
        trainer(tmp_path, program).run()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ObjectiveWarning)
        longer = burnish.Trainer(program, DATA, epochs=3, batch_size=4, run_directory=tmp_path, progress=False, resume=True)
        longer.run()
    assert longer.session.step_count == 9


def test_a_run_is_not_both_resumed_and_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="resume goes on with a run, and overwrite drops it: give one of them"):
        trainer(tmp_path, masked(6), resume=True, overwrite=True)

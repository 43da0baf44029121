"""A run that saves by journals and is killed again and again ends in the bits of one that was not."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

import burnish
from burnish.data import synthetic_clicks
from burnish.models import dlrm
from burnish.training import read_checkpoint, tables

ROWS = [30, 600]
COURSE = {"epochs": 3, "batch_size": 8, "seed": 3, "checkpoint_every": 1, "keep_checkpoints": 2, "threads": 1, "progress": False}
CALLS = ("replace", "fsync", "ftruncate", "unlink")
"""Of the system, between which a checkpoint is neither the earlier nor the new one."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")


@functools.cache
def program() -> burnish.Program:
    model = dlrm(ROWS, numbers=2, width=4, bottom=(3,), top=(3,))
    return burnish.compile(model, loss="bce_with_logits", optimizer=burnish.optim.adagrad(lr=0.1), metrics=[], sparse="auto")


def train(folder: Path, die_at: int | None, in_files: bool, journalled: bool) -> None:
    """What a process of its own does until it is killed, or dies before the ``die_at``-th call of the system."""
    if die_at is not None:
        die_before_call(die_at)
    resume = (folder / "checkpoints/latest.safetensors").exists()
    data, tables = synthetic_clicks(160, ROWS, numbers=2), folder / "tables" if in_files else None
    burnish.Trainer(program(), data, run_directory=folder, resume=resume, journal=journalled, tables=tables, **COURSE).run()


def die_before_call(number: int) -> None:
    left = [number]

    def counted(call):
        def dying(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return dying

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("burnish.training.run_folder.draw_curves", lambda *arguments: None)
    monkeypatch.setattr(tables, "SHARE", 0.03)  # a new base every few steps
    program()
    context = multiprocessing.get_context("fork")

    def started(
        folder: Path, die_at: int | None = None, in_files: bool = False, journalled: bool = True
    ) -> multiprocessing.Process:
        process = context.Process(target=train, args=(folder, die_at, in_files, journalled))
        process.start()
        return process

    return started


def reached(folder: Path) -> int:
    """The step of the last checkpoint; it is read whole."""
    latest = folder / "checkpoints/latest.safetensors"
    return read_checkpoint(latest).step if latest.exists() else 0


def assert_ends_like(folder: Path, whole: Path) -> None:
    expected = read_checkpoint(whole / "checkpoints/latest.safetensors").state
    state = read_checkpoint(folder / "checkpoints/latest.safetensors").state
    assert {name: array.tobytes() for name, array in state.items()} == {name: array.tobytes() for name, array in expected.items()}
    assert not list((folder / "checkpoints").rglob(".*")), "what killed processes left behind is removed"
    bases = {path.name[5:13] for path in (folder / "checkpoints/journal").glob("base-*")}
    assert 1 <= len(bases) <= 3
    assert {path.name[5:13] for path in (folder / "checkpoints/journal").glob("rows-*")} <= bases


@pytest.mark.parametrize("number", [pytest.param(15, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.campaign)])
def test_kills_at_random_moments(start, tmp_path: Path, number: int) -> None:
    whole = start(tmp_path / "whole", journalled=False)
    begin = time.monotonic()
    whole.join()
    duration = time.monotonic() - begin
    assert whole.exitcode == 0
    moments = random.Random(7)
    kills, run, step = 0, 0, 0
    finished = False
    while kills < number or not finished:
        folder = tmp_path / f"killed{run}"
        process = start(folder, in_files=run % 2 == 1)
        # After the last kill the run comes to its end, however far it is.
        process.join(timeout=moments.uniform(0.0, 1.2 * duration) if kills < number else None)
        process.kill()
        process.join()
        finished = process.exitcode == 0
        assert reached(folder) >= step, "a checkpoint is gone"
        step = reached(folder)
        if finished:
            assert_ends_like(folder, tmp_path / "whole")
            run, step = run + 1, 0
        else:
            assert process.exitcode == -signal.SIGKILL
            kills += 1


@pytest.mark.parametrize(
    "in_files",
    [pytest.param(False, id="in memory", marks=pytest.mark.campaign), pytest.param(True, id="in files", marks=pytest.mark.slow)],
)
def test_a_kill_before_each_call_of_a_checkpoint(start, tmp_path: Path, in_files: bool) -> None:
    """Each process dies some calls later than the one before it; what the calls do, ``CALLS`` names."""
    start(tmp_path / "whole", journalled=False).join()
    folder, call, kills, step = tmp_path / "killed", 0, 0, 0
    while True:
        process = start(folder, die_at=call, in_files=in_files)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        assert reached(folder) >= step
        step, call, kills = reached(folder), call + (2 if kills > 20 else 1), kills + 1
    assert kills > 20
    assert_ends_like(folder, tmp_path / "whole")

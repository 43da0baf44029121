"""The learning rate of a run that is resumed: whatever a killed process left of the change is resumed too."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import burnish
from burnish.cli.optimizer_options import TAKEOVER, take_over_checkpoints
from burnish.files.folder import MANIFEST
from burnish.models import residual_network
from burnish.training import Session, read_checkpoint
from burnish.training.checkpoint import ProgramIdentity, check_checkpoint
from burnish.training.run_files import CheckpointFolder

WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")


@pytest.fixture(scope="module")
def programs() -> dict[str, burnish.Program]:
    """One program with two rates, and with another momentum."""
    model = residual_network((1, 4, 4), classes=3, width=2, blocks=(1,))
    optimizers = {
        "first": "sgd:lr=0.1,momentum=0.9",
        "second": burnish.optim.sgd(lr=burnish.optim.schedules.linear(0.2, 9), momentum=0.9),
        "other": "sgd:lr=0.1,momentum=0.5",
    }
    return {name: burnish.compile(model, optimizer=optimizer) for name, optimizer in optimizers.items()}


@pytest.fixture(scope="module")
def run_folder(programs, tmp_path_factory) -> Path:
    """What a run with the first rate has saved: three checkpoints, of two states."""
    folder = tmp_path_factory.mktemp("run")
    session = Session(programs["first"], threads=1)
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=2)
    batch = {"x": np.ones((4, 1, 4, 4), np.float32), "labels": np.array([0, 1, 2, 0])}
    programs["first"].save(folder / "program")
    for _ in range(2):
        session.step(batch)
        checkpoints.save(session, {})
    checkpoints.save_best(session, {})
    return folder


def _take_over_until(number: int, folder: Path, program: burnish.Program) -> None:
    """Take checkpoints over in a process that kills itself before it changes the disk for the ``number``-th time."""
    changes = 0

    def watched(event: str, arguments: tuple) -> None:
        nonlocal changes
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in WRITES or writes:
            changes += 1
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watched)
    take_over_checkpoints(folder, program)


def _kill_at(number: int, folder: Path, program: burnish.Program) -> bool:
    """Return whether the process was killed before it came to its end."""
    process = multiprocessing.get_context("fork").Process(target=_take_over_until, args=(number, folder, program))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _check_resumed(folder: Path, program: burnish.Program, state: dict[str, np.ndarray]) -> None:
    """Check that a run goes on with a program, from a state, and that nothing of the change is left."""
    take_over_checkpoints(folder, program)
    identity = ProgramIdentity.of(program)
    for path in (folder / "checkpoints").glob("*.safetensors"):
        checkpoint = read_checkpoint(path)
        check_checkpoint(path, checkpoint, program, identity)
        assert path.name != "latest.safetensors" or checkpoint.state.keys() == state.keys()
        assert path.name != "latest.safetensors" or all(np.array_equal(checkpoint.state[name], state[name]) for name in state)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "program"]
    options = json.loads((folder / "program" / MANIFEST).read_text())["options"]
    assert options == json.loads(json.dumps(program.options))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
@pytest.mark.parametrize("every", [pytest.param(11, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.campaign)])
def test_a_run_that_is_killed_at_a_write_while_it_changes_its_rate_is_resumed_with_either(programs, run_folder, tmp_path, every):
    expected = read_checkpoint(run_folder / "checkpoints/latest.safetensors").state
    number = 1
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(run_folder, folder)
        if not _kill_at(number, folder, programs["second"]):
            break
        left = shutil.copytree(folder, tmp_path / f"{number} left")
        _check_resumed(folder, programs["first"], expected)
        _check_resumed(left, programs["second"], expected)
        number += every
    # Three checkpoints and a program of a dozen files.
    assert number > 20


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
def test_kills_that_follow_each_other(programs, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    number = 6
    for rate in ("second", "first", "second"):
        assert _kill_at(number, folder, programs[rate])
        number += 3
    _check_resumed(folder, programs["first"], read_checkpoint(run_folder / "checkpoints/latest.safetensors").state)


def test_what_differs_in_more_than_its_rate_is_left_as_it_is(programs, run_folder, tmp_path):
    for name, interrupted in (("whole", False), ("interrupted", True)):
        folder = tmp_path / name
        shutil.copytree(run_folder, folder)
        if interrupted:
            assert _kill_at(6, folder, programs["second"])
            assert (folder / TAKEOVER).exists()
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        take_over_checkpoints(folder, programs["other"])
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

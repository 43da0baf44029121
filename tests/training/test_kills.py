"""A run that is killed at random moments, again and again: nothing corrupt, nothing lost but the steps since the last save."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import burnish
from burnish.models import residual_network
from burnish.training import read_checkpoint

COURSE = {"epochs": 6, "batch_size": 4, "seed": 3, "checkpoint_every": 1, "keep_checkpoints": 3, "threads": 1, "progress": False}


def data() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(60, 1, 8, 8)).astype(np.float32), generator.integers(0, 10, 60)


def train(program: burnish.Program, folder: Path, resume: bool) -> None:
    """What a process of its own does until it is killed."""
    burnish.Trainer(program, data(), eval_data=data(), run_directory=folder, resume=resume, **COURSE).run()


def rows_without_time(folder: Path) -> list[list[str]]:
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    seconds = lines[0].index("seconds")
    return [line[:seconds] + line[seconds + 1 :] for line in lines]


@pytest.mark.parametrize("number", [pytest.param(15, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.campaign)])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
def test_kills_at_random_moments(number, tmp_path, monkeypatch):
    monkeypatch.setattr("burnish.training.run_folder.draw_curves", lambda *arguments: None)
    # Forked before any engine has threads: a child needs no set-up of its own, and most of its time can be hit.
    context = multiprocessing.get_context("fork")
    program = burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=0.05, momentum=0.9))
    process = context.Process(target=train, args=(program, tmp_path / "whole", False))
    begin = time.monotonic()
    process.start()
    process.join()
    duration = time.monotonic() - begin
    assert process.exitcode == 0
    whole = read_checkpoint(tmp_path / "whole/checkpoints/latest.safetensors").state
    moments = random.Random(7)
    kills, run, reached = 0, 0, 0
    finished = False
    while kills < number or not finished:
        folder = tmp_path / f"killed{run}"
        process = context.Process(target=train, args=(program, folder, reached > 0))
        process.start()
        # After the last kill the run comes to its end, however far it is.
        process.join(timeout=moments.uniform(0.0, duration / 2) if kills < number else None)
        process.kill()
        process.join()
        finished = process.exitcode == 0
        checkpoints = {path.name: read_checkpoint(path) for path in (folder / "checkpoints").glob("*.safetensors")}
        assert max((checkpoint.step for checkpoint in checkpoints.values()), default=0) >= reached, "a checkpoint is gone"
        if not finished:
            assert process.exitcode == -signal.SIGKILL
            kills += 1
            reached = checkpoints["latest.safetensors"].step if "latest.safetensors" in checkpoints else 0
            continue
        resumed = checkpoints["latest.safetensors"].state
        assert resumed.keys() == whole.keys()
        for name, array in whole.items():
            np.testing.assert_array_equal(resumed[name], array, err_msg=name)
        assert rows_without_time(folder) == rows_without_time(tmp_path / "whole")
        assert not list((folder / "checkpoints").glob(".*")), "what killed processes left behind is removed"
        run, reached = run + 1, 0


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill(tmp_path):
    """The same through the command line: ``--resume`` after SIGKILL ends in the same bits."""
    np.savez(tmp_path / "data.npz", x=data()[0], y=data()[1])
    ir.save(residual_network(), tmp_path / "model.onnx")
    options = "--data data.npz --threads 1 --batch-size 4 --epochs 12 --checkpoint-every 1 --keep-checkpoints 2".split()
    command = [sys.executable, "-m", "burnish", "train", "model.onnx", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(folder: str, *more: str) -> subprocess.Popen:
        arguments = [*command, "-o", folder, *more]
        return subprocess.Popen(
            arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with start("killed") as process:
        latest = tmp_path / "killed/checkpoints/latest.safetensors"
        while not latest.exists() and process.poll() is None:
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert read_checkpoint(latest).step > 0
    for folder, more in (("killed", ("--resume",)), ("whole", ())):
        with start(folder, *more) as process:
            _, message = process.communicate(timeout=300)
        assert process.returncode == 0, message
    assert (tmp_path / "killed/tuned.onnx").read_bytes() == (tmp_path / "whole/tuned.onnx").read_bytes()
    assert re.fullmatch(r"step-\d{8}\.safetensors", sorted(path.name for path in latest.parent.glob("step-*"))[0])


COURSES = 4
"""Of kills, at the same time: most of a short life is start-up, in which a process waits for files and for others."""
COMMANDS = {
    "train": ("train", "--epochs", "8", "--checkpoint-every", "2", "--keep-checkpoints", "2"),
    "workers": ("train", "--workers", "2", "--epochs", "8", "--checkpoint-every", "2"),
    "finetune": ("finetune", "--epochs", "4"),
}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_go_on_after_140_kills_at_random_moments(kind: str, tmp_path: Path) -> None:
    """The command is killed alone, or with all that it started; what it started then ends by itself."""
    np.savez(tmp_path / "data.npz", x=data()[0], y=data()[1])
    ir.save(residual_network(), tmp_path / "model.onnx")
    name, *options = COMMANDS[kind]
    command = [sys.executable, "-m", "burnish", name, "model.onnx", "--data", "data.npz", "--threads", "1", "--batch-size", "4"]
    command += [*options, "--seed", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BURNISH_KERNELS": "off"}

    def start(folder: str) -> subprocess.Popen[str]:
        more = ["--resume"] if (tmp_path / folder / "checkpoints/latest.safetensors").exists() else []
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        return subprocess.Popen([*command, "-o", folder, *more], cwd=tmp_path, env=environment, **streams)

    def run_whole(folder: str) -> None:
        with start(folder) as process:
            printed, _ = process.communicate(timeout=600)
            assert process.returncode == 0, printed

    def kill_again_and_again(course: int) -> int:
        """Kill until enough are dead, each from where the one before was; returns how many runs came to their end."""
        moments, kills, run = random.Random(course), 0, 0
        while kills < 140 // COURSES:
            folder = tmp_path / f"killed{course}-{run}"
            with start(folder.name) as process:
                try:
                    process.wait(moments.uniform(0.2, 1.2) * duration)
                except subprocess.TimeoutExpired:
                    os.kill(process.pid, signal.SIGKILL) if kills % 2 else os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate(timeout=120)  # to its end: workers print into the same pipe
            if process.returncode == -signal.SIGKILL:
                kills += 1
                continue
            assert process.returncode == 0, printed
            assert (folder / "tuned.onnx").read_bytes() == whole
            assert rows_without_time(folder) == rows_without_time(tmp_path / "whole0")
            assert not list(folder.rglob("*.partial"))
            run += 1
        return run

    with ThreadPoolExecutor(COURSES) as courses:
        begin = time.monotonic()
        list(courses.map(run_whole, [f"whole{course}" for course in range(COURSES)]))
        duration = time.monotonic() - begin
        whole = (tmp_path / "whole0/tuned.onnx").read_bytes()
        assert sum(courses.map(kill_again_and_again, range(COURSES))), "no run came to its end"

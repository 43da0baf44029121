"""What another user of the machine can do to a run: nothing but read its figures."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from burnish.cli import launch
from burnish.errors import ConfigurationError
from burnish.training import Trainer
from burnish.training.callbacks import Callback
from burnish.training.run_folder import RunLock
from oracles.tiny_program import tiny_batch, tiny_program

OTHER = ("setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups")
pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which(OTHER[0]) is None, reason="only root can act as another user"
)


def manages(*command: object) -> bool:
    """Whether another user manages to do something."""
    return subprocess.run([*OTHER, *map(str, command)], capture_output=True, check=False).returncode == 0


class Attacked(Callback):
    """Lets another user try, while a run goes on, what would read or change it."""

    def __init__(self) -> None:
        self.managed: list[str] = []

    def on_step_end(self, trainer, report):
        folder = trainer.run_directory
        trials = {
            "look on": ("cat", folder / "metrics.csv"),
            "read a state": ("cat", trainer.latest),
            "list the states": ("ls", trainer.latest.parent),
            "replace a state": ("cp", "/dev/null", trainer.latest),
            "hold the lock": ("flock", "--nonblock", "--shared", folder / ".lock", "true"),
            "remove the lock": ("rm", "-f", folder / ".lock"),
            "plant a library": ("cp", "/dev/null", folder / "planted.so"),
            "stop the run": ("sh", "-c", f"kill -STOP {os.getpid()}"),
            "trace the run": ("ls", f"/proc/{os.getpid()}/fd"),
            "join the workers": ("ls", self.meeting),
        }
        self.managed = [name for name, command in trials.items() if manages(*command)]
        trainer.stop("all was tried")


def test_another_user_can_look_at_the_figures_of_a_run_and_no_more():
    earlier = os.umask(0o022)
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        attacked = Attacked()
        data = {name: np.repeat(array, 4, axis=0) for name, array in tiny_batch().items()}
        with launch._place_to_meet(launch.Machines()) as place:
            (attacked.meeting,) = place.values()
            options = {"batch_size": 4, "checkpoint_every": 1, "callbacks": [attacked], "progress": False}
            Trainer(tiny_program(), data, run_directory=folder / "run", **options).run()
        assert attacked.managed == ["look on"]
    finally:
        os.umask(earlier)
        shutil.rmtree(folder)


def test_a_lock_of_another_user_is_named():
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o777)
        (folder / ".lock").touch(mode=0o600)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(12345)
            os.setuid(12345)
            try:
                RunLock(folder)
            except ConfigurationError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert f"A run of another user goes on in '{folder}', or was killed there" in os.read(reader, 1000).decode()
    finally:
        shutil.rmtree(folder)

"""One run at a time goes on in a folder, whoever starts the second: another process, a thread, a fork."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from burnish.errors import ConfigurationError
from burnish.training.callbacks import Callback
from burnish.training.run_folder import LOCK, RunLock
from training.test_trainer import trainer

GOING_ON = "A run is going on in '{}', {}: wait until it has ended, or stop it; or choose another folder"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")


class Meanwhile(Callback):
    """Does something while a run goes on."""

    def __init__(self, act):
        self.act = act

    def on_run_begin(self, trainer):
        self.act()


def refusal(folder: Path, where: str) -> str:
    return GOING_ON.format(folder, where).replace("(", r"\(")


@pytest.mark.slow
def test_another_trainer_of_the_process_waits_until_the_run_has_ended(tmp_path):
    def second() -> None:
        with pytest.raises(ConfigurationError, match=refusal(tmp_path, "in this process")):
            trainer(tmp_path, overwrite=True)

    def in_a_thread() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        second()

    first = trainer(tmp_path, callbacks=[Meanwhile(in_a_thread)])
    steps = first.run().steps
    assert trainer(tmp_path, epochs=4, resume=True).run().steps > steps  # the first one is still there
    assert not (tmp_path / LOCK).exists()


@pytest.mark.slow
def test_of_two_that_are_prepared_the_later_one_has_the_folder(tmp_path):
    earlier, later = trainer(tmp_path), trainer(tmp_path, overwrite=True)
    with pytest.raises(ConfigurationError, match=r"Another run was prepared in .* after this one, by this process"):
        earlier.run()
    later.run()


def test_another_process_is_refused_by_pid_and_host(tmp_path):
    lock = RunLock(tmp_path)
    code = "import sys\nfrom pathlib import Path\nfrom burnish.training.run_folder import RunLock\nRunLock(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert f"in process {os.getpid()} on '{socket.gethostname()}': wait until it has ended" in done.stderr
    lock.release()
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_process_neither_has_the_lock_nor_keeps_it(tmp_path):
    lock = RunLock(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            RunLock(tmp_path)
        except ConfigurationError as error:
            os.write(writer, str(error).encode())
        finally:
            os.write(writer, b"\n")
            while True:
                signal.pause()
    os.close(writer)
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(reader, 1000)
    assert f"in process {os.getpid()} on" in said.decode()
    lock.release()
    RunLock(tmp_path).release()  # while the child lives
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_lock_is_nobody_elses_and_follows_no_link(tmp_path):
    lock = RunLock(tmp_path)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
    lock.release()
    target = tmp_path / "mine"
    target.write_text("whole")
    (tmp_path / LOCK).symlink_to(target)
    with pytest.raises(ConfigurationError, match=r"\.lock' is a link, and no lock of a run: remove it"):
        RunLock(tmp_path)
    assert target.read_text() == "whole"


def test_a_folder_that_the_run_made_and_left_empty_is_removed(tmp_path):
    RunLock(tmp_path / "run").release()
    assert not (tmp_path / "run").exists()

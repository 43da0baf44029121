"""Files that are written whole or not at all, next to other processes that write the same."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys

import pytest

from burnish.errors import CheckpointError, ConfigurationError
from burnish.files.file_writing import check_output, replacing, write_text

WRITES = """
import sys
from pathlib import Path
from burnish.files.file_writing import replacing

with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("of the other process")
    print("writing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that is writing ``notes.txt``, and waits for a line before it ends that."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, tmp_path / "notes.txt"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("is_link", [False, True], ids=["pipe", "link"])
def test_a_pipe_is_not_replaced_by_a_file(tmp_path, is_link):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if is_link:
        path = tmp_path / "link"
        path.symlink_to("pipe")
    with pytest.raises(CheckpointError, match=r"(pipe|link)' is a device or a pipe: give the name of a file"):
        write_text(path, "text")
    with pytest.raises(ConfigurationError, match=r"--output: '.*' is a device or a pipe: give the name of a file"):
        check_output(path, "--output")
    with pytest.raises(ConfigurationError, match=r"--output: '.*' is a device or a pipe: give the name of a folder"):
        check_output(path, "--output", is_folder=True)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_what_a_living_process_writes_is_not_removed(tmp_path, other):
    write_text(tmp_path / "notes.txt", "own")
    assert len(os.listdir(tmp_path)) == 2
    other.communicate("\n")
    assert other.returncode == 0
    assert (tmp_path / "notes.txt").read_text() == "of the other process"
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_what_a_killed_process_left_is_removed(tmp_path, other):
    other.kill()
    other.wait()
    write_text(tmp_path / "notes.txt", "own")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_folder_that_cannot_be_flushed_is_no_failure(tmp_path, monkeypatch):
    flush = os.fsync

    def refuse_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_text(tmp_path / "notes.txt", "own")
    assert (tmp_path / "notes.txt").read_text() == "own"


def test_what_fails_in_between_is_not_swallowed(tmp_path):
    with pytest.raises(CheckpointError, match=r"could not be written: .*No such file"), replacing(tmp_path / "notes.txt"):
        (tmp_path / "missing").read_text()
    assert not os.listdir(tmp_path)

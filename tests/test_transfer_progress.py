"""What is said while large files are read and written: nothing, or lines to whoever asked for them."""

from __future__ import annotations

import numpy as np

from burnish import transfer_progress
from burnish.files.state_file import StateFile, write_state_file

ARRAYS = {"a": np.zeros(25_000_000, np.uint8), "b": np.zeros(75_000_000, np.uint8)}


def test_lines_come_where_it_takes_long(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    now = iter(range(10_000))
    monkeypatch.setattr(transfer_progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(transfer_progress, "LINE_EVERY_SECONDS", 10)
    lines = []
    with transfer_progress.transfers_reported(lines.append):
        write_state_file(path, ARRAYS, {})
        with StateFile(path, "checkpoint") as file:
            file.check_digest()
    assert len(lines) >= 4
    assert lines[0] == f"writing '{path}': 0.0 of 0.1 GB"
    assert lines[-1] == f"checking '{path}': 0.1 of 0.1 GB"


def test_what_is_done_at_once_says_nothing(tmp_path):
    lines = []
    with transfer_progress.transfers_reported(lines.append):
        write_state_file(tmp_path / "state.safetensors", {"a": np.zeros(3)}, {})
    assert lines == []


def test_nobody_asked(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(transfer_progress, "FIRST_LINE_SECONDS", -1)
    write_state_file(tmp_path / "state.safetensors", {"a": np.zeros(3)}, {})
    assert capfd.readouterr() == ("", "")

"""Commands say how far they are with large files, beside what they print."""

from __future__ import annotations

import pytest

from burnish import transfer_progress

TRAIN = ("train", "model.onnx", "--data", "data.npz", "--threads", "1", "--batch-size", "8", "--epochs", "1")


@pytest.mark.slow
def test_files_that_take_long(run, folder, monkeypatch):
    monkeypatch.setattr(transfer_progress, "FIRST_LINE_SECONDS", -1)
    result = run(*TRAIN)
    assert "best.safetensors': 0.0 of 0.0 GB" in result.stderr  # the latest is the same file
    assert "GB" not in result.stdout
    assert "checking 'runs/model/checkpoints/latest.safetensors': " in run("export", "runs/model", "-o", "tuned.onnx").stderr


def test_files_that_are_written_at_once(run, folder):
    assert "GB" not in run(*TRAIN).output

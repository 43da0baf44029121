"""The table of a run, and its curves."""

from __future__ import annotations

import math
import sys

import pytest

from burnish.errors import CheckpointError
from burnish.installing import install_command
from burnish.training.run_results import MetricsTable, draw_curves


def row(step: int, loss: float) -> dict[str, int | float]:
    return {"step": step, "epoch": 1, "samples": 8 * step, "seconds": 0.5, "lr": 0.1, "loss": loss}


def test_numbers_read_back_exactly(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path, ["loss"])
    losses = [1 / 3, 1e-300, float("inf"), 0.1 + 0.2]
    for step, loss in enumerate(losses, 1):
        table.append(row(step, loss))
    table.append(row(5, float("nan")) | {"eval_loss": 2 / 3})
    again = MetricsTable(path, ["loss"], last_step=5)
    assert [item["loss"] for item in again.rows[:4]] == losses
    assert math.isnan(again.rows[4]["loss"])
    assert [item["eval_loss"] for item in again.rows] == [None] * 4 + [2 / 3]
    assert again.rows[:4] == table.rows[:4]
    assert all(isinstance(again.rows[0][name], int) for name in ("step", "epoch", "samples"))


def test_later_rows_and_a_torn_last_row_are_dropped(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path, ["loss"])
    for step in (1, 2, 3):
        table.append(row(step, 1.0))
    whole = path.read_text().splitlines()
    path.write_text(path.read_text() + "4,1,3")
    table = MetricsTable(path, ["loss"], last_step=2)
    assert [item["step"] for item in table.rows] == [1, 2]
    assert path.read_text().splitlines() == whole[:3]
    table.append(row(3, 1.0))
    assert path.read_text().splitlines() == whole


def test_a_new_table_replaces_an_earlier_one(tmp_path):
    path = tmp_path / "metrics.csv"
    MetricsTable(path, ["loss"]).append(row(1, 1.0))
    MetricsTable(path, ["loss", "accuracy"])
    assert path.read_text() == "step,epoch,samples,seconds,lr,loss,accuracy,eval_loss,eval_accuracy\n"


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "", "step,epoch,samples,seconds,lr,loss,eval_loss\nx,1,8,0.5,0.1,1.0,\n"])
def test_a_table_of_something_else(tmp_path, content):
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"is not the table of this run .*: move it away, and training resumes"):
        MetricsTable(path, ["loss"], last_step=3)
    assert path.read_text() == content


def test_a_row_that_cannot_be_written(tmp_path):
    path = tmp_path / "metrics.csv"
    table = MetricsTable(path, ["loss"])
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.csv' cannot be written: .*Free space on the disk, then resume"):
        table.append(row(1, 1.0))


def test_curves_of_a_table(tmp_path, monkeypatch):
    table = MetricsTable(tmp_path / "metrics.csv", ["loss", "accuracy"])
    table.append(row(1, 1.0))
    table.append(row(2, 0.5) | {"accuracy": 0.7, "eval_loss": 0.6})
    path = tmp_path / "curves.png"
    assert draw_curves(table.rows, path, ["loss", "accuracy"]) is None
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert f"matplotlib is not installed ({install_command('matplotlib')})" in draw_curves(table.rows, path, ["loss"])


def test_what_evaluation_has_no_figure_of_has_no_column_of_it(tmp_path):
    table = MetricsTable(tmp_path / "metrics.csv", ["loss", "skipped"], training_only=["skipped"])
    assert table.columns[-3:] == ("loss", "skipped", "eval_loss")

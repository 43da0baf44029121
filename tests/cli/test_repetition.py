"""Runs that are repeated: from the file that every run writes, and with several seeds."""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

from burnish.cli.application import app
from burnish.cli.repetition import _toml, train_with_seeds
from burnish.cli.train_options import Course, Results
from burnish.errors import CheckpointError
from burnish.installing import install_command
from burnish.models import residual_network
from burnish.training import run_folder
from burnish.training.run_files import exported_figures
from burnish.training.run_results import MetricsTable, TrainingResult
from oracles.combinations import spread


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with a model and data, in which commands run."""
    monkeypatch.setattr(run_folder, "draw_curves", lambda rows, path, names: None)
    monkeypatch.chdir(tmp_path)
    ir.save(residual_network(width=4, blocks=(1,)), "model.onnx")
    rng = np.random.default_rng(0)
    np.savez("data.npz", x=rng.normal(size=(24, 1, 8, 8)).astype(np.float32), y=rng.integers(0, 10, 24))
    return tmp_path


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_the_file_of_a_run_repeats_it(folder):
    done(
        "train", "model.onnx", "--data", "data.npz", "--optimizer", "adam", "--lr", 0.01, "--seed", 7, "--batch-size", 8,
        "--no-fold", "--freeze", "stem.*", "--freeze", "classifier.bias", "--output", "a",
    )  # fmt: skip
    written = tomllib.loads((folder / "a" / "run.toml").read_text())
    assert written == {
        "train": {
            "model": "model.onnx", "data": "data.npz", "optimizer": "adam", "lr": 0.01, "seed": 7, "batch-size": 8, "epochs": 1,
            "fold": False, "freeze": ["stem.*", "classifier.bias"],
        }
    }  # fmt: skip
    done("train", "--config", "a/run.toml", "--output", "b")
    assert (folder / "a" / "tuned.onnx").read_bytes() == (folder / "b" / "tuned.onnx").read_bytes()
    assert (folder / "a" / "run.toml").read_text() == (folder / "b" / "run.toml").read_text()
    other = done("train", "--config", "a/run.toml", "--output", "c", "--epochs", 2)
    assert "epoch 2/2" in other
    assert tomllib.loads((folder / "c" / "run.toml").read_text())["train"]["epochs"] == 2


@pytest.mark.slow
def test_fine_tuning_is_repeated_with_the_rate_that_was_found(folder):
    assert "lr:" in done("finetune", "model.onnx", "--data", "data.npz", "--epochs", 1, "--output", "a")
    options = tomllib.loads((folder / "a" / "run.toml").read_text())["finetune"]
    assert options["lr"] > 0
    assert "lr:" not in done("finetune", "--config", "a/run.toml", "--output", "b")
    assert (folder / "a" / "tuned.onnx").read_bytes() == (folder / "b" / "tuned.onnx").read_bytes()


@spread(
    ("content", "message"),
    [
        ("[train]\nbatch_size = 3", "burnish train has no option 'batch_size' (did you mean 'batch-size'?)"),
        ("[train]\nepochs = 1.5", "epochs = 1.5: "),
        ("[train]\nepochs = true", "epochs = true: give a number or a text"),
        ("[train]\nepochs = 0", "epochs = 0: "),
        ("[train]\nfold = 1", "fold = 1: give true or false"),
        ("[train]\nlr = [0.1, 0.2]", "lr = [0.1, 0.2]: it takes one value, not a list"),
        ("[train]\nimage-size = [8]", "image-size = [8]: "),
        ("[train]\nfreeze = [{a = 1}]", 'freeze = [{"a" = 1}]: give a number or a text'),
        ("[train]\nconfig = 'other.toml'", "burnish train has no option 'config'"),
        ("[finetune]\nepochs = 1", "has no table [train] with the options of this command; it has [finetune]"),
        ("", "has no table [train] with the options of this command; it has none"),
        ("lr = 1\n[train]\nepochs = 1", "'lr' stands in no table: write options below a line [train]"),
        ("[[train]]\nepochs = 1", "'train' stands in no table"),
        (
            "[train]\nepochs = 1\n[trian]\nlr = 1",
            "has a table [trian], and burnish has no command of that name (did",
        ),
        (
            "[train]\nepochs = 0x" + "f" * 5000,
            "cannot be read: it holds an integer of 20,000 bits besides its sign, and TOML's have 63",
        ),
        ("[train]\nlr = 1979-05-27", "give a number or a text"),
        ("[train.lr]\na = 1", "give a number or a text"),
        ("train = ", "cannot be read"),
    ],
    test=7,
)
def test_a_wrong_file_is_refused(folder, content, message):
    (folder / "wrong.toml").write_text(content)
    result = run("train", "model.onnx", "--data", "data.npz", "--config", "wrong.toml")
    assert result.exit_code == 1
    assert "--config 'wrong.toml'" in result.output
    assert message in result.output
    assert not (folder / "runs").exists()


def test_a_file_that_is_not_there_is_named():
    result = run("train", "--config", "none.toml")
    assert result.exit_code == 1
    assert "--config 'none.toml' cannot be read" in result.output
    assert "Give a TOML file, such as the run.toml of a run" in result.output


@pytest.mark.parametrize("value", ['a "b"\n\\c\x7f\x1b', "grün 🙂", 1e-30, 5, True, [1, 2.5], ["x", "y"], float("inf")])
def test_values_read_back(value):
    assert tomllib.loads(f"value = {_toml(value)}")["value"] == value


@pytest.mark.slow
def test_several_seeds(folder):
    output = done("train", "model.onnx", "--data", "data.npz", "--seed", 3, "--seeds", 2, "--output", "runs/s", "--batch-size", 8)
    with (folder / "runs" / "s" / "seeds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["3", "4", "mean", "standard deviation"]
    losses = [float(row["loss"]) for row in rows]
    assert losses[2:] == [pytest.approx(statistics.mean(losses[:2])), pytest.approx(statistics.stdev(losses[:2]))]
    assert losses[0] != losses[1]
    assert f"{losses[2]:.4f}" in output
    alone = tomllib.loads((folder / "runs" / "s" / "seed-4" / "run.toml").read_text())
    assert alone["train"]["seed"] == 4
    done("train", "--config", "runs/s/seed-4/run.toml", "--output", "alone")
    assert (folder / "alone" / "tuned.onnx").read_bytes() == (folder / "runs" / "s" / "seed-4" / "tuned.onnx").read_bytes()
    again = done(
        "train",
        "model.onnx",
        "--data",
        "data.npz",
        "--seed",
        3,
        "--seeds",
        3,
        "--output",
        "runs/s",
        "--batch-size",
        8,
        "--resume",
    )
    assert again.count("already finished") == 2
    assert "seed 5, 3 of 3" in again


def test_the_figures_of_seeds_are_those_of_the_files(tmp_path, capsys):
    """Of runs that went back to their best epoch, one of them to that of an earlier stage."""
    losses = {0: [0.4, 0.9], 1: [0.7, 0.8]}

    def train(course: Course, results: Results) -> TrainingResult:
        folder = results.folder
        place = folder / "stages" / "1" if course.seed else folder
        place.mkdir(parents=True)
        table = MetricsTable(place / "metrics.csv", ["loss", "accuracy"])
        for epoch, loss in enumerate(losses[course.seed], start=1):
            position = {"step": 2 * epoch, "epoch": epoch, "samples": 8, "seconds": 1.0, "lr": 0.1, "loss": 9.0}
            table.append(position | {"step": 2 * epoch - 1})
            table.append(position | {"eval_loss": loss, "eval_accuracy": 1 - loss})
        tuned = {"data": "evaluation", "epoch": 1, "accuracy": 1 - losses[course.seed][0]} | ({"stage": 1} if course.seed else {})
        (folder / "run.json").write_text(json.dumps({"result": {"tuned": tuned}}))
        last = losses[course.seed][-1]
        return TrainingResult({"loss": last, "accuracy": 1 - last}, [], None, 4, 1.0, folder)

    train_with_seeds(2, Course(), Results(), tmp_path, train)
    said = capsys.readouterr().out
    assert "of the best epoch, which each tuned.onnx holds" in " ".join(said.split())
    with (tmp_path / "seeds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows[:3]] == pytest.approx([0.4, 0.7, 0.55])
    assert [float(row["accuracy"]) for row in rows[:3]] == pytest.approx([0.6, 0.3, 0.45])
    (tmp_path / "seed-0" / "metrics.csv").unlink()
    with pytest.raises(CheckpointError, match=r"metrics.csv' is not the table of this run"):
        exported_figures(tmp_path / "seed-0", ["loss"])
    with pytest.raises(CheckpointError, match=r"no figures of epoch 1, which .* exported: evaluate the run by burnish"):
        exported_figures(tmp_path / "seed-1", ["loss", "recall"])


def test_what_means_nothing_for_several_seeds_is_refused():
    base = ("train", "model.onnx", "--data", "data.npz", "--seeds", 2)
    for option, message in ((("--workers", 2), "trains one run after the other"), (("--export", "x.onnx"), "would let each run")):
        result = run(*base, *option)
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


def test_a_logger_that_cannot_log_is_named_before_anything_is_read(run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for command in ("train", "finetune"):
        refused = run(command, "missing.onnx", "--data", "missing.npz", "--log", "mlflow", code=1)
        assert f"MLflow is not installed: {install_command('mlflow')}" in refused.output


@pytest.mark.slow
def test_a_run_is_logged_where_the_command_says(run, folder) -> None:
    pytest.importorskip("tensorboardX")
    run("train", "model.onnx", "--data", "data.npz", "--log", "tensorboard:histograms=0,examples=0", "-o", "logged")
    assert list((folder / "logged" / "events").glob("events.out.tfevents.*"))
    assert "log" not in (folder / "logged" / "run.toml").read_text()

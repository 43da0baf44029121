"""``burnish check --data``: what fine-tuning would do and take, in one screen and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer

import burnish
from burnish.finetuning import Forecast, planning
from burnish.finetuning.planning import BESIDE_THE_PLAN, largest_batch, step_memory

ROOT = Path(__file__).resolve().parents[2]
CHECK = ("check", "model.onnx", "--data", "data.npz", "--threads", "1")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def refused(result) -> str:
    return " ".join(result.stderr.split())


def test_what_it_says_is_what_finetune_does(run, folder):
    before = files(folder)
    found = json.loads(run(*CHECK, "--json").stdout)
    assert files(folder) == before, "nothing is written"
    said = run("finetune", "model.onnx", "--data", "data.npz", "--epochs", "5", "--lr", "0.01", "--threads", "1").stdout
    chosen = json.loads((folder / "runs/model-finetuned/finetune.json").read_text())
    for note in found["notes"]:
        assert re.sub(r" of [\d.,]+ GB free", "", note) in re.sub(r" of [\d.,]+ GB free", "", said)
    assert found["batch"]["size"] == chosen["batch_size"] == 8
    assert (found["task"]["loss"], found["task"]["metrics"]) == (chosen["loss"]["name"], chosen["metrics"])
    assert found["optimizer"] == {
        "name": "sgd", "settings": {"momentum": 0.9}, "lr": None, "schedule": chosen["schedule"], "epochs": 5,
    }  # fmt: skip
    assert f"{found['speed']['steps_per_epoch']:,}" == "3"
    labels = np.load("data.npz")["y"]
    counts = [{"name": str(number), "samples": int((labels == number).sum())} for number in range(3)]
    assert found["samples"] == {
        "count": 20, "inputs": {"x": {"shape": [1, 4, 4], "dtype": "float32"}}, "classes": counts, "reading": [],
    }  # fmt: skip
    model = onnx.load("model.onnx")
    weights = [tensor for tensor in model.graph.initializer if not re.search(r"running_|mean|var", tensor.name)]
    assert found["weights"]["trained"] == sum(int(np.prod(tensor.dims)) for tensor in weights)
    assert found["speed"]["seconds_per_epoch"] == pytest.approx(3 * np.median(found["speed"]["seconds"]))
    assert len(found["speed"]["seconds"]) == 3
    assert found["speed"]["engine"].startswith("onnxruntime: ")
    assert set(found) == {field.name for field in fields(Forecast)}
    page = (ROOT / "docs/before-training.md").read_text()
    assert [name for name in found if f"`{name}`" not in page] == []


def test_it_fits_on_a_screen_and_says_what_stays_frozen(run):
    lines = run(*CHECK, "--freeze-until", "head", "--unfreeze", "1", "--eval-split", "0.2", code=1).stderr
    assert "cannot be trained on data.npz: unfreeze: nothing before the head is to train" in " ".join(lines.split())
    for options in ((), ("--freeze-until", "head"), ("--adapter", "lora", "--rank", "2"), ("--unfreeze", "1,2")):
        lines = run(*CHECK, *options).stdout.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        assert lines[0] == "model.onnx can be trained on data.npz"
        rows = [line.split()[0] for line in lines if line[:1] != " "]
        for name in ("data", "classes", "head", "loss", "trains", "frozen", "optimizer", "memory", "batch", "time", "machine"):
            assert name in rows
    frozen = json.loads(run(*CHECK, "--freeze-until", "head", "--json").stdout)
    assert frozen["weights"]["frozen"][0]["reason"] == "before 'head' (freeze_until, --freeze-until)"
    assert frozen["weights"]["trained"] == sum(
        int(np.prod(tensor.dims)) for tensor in onnx.load("model.onnx").graph.initializer if "classifier" in tensor.name
    )
    assert frozen["speed"]["features_seconds"] > 0


def test_the_largest_batch_fits_and_the_next_does_not(folder, monkeypatch):
    program = burnish.compile("model.onnx")
    sample = {"x": np.zeros((1, 1, 4, 4), np.float32), "labels": np.zeros(1, np.int64)}
    planned = step_memory(program, sample)
    for free in (2_000_000, 20_000_000):
        monkeypatch.setattr(planning, "available_memory", lambda free=free: free)
        largest = largest_batch(program, sample, 1_000_000)
        assert BESIDE_THE_PLAN * planned(largest) <= free < BESIDE_THE_PLAN * planned(largest + largest // 16 + 1)
    assert largest > 32
    assert largest_batch(program, sample, 40) == 40, "no more than the data have"
    monkeypatch.setattr(planning, "available_memory", lambda: None)
    assert largest_batch(program, sample, 40) is None


def test_a_batch_of_one_size_is_the_largest_and_what_is_left_out_is_said(run, folder):
    model = onnx.load("model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    del model.graph.value_info[:]
    onnx.save(model, "eight.onnx")
    found = burnish.finetuning.check("eight.onnx", "data.npz", threads=1)
    assert (found.batch["size"], found.batch["largest"]) == (8, 8)
    assert found.samples["reading"] == ["the last 4 samples of each epoch, as the model takes no batch of 4"]
    assert found.speed["steps_per_epoch"] == 2
    assert "reading    the last 4 samples of each epoch" in str(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "none.npz"), "model.onnx cannot be trained on none.npz: none.npz: no such file or folder"),
        (("--data", "data.npz", "--head", "keep", "--label", "a"), "--label a names the column of a table"),
        (("--data", "one.npz"), "cannot be trained on one.npz: one.npz: all samples have the label 1, and nothing can be told"),
        (("--data", "data.npz", "--freeze-until", "x9"), "freeze_until='x9' is no node, and no name or pattern of a weight"),
        (("--data", "infinite.npz"), "cannot be trained on infinite.npz"),
        (("--freeze-until", "head"), "--freeze-until is of a run on data: give --data, or leave it out"),
        (("--data", "data.npz", "--norm", "train"), "--norm is no option of burnish finetune, which --data checks"),
        (("--data", "data.npz", "--probes", "1"), "--probes is for the comparison of gradients: with --data, give --gradients"),
    ],
)
def test_what_cannot_be_trained_says_why(run, folder, arguments, message):
    data = np.load("data.npz")
    np.savez("one.npz", x=data["x"], y=np.ones_like(data["y"]))
    np.savez("infinite.npz", x=np.full_like(data["x"], np.inf), y=data["y"])
    is_usage = message.startswith("--")
    assert message in refused(run("check", "model.onnx", *arguments, code=2 if is_usage else 1))
    if not is_usage:
        found = json.loads(run("check", "model.onnx", *arguments, "--json", code=1).stdout)
        assert found["trainable"] is False
        assert message.rpartition(": ")[2].split(" of a ")[0] in found["reason"] or "cannot be trained" in message


def test_it_takes_the_options_of_finetune_on_what_the_data_are(run, folder):
    """All of them but those on what is evaluated and how images are changed."""
    from burnish.cli.application import app

    commands = typer.main.get_command(app).commands
    has, tuned = ({name for one in commands[name].params for name in one.opts} for name in ("check", "finetune"))
    panels = ("--label", "--label-separator", "--missing", "--columns", "--image-size", "--pixels", "--tokenizer", "--eval-split")
    assert set(panels) <= has & tuned
    rows = ["a,b,value", *(f"{number},{number % 5},{number / 7:.3f}" for number in range(40))]
    (folder / "values.csv").write_text("\n".join(rows))
    onnx.save(burnish.models.create("mlp", classes=1, input_shape=(2,)), "values.onnx")
    found = json.loads(run("check", "values.onnx", "--data", "values.csv", "--label", "value", "--threads", "1", "--json").stdout)
    assert (found["task"]["loss"], found["samples"]["classes"]) == ("mean_squared_error", None)
    assert found["trainable"]


def test_gradients_are_compared_with_data_if_they_are_asked_for(run):
    found = json.loads(run(*CHECK, "--gradients", "--probes", "1", "--json").stdout)
    assert found["gradients"]["agree"] is True
    assert {each["name"] for each in found["gradients"]["tensors"]} >= {"classifier.weight", "classifier.bias"}
    alone = json.loads(run("check", "model.onnx", "--probes", "1", "--json").stdout)
    assert alone["gradients"] == found["gradients"]
    assert set(alone) == {
        "model", "trainable", "reason", "parameters", "tensors", "trains", "agrees_with_file", "comparison", "gradients"
    }  # fmt: skip
    assert alone["agrees_with_file"] is True
    assert json.loads(run("check", "model.onnx", "--no-gradients", "--json").stdout)["gradients"] is None

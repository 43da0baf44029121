"""``burnish evaluate``: what the run itself reported, of a run, its checkpoint and its export; and what it refuses."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from burnish.models import residual_network

TRAIN = ("train", "color.onnx", "--data", "images", "--eval-data", "images", "--threads", "1", "--batch-size", "4", "-o", "run")


@pytest.fixture
def images(folder):
    generator = np.random.default_rng(0)
    for level, name in enumerate(("ant", "bee", "cat")):
        (folder / "images" / name).mkdir(parents=True)
        for index in range(3):
            pixels = generator.integers(60 * level, 60 * level + 90, (7, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{index}.png")
    ir.save(residual_network((3, 4, 4), classes=3, width=2, blocks=(1,)), folder / "color.onnx")
    return folder


@pytest.fixture(scope="module")
def run_folders() -> list[Path]:
    """The folder of the first run, which the others copy."""
    return []


@pytest.fixture
def trained(run, images, run_folders) -> None:
    """Let ``run`` hold a run of its own."""
    if run_folders:
        shutil.copytree(run_folders[0], images / "run")
    else:
        run(*TRAIN)
        run_folders.append(shutil.copytree(images / "run", images / "untouched"))


def figures(path) -> dict[str, float]:
    with path.open(newline="", encoding="utf-8") as file:
        return {row["figure"]: float(row["value"]) for row in csv.DictReader(file)}


def reported(folder) -> dict[str, float]:
    """What the run wrote of its last evaluation."""
    with (folder / "run/metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    return {name.removeprefix("eval_"): float(value) for name, value in last.items() if name.startswith("eval_")}


@pytest.mark.slow
def test_a_run_its_checkpoint_and_its_export_are_as_the_run_reported(run, images):
    run(*TRAIN, "--pixels", "imagenet", "--epochs", "2", "--metrics", "accuracy,top_2,perplexity")
    expected = reported(images)
    assert set(expected) == {"loss", "accuracy", "top_2", "perplexity"}
    run("export", "run", "-o", "unfolded.onnx", "--no-fold")
    for source in ("run", "run/checkpoints/latest.safetensors", "run/tuned.onnx", "unfolded.onnx"):
        text = run("evaluate", source, "images", "-o", "figures.csv", "--batch-size", "2").stdout
        assert "values (pixel / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225] (as recorded with the model)" in text
        found = figures(images / "figures.csv")
        assert found == pytest.approx(expected, rel=2e-5)
        assert f"{found['loss']:.4f}" in text
    for engine in ("torch", "reference"):
        run("evaluate", "run/tuned.onnx", "images", "-o", "figures.csv", "--engine", engine)
        assert figures(images / "figures.csv") == pytest.approx(expected, rel=2e-5)


@pytest.mark.slow
def test_averages_as_the_run_evaluated(run, images):
    run(*TRAIN, "--average", "ema:decay=0.5", "--lr", "0.5")
    run("evaluate", "run", "images", "-o", "average.csv")
    assert figures(images / "average.csv") == pytest.approx(reported(images), rel=1e-5)
    run("evaluate", "run", "images", "--no-average", "-o", "plain.csv")
    assert figures(images / "plain.csv")["loss"] != pytest.approx(reported(images)["loss"], rel=1e-3)


@pytest.mark.slow
def test_a_saved_program_and_one_in_a_file(run, images):
    run("compile", "color.onnx", "-o", "program", "--metrics", "top_2")
    run("compile", "color.onnx", "-o", "program.onnx", "--metrics", "top_2")
    expected = None
    for source in ("program", "program.onnx"):
        run("evaluate", source, "images", "-o", "figures.csv")
        expected = expected or figures(images / "figures.csv")
        assert figures(images / "figures.csv") == expected
    assert set(expected) == {"loss", "top_2"}


def test_a_loss_for_a_file_that_says_none(run, images):
    result = run("evaluate", "color.onnx", "images", code=1)
    assert "the model 'color.onnx' does not say which loss it was trained on: name one" in result.stderr
    text = run(
        "evaluate", "color.onnx", "images", "--loss", "cross_entropy", "--metrics", "accuracy,f1:macro", "-o", "f.csv"
    ).stdout
    assert "classes: ant, bee, cat; the model does not say how its own are called" in text
    assert set(figures(images / "f.csv")) == {"loss", "accuracy", "f1:macro"}


@pytest.mark.slow
def test_a_model_that_cannot_train(run, folder):
    """Nothing is differentiated: a model without weights has a loss too."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 3]))
    node = ir.Node("", "Round", [x])
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = x.type, x.shape
    ir.save(ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}, name="g"), ir_version=9), "round.onnx")
    given = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32) * 3
    np.savez("numbers.npz", x=given, y=np.zeros((7, 3), np.float32))
    run("evaluate", "round.onnx", "numbers.npz", "--loss", "mse", "-o", "f.csv", "--batch-size", "3")
    assert math.isclose(figures(folder / "f.csv")["loss"], np.mean(np.round(given).astype(np.float64) ** 2), rel_tol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("run", "images", "--loss", "mse"), "loss: 'run' is of a program, compiled with its own: leave it out", 1),
        (("run", "images", "--metrics", "top_2"), "metrics: 'run' is of a program", 1),
        (("run", "more"), "more: class 'dog' is not among the classes that are trained: ant, bee, cat", 1),
        (("run", "nothing"), "nothing: no such file or folder", 1),
        (("run", "unlabelled.npz"), "no array 'labels' or 'y' with the labels; the file has 'x' [2, 3, 4, 4]", 1),
        (("run", "unlabelled.npz", "--label", "y"), "--label y names the column of a table", 2),
        (("run", "images/ant/0.png"), "burnish does not read '.png' files", 1),
        (("run", "images", "-o", "f.txt"), "--output f.txt: figures are written as .csv", 2),
        (("run", "images", "--average"), "the program's optimizer keeps no average of them", 1),
        (
            ("run/checkpoints/latest.safetensors", "images", "--best"),
            "is one checkpoint, and best chooses among those of a run",
            1,
        ),
        (("apart.safetensors", "images"), "The program of 'apart.safetensors' is not beside it", 1),
        (("run/program", "images", "--best"), "best: 'run/program' is a program and no run", 1),
        (("four.onnx", "images", "--loss", "cross_entropy"), "takes batches of 4, and 9 samples leave 1 over", 1),
    ],
)
def test_what_is_refused(trained, run, images, arguments, message, code):
    (images / "more/dog").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(images / "more/dog/0.png")
    np.savez("unlabelled.npz", x=np.zeros((2, 3, 4, 4), np.float32))
    (images / "apart.safetensors").write_bytes((images / "run/checkpoints/latest.safetensors").read_bytes())
    four = residual_network((3, 4, 4), classes=3, width=2, blocks=(1,))
    for value in (*four.graph.inputs, *four.graph.outputs):
        value.shape = ir.Shape([4, *value.shape[1:]])
    for node in four.graph:
        for value in node.outputs:
            value.shape = None if value not in four.graph.outputs else value.shape
    ir.save(four, "four.onnx")
    result = run("evaluate", *arguments, code=code)
    assert message in " ".join(result.output.replace("│", " ").split())

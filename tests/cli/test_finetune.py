"""``burnish finetune``: other classes, a frozen backbone, tables, files of one sample, resuming, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.errors import ConfigurationError
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.preparation import transfer
from burnish.finetuning.rates import find_rate
from burnish.importer import load
from burnish.models import residual_network
from burnish.training.callbacks import Callback
from oracles.small_networks import CLASSES, Network, perceptron
from oracles.trained_weights import as_if_trained

Image = pytest.importorskip("PIL.Image")


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_images(folder: Path, classes: tuple[str, ...] = ("cat", "dog", "owl"), each: int = 12) -> None:
    """Noise around a brightness of its own for each class."""
    rng = np.random.default_rng(0)
    for index, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = np.clip(rng.normal(40 + 80 * index, 15, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "net.onnx"
    ir.save(as_if_trained(residual_network(input_shape=(1, 8, 8), classes=10, width=4, blocks=(1, 1))), path)
    return path


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


@pytest.mark.slow
def test_a_folder_of_other_classes(model, tmp_path):
    write_images(tmp_path / "images")
    done = run("finetune", model, "--data", tmp_path / "images", "--epochs", 20, "--output", tmp_path / "run", "--batch-size", 8)
    assert done.exit_code == 0, done.output
    assert "head: 'classifier.weight' is re-initialized for 3 classes; the file had 10" in done.output
    assert "the new head learns 10 times as fast" in done.output
    tuned = onnx.load(tmp_path / "run" / "tuned.onnx")
    assert tuned.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 3
    metadata = {entry.key: entry.value for entry in tuned.metadata_props}
    assert ["cat", "dog", "owl"] in [json.loads(value) for value in metadata.values() if value.startswith("[")]
    assert float(done.output.split("accuracy ")[-1].split()[0]) > 0.9
    predicted = run("predict", tmp_path / "run", tmp_path / "images" / "owl" / "0.png")
    assert predicted.exit_code == 0, predicted.output
    assert "owl" in predicted.output
    again = run(
        "finetune",
        tmp_path / "run" / "tuned.onnx",
        "--data",
        tmp_path / "images",
        "--output",
        tmp_path / "again",
        "--epochs",
        1,
        "--lr",
        0.01,
    )
    assert "stays, as the file's 3 classes are those of the data" in again.output


@pytest.mark.slow
def test_what_is_frozen_keeps_its_bits(model, tmp_path):
    write_images(tmp_path / "images")
    options = ("--data", tmp_path / "images", "--epochs", 2, "--lr", 0.05, "--no-fold")
    done = run("finetune", model, *options, "--freeze-until", "head", "--output", tmp_path / "head")
    assert done.exit_code == 0, done.output
    before, after = weights_of(tmp_path / "head" / "start.onnx"), weights_of(tmp_path / "head" / "tuned.onnx")
    changed = {name for name in before if name in after and not np.array_equal(before[name], after[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    done = run("finetune", model, *options, "--freeze-until", "stage2*", "--output", tmp_path / "stage")
    assert done.exit_code == 0, done.output
    before, after = weights_of(tmp_path / "stage" / "start.onnx"), weights_of(tmp_path / "stage" / "tuned.onnx")
    changed = {name for name in before if name in after and not np.array_equal(before[name], after[name])}
    assert "stage2.block1.first.weight" in changed or any(name.startswith("stage2") for name in changed)
    assert not any(name.startswith(("stem", "stage1")) for name in changed)


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_chose(model, tmp_path):
    write_images(tmp_path / "images")
    options = ("finetune", model, "--data", tmp_path / "images", "--output", tmp_path / "run")
    assert run(*options, "--epochs", 1).exit_code == 0
    chosen = json.loads((tmp_path / "run" / "finetune.json").read_text())
    held = run(*options, "--epochs", 1)
    assert held.exit_code == 1
    assert "holds a run already" in held.output
    resumed = run(*options, "--epochs", 2, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "epoch 2/2" in resumed.output
    assert json.loads((tmp_path / "run" / "finetune.json").read_text()) == chosen


@pytest.mark.slow
def test_a_table_and_a_file_of_one_sample(tmp_path):
    network = Network("one", [6])
    network.graph.inputs[0].shape = ir.Shape([1, 6])
    hidden = network.builder.op("Tanh", network.dense("hidden", network.input, 6, 8))
    ir.save(network.model(network.dense("head", hidden, 8, CLASSES)), tmp_path / "one.onnx")
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 3, 60)
    rows = rng.normal(0, 0.3, (60, 6))
    rows[np.arange(60), kinds] += 2
    lines = [
        "a,b,c,d,e,f,kind",
        *(",".join([*(f"{x:.3f}" for x in row), "rgb"[kind]]) for row, kind in zip(rows, kinds, strict=True)),
    ]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    done = run(
        "finetune",
        tmp_path / "one.onnx",
        "--data",
        tmp_path / "table.csv",
        "--label",
        "kind",
        "--epochs",
        10,
        "--output",
        tmp_path / "run",
        "--batch-size",
        8,
    )
    assert done.exit_code == 0, done.output
    assert "the file takes one sample at a time, and is opened" in done.output
    assert float(done.output.split("accuracy ")[-1].split()[0]) > 0.9


def test_the_learning_rate_is_found_from_the_data():
    """Images a hundred times as bright want a lower one."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((40, 16, 12)).astype(np.float32)
    labels = (images @ rng.standard_normal((12, CLASSES))).argmax(axis=2)
    rates = []
    for scale in (4, 400):
        batches = [{"x": scale * x, "labels": row} for x, row in zip(images, labels, strict=True)]
        network = Network("linear", [12])
        model = network.model(network.dense("head", network.input, 12, CLASSES))
        program = burnish.compile(model, optimizer="sgd:momentum=0.9")
        rates.append(find_rate(program, batches, threads=1)[0])
    assert 0.001 < rates[0] <= 0.25
    assert rates[1] < rates[0] / 20


@pytest.mark.slow
def test_the_head_is_found_among_several_outputs(tmp_path):
    """A file as skl2onnx writes it: labels beside the probabilities, and no option says which are the classes."""
    network = Network("two", [6])
    builder = network.builder
    hidden = builder.op("Relu", network.dense("hidden", network.input, 6, 8))
    probabilities = builder.op("Softmax", network.dense("head", hidden, 8, CLASSES), axis=1)
    model = network.model(probabilities)
    highest = builder.op("ArgMax", probabilities, axis=1, keepdims=0)
    label = builder.op("Gather", builder.constant(np.arange(CLASSES)), highest, axis=0).value
    label.name = "label"
    model.graph.outputs.insert(0, label)
    rng = np.random.default_rng(0)
    count = CLASSES + 2
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((42, 6)).astype(np.float32), y=np.arange(42) % count)
    prepared, _ = transfer(model, tmp_path / "data.npz")
    assert prepared.head.initializers[0] == "head.weight"
    assert prepared.head.output == model.graph.outputs[1].name
    tuned = burnish.finetune(model, tmp_path / "data.npz", output=tmp_path / "tuned.onnx", epochs=1, lr=0.1, threads=1)
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in onnx.load(tuned.path).graph.output]
    assert [len(shape) for shape in shapes] == [1, 2]
    assert shapes[1][1] == count
    session = onnxruntime.InferenceSession(tuned.path, providers=["CPUExecutionProvider"])
    labels, scores = session.run(None, {"x": 10 * rng.standard_normal((200, 6)).astype(np.float32)})
    np.testing.assert_array_equal(labels, scores.argmax(axis=1))
    assert labels.max() >= CLASSES


@pytest.mark.slow
def test_what_is_refused(model, tmp_path):
    write_images(tmp_path / "images")
    missing = run("finetune", model, "--data", tmp_path / "images", "--freeze-until", "stage9*", "--output", tmp_path / "a")
    assert missing.exit_code == 1
    said = " ".join(missing.output.split())
    assert "freeze_until='stage9*' is no node, and no name or pattern of a weight" in said
    assert "or one of these" in said or "give 'head', or a weight, such as '" in said
    nothing = run("finetune", model, "--data", tmp_path / "images", "--output", tmp_path / "b", "--resume")
    assert nothing.exit_code == 1
    assert "holds no run of burnish finetune that can go on" in " ".join(nothing.output.split())
    shutil.copytree(min((tmp_path / "images").iterdir()), tmp_path / "one" / "cats")
    alone = run("finetune", model, "--data", tmp_path / "one", "--output", tmp_path / "d")
    assert alone.exit_code == 1
    assert "all samples have the class 'cats', and nothing can be told apart" in " ".join(alone.output.split())
    network = Network("headless", [1, 8, 8])
    ir.save(network.model(network.builder.op("Relu", network.input)), tmp_path / "headless.onnx")
    headless = run("finetune", tmp_path / "headless.onnx", "--data", tmp_path / "images", "--output", tmp_path / "c")
    assert headless.exit_code == 1
    assert "has weights: give the output of a classifier" in " ".join(headless.output.split())


@pytest.mark.slow
def test_the_same_in_python(tmp_path):
    write_images(tmp_path / "images", ("no", "yes"))
    source = load(as_if_trained(residual_network(input_shape=(1, 8, 8), classes=10, width=4, blocks=(1, 1))))
    prepared, dataset = transfer(source, tmp_path / "images")
    assert (prepared.head.classes, prepared.is_new, len(dataset)) == (2, True, 24)
    assert prepared.groups() == {"classifier.weight": {"lr_scale": 10.0}, "classifier.bias": {"lr_scale": 10.0}}
    program = burnish.compile(prepared.model, optimizer=prepared.optimizer(0.01))
    with burnish.Session(program) as session:
        assert np.isfinite(session.step(dataset.batch(np.arange(8)))["loss"])
    mixing, _ = transfer(source, tmp_path / "images", FinetuneOptions(augment="flip,mixup:0.3"))
    assert (prepared.task.loss.name, mixing.task.loss.mixup) == ("cross_entropy", 0.3)
    alone, _ = transfer(perceptron(), _arrays(tmp_path), FinetuneOptions(freeze_until="head"))
    assert set(alone.groups().values()) == {"frozen"}


@pytest.mark.slow
def test_one_call_tunes_and_writes(tmp_path):
    write_images(tmp_path / "images", ("no", "yes"))
    source = as_if_trained(residual_network(input_shape=(1, 8, 8), classes=10, width=4, blocks=(1, 1)))
    tuned = burnish.finetune(
        source, tmp_path / "images", eval_data=tmp_path / "images", output=tmp_path / "tuned.onnx", epochs=10, batch_size=8
    )
    assert tuned.result.best["value"] > 0.9
    assert [note.partition(":")[0] for note in tuned.notes] == ["head", "rates", "lr", "schedule"]
    assert onnx.load(tuned.path).graph.output[0].type.tensor_type.shape.dim[1].dim_value == 2


@pytest.mark.slow
def test_callbacks_are_told_and_unknown_options_named(tmp_path):
    class Told(Callback):
        def __init__(self):
            self.epochs = []

        def on_epoch_end(self, run, report):
            self.epochs.append(report.epoch)

    told, data = Told(), _arrays(tmp_path)
    options = {"output": tmp_path / "tuned.onnx", "lr": 0.01, "threads": 1}
    burnish.finetune(perceptron(), data, epochs=2, unfreeze=[1], callbacks=[told], **options)
    assert told.epochs == [1, 1]  # each stage is a run of its own
    with pytest.raises(
        ConfigurationError,
        match=r"finetune has no option 'epoch' \(did you mean 'epochs'\?\): see help\(burnish.finetune\).*use burnish.Trainer",
    ):
        burnish.finetune(perceptron(), data, epoch=2, **options)


def _arrays(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=rng.standard_normal((20, 12)).astype(np.float32), y=rng.integers(0, 3, 20))
    return folder / "data.npz"


@pytest.mark.slow
def test_mixing_is_part_of_the_loss(model, tmp_path):
    write_images(tmp_path / "images", each=8)
    options = ("--epochs", 1, "--lr", 0.01, "--threads", 1, "--batch-size", 8, "--augment", "flip,mixup:0.3,cutmix")
    done = run("finetune", model, "--data", tmp_path / "images", *options, "--output", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "augment: MixUp with alpha 0.3, CutMix with alpha 1, in the graph" in " ".join(done.output.split())
    program = burnish.Program.load(tmp_path / "run" / "program")
    loss = program.options["loss"]
    assert (loss["name"], loss["mixup"], loss["cutmix"], loss["loss"]["name"]) == ("mixed", 0.3, 1.0, "cross_entropy")
    assert "evaluation" not in done.output
    again = burnish.finetune(
        *(model, tmp_path / "images"), output=tmp_path / "b.onnx", epochs=1, lr=0.01, threads=1, batch_size=8, augment="mixup:0.3"
    )
    assert "augment: MixUp with alpha 0.3, in the graph" in again.notes
    assert "accuracy" in again.result.metrics

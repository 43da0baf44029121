"""Fine-tuning in stages: gradual unfreezing, features computed once, batch, schedule, early stopping, and the best epoch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import typer
from onnx import numpy_helper
from typer.testing import CliRunner

import burnish
from burnish import losses
from burnish.cli.application import app
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.train_options import Course, Data, Results, Watching
from burnish.cli.tuning_run import TuningRun
from burnish.errors import ConfigurationError
from burnish.finetuning import planning
from burnish.finetuning.choices import Choices, ChosenStage
from burnish.finetuning.options import FinetuneOptions
from burnish.finetuning.planning import Stage, compiled, plan
from burnish.finetuning.preparation import transfer
from burnish.models import residual_network
from oracles import layers_in_bodies
from oracles.small_networks import Network
from oracles.trained_weights import as_if_trained


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A file of ten classes, and data of three, each with a brightness of its own."""
    folder = tmp_path_factory.mktemp("files")
    ir.save(as_if_trained(residual_network(input_shape=(1, 8, 8), classes=10, width=4, blocks=(1, 1))), folder / "net.onnx")
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 3
    x = rng.normal(labels[:, None, None, None] - 1, 0.3, (48, 1, 8, 8)).astype(np.float32)
    np.savez(folder / "data.npz", x=x[:36], y=labels[:36])
    np.savez(folder / "held.npz", x=x[36:], y=labels[36:])
    return folder


def weights_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def changed(before: Path, after: Path) -> set[str]:
    one, other = weights_of(before), weights_of(after)
    assert one.keys() <= other.keys()
    return {name for name in one if not np.array_equal(one[name], other[name])}


@pytest.fixture(scope="module")
def gradual(files, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("gradual") / "run"
    options = ("--unfreeze", "1,2", "--epochs", 3, "--lr", 0.05, "--no-fold", "--layer-decay", 0.9, "--threads", 1)
    said = run("finetune", files / "net.onnx", "--data", files / "data.npz", "--output", folder, *options)
    return folder, said


@pytest.mark.slow
def test_layers_follow_from_the_head_to_the_front(gradual):
    folder, said = gradual
    assert "stages: the head alone for 1 of 3 epochs, then 1 with 3, then 1 with 6 of 6 layers before it" in said
    assert "rates: 0.9 times that from each layer to the one before it" in said
    assert said.count("features: computed once for 36 samples") == 2
    assert said.count("that had not trained yet come from the start model; ") == 2
    assert "taken over in part" not in said
    assert "opt/" in "".join(json.loads((folder / "run.json").read_text())["carried_over"])
    first = changed(folder / "start.onnx", folder / "stages" / "1" / "tuned.onnx")
    assert first == {"classifier.weight", "classifier.bias"}
    second = changed(folder / "start.onnx", folder / "stages" / "2" / "tuned.onnx")
    assert first < second
    assert all(name.startswith(("classifier", "stage2", "stage1.block1.second")) for name in second), second
    assert any(name.endswith("running_mean") for name in second)
    assert not any(name.startswith("stem") for name in second)
    last = changed(folder / "start.onnx", folder / "tuned.onnx")
    assert "stem.convolution.weight" in last
    choices = json.loads((folder / "finetune.json").read_text())
    assert [stage["cached"] for stage in choices["stages"]] == [True, True, False]


@pytest.mark.slow
def test_a_run_goes_on_in_the_stage_where_it_stopped(files, gradual, tmp_path):
    folder, _ = gradual
    again = tmp_path / "again"
    shutil.copytree(folder, again)
    shutil.rmtree(again / "checkpoints")
    (again / "tuned.onnx").unlink()
    options = ("--unfreeze", "1,2", "--epochs", 3, "--no-fold", "--layer-decay", 0.9, "--threads", 1, "--resume")
    said = run("finetune", files / "net.onnx", "--data", files / "data.npz", "--output", again, *options)
    assert said.count("already finished") == 2
    assert changed(folder / "tuned.onnx", again / "tuned.onnx") == set()


@pytest.mark.slow
def test_a_run_goes_on_within_a_later_stage_and_exports_the_best_of_all(files, monkeypatch, tmp_path):
    """Its schedule begins after the steps of the stages before, as it did; the epoch that was best is an earlier stage's."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    data = ("--data", files / "data.npz", "--eval-data", files / "held.npz")
    options = ("--unfreeze", "1", "--epochs", 2, "--lr", 0.05, "--threads", 1, "--no-fold", "--log", "tensorboard")
    often = ("--checkpoint-every", 2, "--keep-checkpoints", 9)
    run("finetune", files / "net.onnx", *data, "--output", whole, *options, *often)
    assert (whole / "events").is_dir()
    assert (whole / "stages" / "1" / "events").is_dir()
    shutil.copytree(whole, again)
    (again / "tuned.onnx").unlink()
    for path in (again / "checkpoints").glob("*.safetensors"):
        if path.name != "step-00000007.safetensors":
            path.unlink()
    run("finetune", files / "net.onnx", *data, "--output", again, *options, *often, "--resume")
    assert changed(whole / "tuned.onnx", again / "tuned.onnx") == set()

    best = {"epoch": 1, "metric": "accuracy", "value": 2.0}  # better than any
    monkeypatch.setattr("burnish.cli.training_run.best_of", lambda folder: best)
    said = run("finetune", files / "net.onnx", *data, "--output", whole, *options, "--resume", "--report", whole / "r.html")
    assert "tuned.onnx: the state after epoch 1 of stage 1, the best of all stages" in said
    assert changed(whole / "stages" / "1" / "tuned.onnx", whole / "tuned.onnx") == set()
    metadata = {entry.key: entry.value for entry in onnx.load(whole / "tuned.onnx").metadata_props}
    assert json.loads(metadata["burnish.metrics"]) == {"data": "evaluation", "epoch": 1, "accuracy": 2.0, "stage": 1}
    page = (whole / "r.html").read_text()
    assert "by the state after epoch 1 of stage 1, the best of all stages" in page
    assert "best accuracy, epoch 1<" in page
    # What is said of the run is said of the file that it exported.
    figures = run("evaluate", whole, files / "held.npz").partition("figure")[2]
    assert figures == run("evaluate", whole / "tuned.onnx", files / "held.npz").partition("figure")[2]
    assert "latest state" in run("evaluate", whole, files / "held.npz", "--latest")


def test_stages_that_train_all_layers_stop_early_the_last_is_reported_and_all_are_profiled(monkeypatch, tmp_path):
    """Without training: how each stage is begun."""
    begun = []

    class Begun:
        def __init__(self, model, *arguments, **options):
            self.tuned = model
            begun.append((model, arguments, options))

        def train(self):
            return object()

    monkeypatch.setattr("burnish.cli.tuning_run.TrainingRun", Begun)
    stages = (ChosenStage(1, False, {}), ChosenStage(1, False, {}), ChosenStage(1, False, {}, True))
    loss = losses.get("cross_entropy")
    given = {"model": "", "samples": 8, "layer_decay": None, "loss": loss.options(), "metrics": (), "head": (), "batch": None}
    chosen = {"lr": 0.1, "schedule": "constant", "batch_size": 8, "kind": "classes", "outputs": "logits", "quantize": "int8"}
    chosen["optimizer"] = "sgd:momentum=0.9"
    choices = Choices(**given, **chosen, stages=stages)
    command = typer.Context(typer.main.get_command(app), info_name="finetune")
    command.meta["burnish.arguments"] = ()
    options = Data(data="data.npz"), Pixels(), TextOptions(), Course(epochs=2), Results(folder=tmp_path)
    watching = Watching(report=tmp_path / "r.html", tensorboard=tmp_path / "events", profile=True)
    tuning = TuningRun(tmp_path, False, command, *options, watching, 3, (), "burnish finetune --resume here")
    for number, stage in enumerate(stages):
        tuning.train(choices, number, tmp_path / "quantized.onnx" if stage.quantized else None, loss)
    watched = [next(value for value in arguments if isinstance(value, Watching)) for _, arguments, _ in begun]
    assert [value.tensorboard for value in watched] == [tmp_path / "events" / f"stage-{number}" for number in (1, 2, 3)]
    assert [(value.report is not None, value.profile) for value in watched] == [(False, True), (False, True), (True, True)]
    callbacks = [next(value for value in reversed(arguments) if isinstance(value, list)) for _, arguments, _ in begun]
    assert [[type(each).__name__ for each in those] for those in callbacks] == [[], ["EarlyStopping"], ["EarlyStopping"]]
    assert [given["best_of_all"] for _, _, given in begun] == [False, True, False]
    assert [[folder.name for folder in given["earlier"]] for _, _, given in begun] == [[], ["1"], ["1", "2"]]


@pytest.mark.slow
def test_the_same_in_python(files, tmp_path):
    tuned = burnish.finetune(
        files / "net.onnx",
        files / "data.npz",
        eval_data=files / "held.npz",
        output=tmp_path / "tuned.onnx",
        epochs=6,
        unfreeze="gradual",
        lr=0.05,
        threads=1,
    )
    kinds = [note.partition(":")[0] for note in tuned.notes]
    assert kinds == ["head", "rates", "stages", "batch 8", "schedule"]
    assert (
        "schedule: cosine over 5, then 5, then 5, then 15 steps, after a rise over 0, then 0, then 0, then 1 of them"
        in tuned.notes
    )
    figures = json.loads({entry.key: entry.value for entry in onnx.load(tuned.path).metadata_props}["burnish.metrics"])
    assert figures["data"] == "evaluation"
    assert figures["accuracy"] == tuned.result.best["value"]
    assert figures["accuracy"] >= 0.75
    assert figures["epoch"] == tuned.result.best["epoch"]


@pytest.mark.slow
def test_the_head_alone_trains_from_features(files, tmp_path):
    """The same losses with and without: the head is all that differs."""
    options = ("--data", files / "data.npz", "--freeze-until", "head", "--epochs", 3, "--lr", 0.1, "--threads", 1, "--no-fold")
    said = run("finetune", files / "net.onnx", *options, "--output", tmp_path / "once")
    assert "features: computed once for 36 samples" in said
    said = run("finetune", files / "net.onnx", *options, "--output", tmp_path / "each", "--no-cached-features")
    assert "features" not in said
    once, each = weights_of(tmp_path / "once" / "tuned.onnx"), weights_of(tmp_path / "each" / "tuned.onnx")
    assert once.keys() == each.keys()
    for name in once:
        np.testing.assert_allclose(once[name], each[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert changed(tmp_path / "once" / "start.onnx", tmp_path / "once" / "tuned.onnx") == {"classifier.weight", "classifier.bias"}
    evaluated = run("evaluate", tmp_path / "once", files / "held.npz")
    assert "accuracy" in evaluated


@pytest.mark.slow
def test_it_stops_early_and_writes_the_best_epoch(files, tmp_path):
    """At such a rate the loss only rises."""
    data = ("--data", files / "data.npz", "--eval-data", files / "held.npz", "--output", tmp_path / "run")
    options = ("--lr", 30, "--schedule", "constant", "--patience", 2, "--epochs", 12, "--threads", 1, "--freeze-until", "head")
    said = run("finetune", files / "net.onnx", *data, *options)
    assert "stopped after" in said
    assert "schedule" not in said
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert len(rows) < 12 * 10
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "run" / "tuned.onnx").metadata_props}
    figures = json.loads(metadata["burnish.metrics"])
    assert f"tuned.onnx: the state after epoch {figures['epoch']}, the best" in said
    evaluated = run("evaluate", tmp_path / "run" / "tuned.onnx", files / "held.npz")
    assert f"accuracy {figures['accuracy']:.4f}" in evaluated or f"{figures['accuracy']:.4f}" in evaluated


@pytest.mark.slow
def test_a_batch_fits_the_data_and_the_memory(files, monkeypatch):
    prepared, dataset = transfer(files / "net.onnx", files / "data.npz")
    program = compiled(prepared, Stage((), 1), 0.1)
    samples = dataset.batch(np.arange(1))
    monkeypatch.setattr(planning, "available_memory", lambda: 4 << 30)
    size, why = planning.chosen_batch(program, samples, 10_000)
    assert size == 32
    assert why.startswith("batch 32: the step's planned peak is ")
    assert why.endswith(" MB of 4.3 GB free")
    assert planning.chosen_batch(program, samples, 36)[0] == 8
    peaks = {size: planning.planned_peak(program.semantic["grad"], size).bytes for size in (4, 8)}
    monkeypatch.setattr(planning, "available_memory", lambda: peaks[4] + peaks[8])
    size, why = planning.chosen_batch(program, samples, 10_000)
    assert (size, "as more would not fit" in why) == (4, True)
    monkeypatch.setattr(planning, "available_memory", lambda: None)
    assert "free" not in planning.chosen_batch(program, samples, 10_000)[1]
    network = Network("fixed", [12])
    network.graph.inputs[0].shape = ir.Shape([6, 12])
    fixed = burnish.compile(network.model(network.dense("head", network.input, 12, 3)))
    assert planning.chosen_batch(fixed, samples, 100) == (6, "batch 6: the model takes no other")


def test_what_cannot_be_planned_is_refused(files):
    prepared, dataset = transfer(files / "net.onnx", files / "data.npz")
    for unfreeze in ([0], [2, 1], [3], "slow", []):
        with pytest.raises(ConfigurationError, match=r"unfreeze=.*: give 'gradual', with two epochs or more, or the epochs"):
            plan(prepared, dataset, FinetuneOptions(epochs=3, lr=0.1, batch_size=8, unfreeze=unfreeze))
    with pytest.raises(ConfigurationError, match="7 parts, and there are 6 layers before the head"):
        plan(prepared, dataset, FinetuneOptions(epochs=9, lr=0.1, batch_size=8, unfreeze=range(1, 8)))
    with pytest.raises(ConfigurationError, match="give a whole number of 1 or more"):
        plan(prepared, dataset, FinetuneOptions(epochs=0, lr=0.1))
    alone, _ = transfer(files / "net.onnx", files / "data.npz", FinetuneOptions(freeze_until="head"))
    with pytest.raises(ConfigurationError, match="nothing before the head is to train"):
        plan(alone, dataset, FinetuneOptions(epochs=3, unfreeze="gradual"))


@pytest.mark.slow
def test_weights_that_bodies_read_stand_before_the_head():
    model, arrays = layers_in_bodies.model("scanned"), layers_in_bodies.batch("scanned", 24)
    before = {"first_weight", "input_weight", "hidden_weight"}
    alone, _ = transfer(model, arrays, FinetuneOptions(freeze_until="head"))
    assert set(alone.frozen) == before
    prepared, _ = transfer(model, arrays)
    assert {name for layer in prepared.layers for name in layer} == before
    inner, _ = transfer(model, arrays, FinetuneOptions(freeze_until="hidden_weight"))
    assert set(inner.frozen) == {"first_weight", "input_weight"}
    place = next(node.name for body in burnish.load(model).graph.subgraphs() for node in body if node.op_type == "Add")
    assert set(transfer(model, arrays, FinetuneOptions(freeze_until=place))[0].frozen) == before


def test_a_weight_that_is_transposed_ahead_of_all_else_is_read_where_it_meets_the_data():
    model, arrays = layers_in_bodies.model("scanned"), layers_in_bodies.batch("scanned", 24)
    scan = next(node for node in model.graph.node if node.op_type == "Scan")
    body = next(attribute.g for attribute in scan.attribute if attribute.name == "body")
    reader = next(node for node in body.node if "input_weight" in node.input)
    reader.input[1] = "turned"
    model.graph.node.insert(0, onnx.helper.make_node("Transpose", ["input_weight"], ["turned"], perm=[1, 0]))
    assert set(transfer(model, arrays, FinetuneOptions(freeze_until="input_weight"))[0].frozen) == {"first_weight"}
    assert set(transfer(model, arrays, FinetuneOptions(freeze_until="head"))[0].frozen) == {
        "first_weight",
        "input_weight",
        "hidden_weight",
    }

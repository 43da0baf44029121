"""``burnish finetune --quantize`` and ``burnish.finetune(quantize=...)``: integers in the tuned file, and what they cost."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest

import burnish
from burnish import losses
from burnish.errors import ConfigurationError
from burnish.finetuning.quantization import Quantization

OPTIONS = ("--epochs", "2", "--lr", "0.05", "--threads", "1", "--batch-size", "10")


def accuracy(path, data) -> float:
    """The share that stock ONNX Runtime classifies right."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {session.get_inputs()[0].name: data["x"][:, None]})
    return float((logits.argmax(axis=1) == data["y"]).mean())


@pytest.mark.slow
def test_a_run_ends_in_integers_and_says_what_they_cost(run, folder) -> None:
    done = run("finetune", "model.onnx", "--data", "data.npz", *OPTIONS, "--quantize", "int4:epochs=1", "-o", "out")
    said = " ".join(done.output.split())
    assert "out/quantized.onnx: int4 per channel" in said
    figures = json.loads((folder / "out/quantization.json").read_text())
    files = {"float32": "out/stages/1/tuned.onnx", "quantized_in_training": "out/tuned.onnx"}
    data = np.load("data.npz")
    assert {name: accuracy(path, data) for name, path in files.items()} == {name: figures[name] for name in files}
    shown = [f"{100 * figures[name]:.2f} %" for name in ("float32", "quantized_after_training", "quantized_in_training")]
    assert f"accuracy {shown[0]} in float32, {shown[1]} quantized after training, {shown[2]} quantized in training" in said
    kinds = {tensor.name: tensor.data_type for tensor in onnx.load("out/tuned.onnx").graph.initializer if len(tensor.dims) > 1}
    assert {onnx.TensorProto.INT4, onnx.TensorProto.INT8} <= set(kinds.values())  # the first and the last layer have 8 bits
    assert onnx.TensorProto.FLOAT not in kinds.values()

    trained_on = json.loads({entry.key: entry.value for entry in onnx.load("out/tuned.onnx").metadata_props}["burnish.objective"])
    assert trained_on["loss"]["name"] == "cross_entropy"  # the teacher need not go where the file goes
    loss = burnish.Program.load("out/program").options["loss"]
    assert (loss["name"], loss["teacher"]) == ("distill", "out/stages/1/tuned.onnx")


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_its_integers(run, folder) -> None:
    run("finetune", "model.onnx", "--data", "data.npz", *OPTIONS, "--quantize", "int8:epochs=1", "-o", "out")
    figures, quantized = (folder / "out/quantization.json").read_text(), (folder / "out/quantized.onnx").read_bytes()
    resumed = run("finetune", "model.onnx", "--data", "data.npz", *OPTIONS, "--resume", "-o", "out")
    assert "quantization: accuracy" in resumed.output
    assert (folder / "out/quantization.json").read_text() == figures
    assert (folder / "out/quantized.onnx").read_bytes() == quantized


@pytest.mark.slow
def test_frozen_weights_stay_and_python_does_the_same(folder) -> None:
    arguments = {"epochs": 2, "lr": 0.05, "batch_size": 10, "threads": 1, "freeze_until": "head"}
    tuned = burnish.finetune("model.onnx", "data.npz", output="int8.onnx", quantize="int8:rate=0.5", **arguments)
    assert list(tuned.accuracies) == ["float32", "quantized_after_training", "quantized_in_training"]
    assert tuned.accuracies["quantized_in_training"] == accuracy("int8.onnx", np.load("data.npz"))
    assert tuned.notes[-1].startswith("quantization: accuracy")
    again = burnish.finetune("model.onnx", "data.npz", output="float.onnx", **arguments)
    assert again.accuracies == {}


@pytest.mark.parametrize(
    ("asked", "epochs", "rate"),
    [
        ("int8", 2, 0.1),
        ("int4", 5, 0.3),
        ({"weights": "int4 blocks of 32"}, 5, 0.3),
        ("int4:epochs=1,rate=0.5", 1, 0.5),
        ({"weights": "int4"}, 5, 0.1),
    ],
)
def test_four_bits_train_as_long_as_the_run(asked, epochs, rate) -> None:
    integers = Quantization.read(asked)
    assert (integers.length(5), integers.rate) == (epochs, rate)


def test_classes_are_learnt_of_the_tuned_model_too() -> None:
    loss, other = losses.get("cross_entropy"), losses.get("mse")
    taught = Quantization.read("int8").objective(loss, "float32.onnx", "logits")
    assert taught == losses.distill("float32.onnx", temperature=4, alpha=0.9, loss=loss, teacher_output="logits")
    assert Quantization.read("int4:distill=0.5").objective(loss, "float32.onnx", ["logits"]).alpha == 0.5
    assert Quantization.read("int8:distill=0").objective(loss, "float32.onnx", "logits") is loss
    mixed = losses.mixed(mixup=0.2)
    for untaught in (other, mixed):
        assert Quantization.read("int8").objective(untaught, "float32.onnx", "logits") is untaught
    with pytest.raises(ConfigurationError, match="distill: the tuned model says nothing of mixed samples: leave distill out"):
        Quantization.read("int8:distill=0.5").objective(mixed, "float32.onnx", "logits")
    with pytest.raises(
        ConfigurationError, match="a student learns the probabilities of classes, and the loss mean_squared_error reads no"
    ):
        Quantization.read("int8:distill=0.5").objective(other, "float32.onnx", "logits")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("int9", r"quantize='int9': there is no such form \(did you mean 'int8'\?\): give int8 or int4"),
        ("int8:epochs=0", "quantize: epochs=0: give a whole number of 1 or more"),
        ("int8:rate=0", "quantize: rate=0: give a factor of the learning rate above 0"),
        ("int8:distill=2", "quantize: distill=2: give the part of the loss that is what the tuned model says, from 0 to 1"),
        ("int8:methd=entropy", r"quantize has no option 'methd' \(did you mean 'method'\?\)"),
        ({"weights": "int3"}, "quantize: weights='int3' is no format"),
        ({"calibration": []}, "quantize: calibration is the run's own: leave it out"),
    ],
)
def test_what_cannot_be_quantized_is_refused(asked, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Quantization.read(asked)


def test_integers_and_adapters_are_two_runs(run, folder) -> None:
    refused = run("finetune", "model.onnx", "--data", "data.npz", "--quantize", "int8", "--adapter", "lora", code=1)
    assert "tune with adapters first, and give the tuned file" in " ".join(refused.output.split())


@pytest.mark.slow
def test_a_model_that_is_quantized_already_is_refused_before_it_is_tuned(run, folder) -> None:
    """Whether its head is quantized or not, in one message each."""
    data = {"x": np.load("data.npz")["x"][:, None]}
    for number, (skip, message) in enumerate(
        [((), "is quantized already. Give the model in float32"), (["classifier*"], "it is quantized already")]
    ):
        quantized = burnish.surgery.quantize("model.onnx", calibration=[data], skip=skip)
        burnish.Session(burnish.compile(quantized)).export(f"{number}.onnx")
        refused = run("finetune", f"{number}.onnx", "--data", "data.npz", *OPTIONS, "--quantize", "int8", "-o", "out", code=1)
        assert message in " ".join(refused.output.split())
        assert not (folder / "out").exists()

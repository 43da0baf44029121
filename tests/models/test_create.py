"""The models to start with: valid ONNX with an open batch, the same bits for the same seed; each learns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import burnish
from burnish.errors import ConfigurationError
from burnish.models import create
from burnish.program import Role

CLASSES, SAMPLES = 3, 24
SHAPES = {"mlp": (4, 2), "cnn": (1, 6, 5), "resnet": (3, 8, 8), "unet": (1, 16, 8), "transformer": (6,), "lstm": (5, 2)}
VOCABULARY = 20


def model(name: str, seed: int = 0) -> onnx.ModelProto:
    vocabulary = VOCABULARY if name == "transformer" else None
    return create(name, classes=CLASSES, input_shape=SHAPES[name], seed=seed, vocabulary=vocabulary)


def batch_of(name: str) -> dict[str, np.ndarray]:
    """Samples whose class one can see: in the mean of their numbers, or in their second token."""
    rng = np.random.default_rng(0)
    labels = np.arange(SAMPLES) % CLASSES
    if name == "transformer":
        tokens = rng.integers(CLASSES, VOCABULARY, (SAMPLES, *SHAPES[name]))
        tokens[:, 1] = labels
        return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "labels": labels}
    shape = (SAMPLES, *SHAPES[name])
    if name == "unet":
        labels = rng.integers(0, CLASSES, (SAMPLES, *SHAPES[name][1:]))
    means = labels[:, None] if name == "unet" else labels.reshape(-1, *(1 for _ in SHAPES[name]))
    return {"x": (means + 0.5 * rng.normal(size=shape)).astype(np.float32), "labels": labels}


@pytest.mark.parametrize("name", SHAPES)
def test_each_model_learns_and_is_exported(name, tmp_path):
    created = model(name)
    onnx.checker.check_model(created, full_check=True)
    batch = batch_of(name)
    session = burnish.Session(burnish.compile(created, optimizer=burnish.optim.adam(lr=0.01)), threads=1)
    losses = [session.step(batch)["loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(CLASSES), rel=0.35)
    assert losses[-1] < 0.7 * losses[0]
    session.export(tmp_path / "tuned.onnx")
    onnx.checker.check_model(tmp_path / "tuned.onnx", full_check=True)
    inputs = {name: array for name, array in batch.items() if name != "labels"}
    expected = session.predict(inputs)["logits"]
    assert expected.shape == (SAMPLES, CLASSES, *batch["labels"].shape[1:])
    tuned = onnxruntime.InferenceSession(tmp_path / "tuned.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(tuned.run(["logits"], inputs)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_follow_the_seed_and_the_batch_is_open(name):
    assert model(name, 1).SerializeToString(deterministic=True) == model(name, 1).SerializeToString(deterministic=True)
    first, second = ({tensor.name: tensor.raw_data for tensor in model(name, seed).graph.initializer} for seed in (1, 2))
    assert first.keys() == second.keys()
    assert any(first[weight] != second[weight] for weight in first)
    values = [*model(name).graph.input, *model(name).graph.output]
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in values] == ["batch"] * len(values)
    assert "classifier.weight" in first


def test_the_lstm_computes_what_the_same_pytorch_network_computes():
    created = model("lstm")
    weights = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()) for tensor in created.graph.initializer}
    width = weights["classifier.weight"].shape[1]
    lstm = torch.nn.LSTM(SHAPES["lstm"][1], width, batch_first=True)

    def in_order(rows: torch.Tensor) -> torch.Tensor:
        """From the gates' order of ONNX (input, output, forget, cell) to PyTorch's (input, forget, cell, output)."""
        gates = rows.reshape(4, width, -1)[[0, 2, 3, 1]]
        return gates.reshape(4 * width, -1).squeeze(-1)

    biases = weights["lstm.bias"][0].split(4 * width)
    arrays = (weights["lstm.weight"][0], weights["lstm.recurrent_weight"][0], *biases)
    with torch.no_grad():
        for parameter, array in zip(lstm.parameters(), arrays, strict=True):
            parameter.copy_(in_order(array))
    x = batch_of("lstm")["x"]
    last = lstm(torch.from_numpy(x))[0][:, -1]
    wanted = torch.nn.functional.linear(last, weights["classifier.weight"], weights["classifier.bias"])
    logits = burnish.Session(burnish.compile(created), threads=1).predict({"x": x})["logits"]
    np.testing.assert_allclose(logits, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_small_image_is_pooled_as_far_as_it_goes():
    created = create("cnn", classes=2, input_shape=(1, 1, 9))
    onnx.checker.check_model(created, full_check=True)
    logits = burnish.Session(burnish.compile(created), threads=1).predict({"x": np.zeros((2, 1, 1, 9), np.float32)})["logits"]
    assert logits.shape == (2, 2)


def test_a_decoder_has_a_score_for_each_token_and_learns():
    created = create("gpt", input_shape=(6,), vocabulary=VOCABULARY, seed=1)
    onnx.checker.check_model(created, full_check=True)
    session = burnish.Session(burnish.compile(created, loss="cross_entropy:class_axis=-1", optimizer="adam:lr=0.01"), threads=1)
    tokens = np.arange(24).reshape(4, 6) % VOCABULARY
    losses = [session.step({"input_ids": tokens, "labels": (tokens + 1) % VOCABULARY})["loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(np.log(VOCABULARY), rel=0.1)
    assert losses[-1] < 0.7 * losses[0]


def test_the_detector_learns_by_the_loss_that_its_metadata_name(tmp_path):
    created = create("ssd", classes=CLASSES, input_shape=(3, 16, 24), seed=1)
    onnx.checker.check_model(created, full_check=True)
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in created.graph.output] == ["batch", "batch"]
    recorded = json.loads(next(entry.value for entry in created.metadata_props if entry.key == "burnish.objective"))
    assert (recorded["outputs"], recorded["loss"]["grids"]) == (["boxes", "scores"], [[4, 6], [2, 3]])
    program = burnish.compile(created, loss=recorded["loss"], outputs=["boxes", "scores"], optimizer=burnish.optim.adam(lr=0.01))
    rng = np.random.default_rng(0)
    boxes = np.array([[0.1, 0.1, 0.5, 0.6], [0.5, 0.4, 0.9, 0.9]], np.float32)[np.arange(8) % 2][:, None]
    batch = {"x": rng.random((8, 3, 16, 24), np.float32), "boxes": boxes, "labels": np.arange(8)[:, None] % 2}
    names = {entry.name: entry.name.rpartition("/")[2] for entry in program.signature["step"].inputs_of(Role.LABEL)}
    session = burnish.Session(program, threads=1)
    losses = [session.step({"x": batch["x"], **{name: batch[short] for name, short in names.items()}})["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    session.export(tmp_path / "tuned.onnx")
    tuned = onnxruntime.InferenceSession(tmp_path / "tuned.onnx", providers=["CPUExecutionProvider"])
    shapes = [array.shape for array in tuned.run(["boxes", "scores"], {"x": batch["x"]})]
    assert shapes == [(8, 4 * 30, 4), (8, 4 * 30, 1 + CLASSES)]


IMAGE = (3, 16, 16)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resnet50", {}, "name must be 'mlp', 'cnn', 'resnet', 'unet', 'ssd', 'transformer', 'gpt' or 'lstm', not 'resnet50'"),
        ("cnn", {"classes": 0}, "cnn: classes must be a whole number from 1 to 1,048,576, not 0"),
        ("cnn", {"classes": 2.5}, "cnn: classes must be a whole number from 1 to 1,048,576, not 2.5"),
        ("cnn", {"classes": 2**40}, "cnn: classes must be a whole number from 1 to 1,048,576"),
        ("cnn", {"input_shape": (64, 64)}, r"cnn: input_shape=\(64, 64\) has 2 dimensions; give \(channels, height, width\)"),
        ("cnn", {"input_shape": "3x64x64"}, r"cnn: input_shape='3x64x64' is not the shape of a sample; give \(channels, "),
        ("cnn", {"input_shape": 64}, r"cnn: input_shape=64 is not the shape of a sample; give \(channels, height, width\)"),
        ("resnet", {"input_shape": (3, 0, 8)}, "height in input_shape must be a whole number from 1 to 1,048,576, not 0"),
        ("unet", {"input_shape": (3, 60, 64)}, "the height 60 is no multiple of 8, as it is halved 3 times; give 64"),
        ("ssd", {"input_shape": (3, 64, 60)}, "the width 60 is no multiple of 8, as it is halved 3 times; give 64"),
        ("mlp", {"input_shape": ()}, r"mlp: input_shape=\(\) has 0 dimensions; give \(features,\)"),
        ("mlp", {"input_shape": 4}, r"mlp: input_shape=4 is not the shape of a sample; give \(features,\)"),
        ("mlp", {"input_shape": (3, 4000, 4000)}, "mlp: input_shape must be of at most 1,048,576 values"),
        ("transformer", {}, r"transformer: input_shape=\(3, 16, 16\) has 3 dimensions; give \(length,\)"),
        ("transformer", {"input_shape": (8,), "vocabulary": 0}, "transformer: vocabulary must be a whole number from 1"),
        ("lstm", {"input_shape": (8,)}, r"lstm: input_shape=\(8,\) has 1 dimension; give \(length, features\)"),
        ("lstm", {"seed": -1}, "lstm: seed must be a whole number that is not negative, not -1"),
        ("cnn", {"vocabulary": 100}, "cnn: vocabulary=100 is for a transformer or a gpt, which read tokens: leave it out"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        create(name, **{"classes": 3, "input_shape": IMAGE, **arguments})

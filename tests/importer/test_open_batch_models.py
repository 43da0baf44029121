"""``batch="open"`` on whole models that PyTorch exported at batch 1: a batch trains as its samples do one by one."""

from __future__ import annotations

import math
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import burnish
from burnish import engines
from oracles.batches import assert_as_alone
from oracles.combinations import spread

CLASSES, SAMPLES, TOKENS = 3, 4, 5
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


class Convolutions(nn.Module):
    """Images, whose features are flattened by the batch size that the exporter saw."""

    inputs = ((1, 3, 8, 8),)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, groups=4),
            nn.GroupNorm(2, 8),
        )
        self.dense = nn.Linear(32, CLASSES)

    def forward(self, x):
        features = self.layers(x)
        return self.dense(features.reshape(x.shape[0], 32))


class Dropped(nn.Module):
    """One that takes the only sample out of its batch, and has no axis for it from there on."""

    inputs = ((1, 6),)

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        hidden = torch.tanh(self.first(x[0]))
        return self.second(hidden * hidden.mean()).unsqueeze(0)


class Encoder(nn.Module):
    """Attention as PyTorch writes it, with the heads beside the batch."""

    batch_first = True
    inputs = ((1, TOKENS, 8),)

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=self.batch_first)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.wide, self.narrow, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = self.norms[0](x + self.attention(x, x, x)[0])
        x = self.norms[1](x + self.narrow(nn.functional.gelu(self.wide(x))))
        return self.head(x.mean(1 if self.batch_first else 0))


class EncoderOfColumns(Encoder):
    """With the batch along the second axis."""

    batch_first = False
    inputs = ((TOKENS, 1, 8),)


class Vision(nn.Module):
    """Patches, a token for the class that is repeated for each image, positions, attention."""

    inputs = ((1, 3, 8, 8),)

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.queries, self.mixed, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        batch = x.shape[0]
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(batch, -1, -1), x], 1) + self.positions
        q, k, v = self.queries(x).reshape(batch, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(4), -1)
        x = x + self.mixed((weights @ v).transpose(1, 2).reshape(batch, 5, 8))
        return self.head(x[:, 0])


class Recurrent(nn.Module):
    """A recurrent layer whose first state is the exporter's zeros, of one sample."""

    cell: type[nn.Module] = nn.LSTM
    batch_first = True
    inputs = ((1, TOKENS, 4),)

    def __init__(self):
        super().__init__()
        self.cells = self.cell(4, 6, num_layers=2, bidirectional=True, batch_first=self.batch_first)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        frames, _ = self.cells(x)
        return self.head(frames[:, -1] if self.batch_first else frames[-1])


class Gated(Recurrent):
    cell = nn.GRU


class LongShortTermOfColumns(Recurrent):
    batch_first = False
    inputs = ((TOKENS, 1, 4),)


MODULES = (Convolutions, Dropped, Encoder, EncoderOfColumns, Vision, Recurrent, Gated, LongShortTermOfColumns)


@cache
def exported(module: type[nn.Module], exporter: str, training: bool, folder: Path) -> Path:
    torch.manual_seed(3)
    path = folder / f"{module.__name__}-{exporter}-{training}.onnx"
    network = module().double().train(training)
    arguments = tuple(torch.randn(*shape, dtype=torch.float64) for shape in module.inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            torch.onnx.export(network, arguments, str(path), dynamo=True, optimize=False, verbose=False)
        else:
            mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
            torch.onnx.export(
                network, arguments, str(path), dynamo=False, training=mode, do_constant_folding=False, input_names=["x"]
            )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exported_at_batch_1")


EXPORTS = [
    (module, exporter, training) for module in MODULES for exporter in ("dynamo", "torchscript") for training in (False, True)
]
every_export = spread(("module", "exporter", "training"), EXPORTS, test=1, test_all=16)


def drawn(module: type[nn.Module], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(module.inputs[0])


every_export_of_fixed_statistics = spread(
    ("module", "exporter", "training"),
    [(module, exporter, training) for module, exporter, training in EXPORTS if not (training and module is Convolutions)],
    test=1,
    test_all=16,
)


@pytest.mark.slow
@every_export_of_fixed_statistics
def test_outputs_of_a_batch_are_those_of_its_samples(module, exporter, training, folder):
    path = exported(module, exporter, training, folder)
    single, opened = burnish.load(path), burnish.load(path, batch="open")
    assert_as_alone(single, opened, [{"x": drawn(module, seed)} for seed in range(SAMPLES)])


@pytest.mark.slow
@every_export
def test_loss_and_gradient_of_a_batch_are_the_mean_over_its_samples(module, exporter, training, folder):
    path = exported(module, exporter, training, folder)
    # In training, batch normalization takes its statistics of the batch, and a mean over samples is something else.
    single, opened = (burnish.compile(path, norm="frozen", batch=batch) for batch in (None, "open"))
    assert opened.options["batch"] == "open"
    assert "batch" not in single.options
    state = single.initial_state(seed=0)
    axis = module.inputs[0].index(1)
    samples, labels = [drawn(module, seed) for seed in range(SAMPLES)], np.array([0, 2, 1, 2])

    def differentiated(program, x, labels):
        inputs = {value.name for value in program.grad.graph.inputs}
        feeds = {"x": x, "labels": labels, **state}
        return engines.get("reference").run(program.grad, {name: feeds[name] for name in inputs})

    whole = differentiated(opened, np.concatenate(samples, axis), labels)
    each = [differentiated(single, x, labels[index : index + 1]) for index, x in enumerate(samples)]
    names = [name for name in whole if name == "loss" or name.startswith("grad:")]
    assert len(names) > len(single.options["trainable"])
    for name in names:
        mean = np.mean([results[name] for results in each], axis=0)
        np.testing.assert_allclose(whole[name], mean, rtol=1e-11, atol=1e-12 * max(1.0, np.abs(mean).max()), err_msg=name)


def test_batch_normalization_takes_statistics_of_the_whole_batch(folder):
    """As a model that was exported with an open batch does."""
    path = exported(Convolutions, "torchscript", True, folder)
    torch.manual_seed(3)
    network = Convolutions().double().train()
    torch.randn(*Convolutions.inputs[0], dtype=torch.float64)
    x, labels = np.concatenate([drawn(Convolutions, seed) for seed in range(SAMPLES)]), np.array([0, 2, 1, 2])
    session = burnish.Session(burnish.compile(path, norm="train", batch="open"), engine="reference")
    norm = network.layers[1]
    norm.running_mean.copy_(torch.from_numpy(session.state()["stat/layers.1.running_mean"]))  # the exporter has run the module
    loss = nn.functional.cross_entropy(network(torch.from_numpy(x)), torch.from_numpy(labels))
    assert session.step({"x": x, "labels": labels})["loss"] == pytest.approx(loss.item(), rel=1e-9)
    # The file holds the momentum in float32.
    np.testing.assert_allclose(session.state()["stat/layers.1.running_mean"], norm.running_mean.numpy(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(LIGHT.glob("*.onnx")), ids=lambda path: path.stem)
def test_every_model_of_the_onnx_package_opens(path):
    """They were exported at batch 1, which most of them write into the target of a Reshape."""
    single, opened = burnish.load(path), burnish.load(path, batch="open")
    values = [(*model.graph.inputs, *model.graph.outputs) for model in (single, opened)]
    for before, after in zip(*values, strict=True):
        assert after.name == before.name
        assert list(before.shape) == [1, *list(after.shape)[1:]]
        assert str(after.shape[0]) == "batch"


def test_the_onnx_package_has_nine_models_of_batch_1():
    assert len(list(LIGHT.glob("*.onnx"))) == 9


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_a_model_of_the_onnx_package_trains_at_batch_4(engine):
    """Its weights are written by their shapes alone; classes stand along the second of four axes."""
    program = burnish.compile(LIGHT / "light_squeezenet.onnx", optimizer=burnish.optim.sgd(lr=0.001), batch="open")
    assert len(program.options["trainable"]) == 52
    session = burnish.Session(program, engine=engine, state=program.initial_state(seed=0, reinitialize="kaiming"))
    x = np.random.default_rng(0).standard_normal((4, 3, 224, 224)).astype(np.float32)
    batch = {"data_0": x, "labels": np.array([1, 5, 7, 9]).reshape(4, 1, 1)}
    first, second = (session.step(batch)["loss"] for _ in range(2))
    assert second < first
    outputs = session.predict({"data_0": x})["softmaxout_1"]
    assert outputs.shape == (4, 1000, 1, 1)
    alone = session.predict({"data_0": x[2:3]})["softmaxout_1"]
    np.testing.assert_allclose(outputs[2:3], alone, rtol=1e-4)

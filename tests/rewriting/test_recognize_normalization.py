"""Recognized layers in whole programs: training against PyTorch, what each graph holds, and the exported model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import burnish
from burnish.graph.stage import Stage
from burnish.importer import load
from burnish.rewriting.stages import RECOGNIZED
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.recognition import exported, operators, random_weights, written

X = np.random.default_rng(0).normal(size=(5, 3, 8, 8)).astype(np.float32)
LABELS = np.array([0, 1, 2, 3, 1])


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Network(nn.Module):
    """One of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.group_norm = nn.GroupNorm(2, 8)
        self.first = nn.Linear(8 * 36, 12)
        self.layer_norm = nn.LayerNorm(12)
        self.second = nn.Linear(12, 10)
        self.rms_norm = RMSNorm(10)
        self.last = nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.group_norm(self.convolution(x))).flatten(1)
        x = nn.functional.gelu(self.layer_norm(self.first(x)))
        return self.last(nn.functional.gelu(self.rms_norm(self.second(x)), approximate="tanh"))


@pytest.fixture
def network() -> nn.Module:
    module = random_weights(Network())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.4)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("opset", [13, 17, 20])
def test_training_and_export_agree_with_pytorch(network: nn.Module, opset: int, tmp_path: Path) -> None:
    program = burnish.compile(exported(network, X, opset), optimizer=burnish.optim.sgd(lr=0.1))
    names = [name for name, _ in network.named_parameters()]
    assert {name.removeprefix("param/") for name in program.initial_state() if name.startswith("param/")} == set(names)
    session = burnish.Session(program)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(torch.from_numpy(X)), torch.from_numpy(LABELS))
        loss.backward()
        optimizer.step()
        assert session.step({"x": X, "labels": LABELS})["loss"] == pytest.approx(loss.item(), rel=2e-6)
    for name, parameter in network.named_parameters():
        expected = parameter.detach().numpy()
        error = np.linalg.norm(session.state()[f"param/{name}"] - expected) / np.linalg.norm(expected)
        assert error < 2e-6, name
    session.export(tmp_path / "tuned.onnx")
    tuned = onnx.load(tmp_path / "tuned.onnx")
    assert {tensor.name for tensor in tuned.graph.initializer} == set(names)
    (logits,) = onnxruntime.InferenceSession(tmp_path / "tuned.onnx").run(None, {"x": X})
    expected = network(torch.from_numpy(X)).detach().numpy()
    assert np.abs(logits - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.slow
def test_what_each_graph_holds(network: nn.Module) -> None:
    program = burnish.compile(exported(network, X, 14))
    predict, step = operators(program.predict), operators(program.step)
    assert predict.count("LayerNormalization") == 1
    assert predict.count("Gelu") == 2
    # Group and RMS normalization keep their pieces where ONNX Runtime has no kernel, or the opset would have to be raised to 23.
    assert predict.count("InstanceNormalization") == 1
    assert predict.count("Pow") == 1
    assert "Erf" not in predict
    assert "Pow" not in step
    assert "InstanceNormalization" not in step
    assert {name: getattr(program, name).opset_imports[""] for name in ("step", "grad", "evaluate", "predict")} == dict.fromkeys(
        ("step", "grad", "evaluate", "predict"), 20
    )


@pytest.mark.slow
def test_a_training_graph_stays_in_the_opset_of_its_operators() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(1), nn.Linear(288, 4), RMSNorm(4))
    program = burnish.compile(exported(random_weights(module), X, 14))
    assert program.step.opset_imports[""] == 18


def test_an_rms_normalization_of_a_model_of_opset_23() -> None:
    model = load(exported(random_weights(RMSNorm(8)), X, 14))
    for graph in model.graphs():
        graph.opset_imports[""] = 23
    before = onnxruntime_outputs(model, {"x": X})
    RECOGNIZED.run(model, None)
    assert operators(model) == ["RMSNormalization"]
    assert np.abs(onnxruntime_outputs(model, {"x": X})["y"] - before["y"]).max() < 1e-6


@pytest.mark.slow
def test_gradients_are_those_of_the_pieces(network: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = exported(network, X, 14)
    names = ["x", *(name for name, _ in network.named_parameters())]
    cotangent = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    recognized = burnish.grad(proto, names)

    monkeypatch.setattr("burnish.compiler.gradient.RECOGNIZED", Stage("nothing", ()))
    monkeypatch.setattr("burnish.compiler.gradient.RECOGNIZED_TO_TRAIN", Stage("nothing", ()))
    pieces = burnish.grad(proto, names)
    assert "Gelu" in operators(recognized)
    assert "Gelu" not in operators(pieces)
    feeds = {"x": X, "cotangent:y": cotangent}
    after, before = onnxruntime_outputs(recognized, feeds), onnxruntime_outputs(pieces, feeds)
    assert list(after) == list(before)
    for name, expected in before.items():
        assert np.linalg.norm(after[name] - expected) <= 5e-6 * np.linalg.norm(expected), name


def test_a_constant_inside_a_layer_is_differentiated_by() -> None:
    body = (
        "square = Pow(x, two) power = ReduceMean<keepdims=1>(square, last) stable = Add(power, epsilon) "
        "root = Sqrt(stable) y = Div(x, root)"
    )
    x = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)
    cotangent = np.random.default_rng(3).normal(size=(3, 8)).astype(np.float32)
    model = burnish.grad(written(body, x, {}), ["x", "epsilon"])
    gradient = onnxruntime_outputs(model, {"x": x, "cotangent:y": cotangent})["grad:epsilon"]
    exact = x.astype(np.float64)
    expected = (-0.5 * cotangent * exact * ((exact**2).mean(-1, keepdims=True) + np.float32(1e-3)) ** -1.5).sum()
    assert gradient == pytest.approx(expected, rel=1e-5)

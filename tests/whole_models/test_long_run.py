"""Two hundred steps of a network with batch normalization beside PyTorch, then evaluation and export.

The activations are smooth. With ReLU, a value that rounding moves across zero changes a gradient by its whole size, and two
runs part: PyTorch's own float32 run is then 1 % off its float64 run after as many steps.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import burnish
import torch_models
from oracles.combinations import spread

STEPS, BATCH = 200, 64


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.images[order, None] / 16).astype(np.float32), data.target[order].astype(np.int64)


def network(activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        activation(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        activation(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


@spread("activation", [nn.GELU, nn.Tanh], test=1)
def test_two_hundred_steps_then_evaluation_and_export(activation, digits, tmp_path):
    images, labels = digits
    train, held_out = slice(0, 1400), slice(1400, None)
    module = network(activation)
    program = burnish.compile(
        torch_models.export_onnx(module, torch.zeros(2, 1, 8, 8)),
        optimizer=burnish.optim.sgd(lr=0.05, momentum=0.9),
        running_variance="pytorch",
    )
    session = burnish.Session(program, threads=1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    random = np.random.default_rng(1)
    for _ in range(STEPS):
        chosen = random.integers(0, 1400, BATCH)
        session.step({"x": images[train][chosen], "labels": labels[train][chosen]})
        optimizer.zero_grad()
        cross_entropy(module(torch.from_numpy(images[train][chosen])), torch.from_numpy(labels[train][chosen])).backward()
        optimizer.step()

    state = session.state()
    for name, value in module.state_dict().items():
        if "running" in name:
            expected = value.numpy()
            assert np.linalg.norm(state[f"stat/{name}"] - expected) < 1e-4 * np.linalg.norm(expected), name
    with torch.no_grad():
        logits = module.eval()(torch.from_numpy(images[held_out]))
    evaluated = session.evaluate_data([{"x": images[held_out], "labels": labels[held_out]}])
    right = int((logits.argmax(1).numpy() == labels[held_out]).sum())
    assert evaluated["loss"] == pytest.approx(cross_entropy(logits, torch.from_numpy(labels[held_out])).item(), rel=1e-4)
    assert right > 0.8 * len(labels[held_out])
    assert round(evaluated["accuracy"] * len(labels[held_out])) == right

    for fold in (True, False):
        path = session.export(tmp_path / f"{fold}.onnx", fold_norm=fold)
        exported = onnxruntime.InferenceSession(path).run(None, {"x": images[held_out]})[0]
        assert (exported.argmax(1) == labels[held_out]).sum() == right

"""Whole networks against PyTorch: loss, every gradient, every running statistic, ten steps, and inference after them.

The same weights and batches go through the module and through the program compiled from its ONNX export.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import burnish
import torch_models
from oracles.combinations import spread

CLASSES = 10
NARROW_MOBILE = ((1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 2, 2))
SGD = {"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-4}


def smooth_residual_network() -> nn.Module:
    """ResNet-50 with GELU and with residual branches that all take part: none of its 161 gradients is zero."""
    module = torch_models.resnet50(CLASSES)
    for child in module.modules():
        if isinstance(child, torch_models.Bottleneck):
            nn.init.constant_(child.bn3.weight, 0.1)
        if hasattr(child, "relu"):
            child.relu = nn.GELU()
    return module


# ResNet-50 itself starts its branches at zero, and only 49 of its gradients are not zero at first. With branches that take part,
# a value that rounding moves across the kink of a ReLU changes gradients by 1 %, in PyTorch's own float32 against its float64
# as well; so all 161 gradients are compared in the network whose activation has no kink.
MODULES = {
    "resnet50": lambda: torch_models.resnet50(CLASSES),
    "resnet50_gelu": smooth_residual_network,
    "mobile": lambda: torch_models.MobileNetV2(NARROW_MOBILE, stem=8, head=64, classes=CLASSES),
}
# Gradients that are exactly 0 but for rounding: of layers in branches that start at zero, and of biases whose only effect the
# next batch normalization subtracts again.
ZERO_GRADIENTS = {"resnet50": 112, "resnet50_gelu": 0, "mobile": 5}


@dataclass(frozen=True)
class Case:
    """A module, its ONNX export in training mode, and batches."""

    module: nn.Module
    model: onnx.ModelProto
    batches: list[tuple[torch.Tensor, torch.Tensor]]


@cache
def case(name: str) -> Case:
    torch.manual_seed(1)
    module = MODULES[name]()
    for parameter_name, parameter in module.named_parameters():
        if parameter.ndim == 1 and parameter_name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model = torch_models.export_onnx(module, torch.randn(2, 3, 64, 64))
    batches = [(torch.randn(6, 3, 64, 64), torch.randint(0, CLASSES, (6,))) for _ in range(10)]
    return Case(module, model, batches)


def as_batch(x: torch.Tensor, labels: torch.Tensor) -> dict[str, np.ndarray]:
    return {"x": x.numpy(), "labels": labels.numpy()}


def wrong_gradients(
    outputs: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float, zeros: int = 0
) -> dict[str, float]:
    """The gradients whose error, relative to their own norm, passes ``tolerance``.

    Exactly ``zeros`` of them must be zero but for rounding (below 1e-6 of the whole gradient); these are measured against the
    whole, and must be as small in both.
    """
    whole = np.sqrt(sum(np.sum(gradient**2) for gradient in expected.values()))
    vanishing = {name for name, gradient in expected.items() if np.linalg.norm(gradient) < 1e-6 * whole}
    assert len(vanishing) == zeros, vanishing
    errors = {}
    for name, gradient in expected.items():
        error = float(np.linalg.norm(outputs[f"grad:{name}"].astype(np.float64) - gradient))
        limit = 1e-6 * whole if name in vanishing else tolerance * np.linalg.norm(gradient)
        if error > limit:
            errors[name] = error / limit * tolerance
    return errors


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over norm of the expected; over the norm of ones where nothing is expected."""
    difference = np.linalg.norm(np.asarray(actual, np.float64) - expected)
    return float(difference / (np.linalg.norm(expected) or np.sqrt(np.size(expected))))


def first_step(module: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> tuple[float, Mapping[str, np.ndarray], nn.Module]:
    module = copy.deepcopy(module).train()
    loss = cross_entropy(module(x), labels)
    loss.backward()
    return loss.item(), {name: value.grad.double().numpy() for name, value in module.named_parameters()}, module


# All gradients of a deep network are compared in resnet50_gelu; the smallest has the same kinds of layers, and another batch.
@spread(
    ("name", "batch_size"),
    [
        pytest.param(name, size, marks=() if name == "mobile" else pytest.mark.slow if size == 6 else pytest.mark.campaign)
        for name in MODULES
        for size in (6, 5)
    ],
    test=1,
)
def test_loss_gradients_and_running_statistics_of_a_step(name, batch_size):
    x, labels = (tensor[:batch_size] for tensor in case(name).batches[0])
    program = burnish.compile(case(name).model, optimizer=burnish.optim.sgd(**SGD))
    state = program.initial_state()
    inputs = {entry.name for entry in program.signature["grad"].inputs}
    feeds = {key: value for key, value in state.items() if key in inputs} | as_batch(x, labels)
    outputs = burnish.engines.get("onnxruntime").run(program.grad, feeds)
    loss, gradients, module = first_step(case(name).module, x, labels)
    assert outputs["loss"] == pytest.approx(loss, rel=1e-5)
    assert wrong_gradients(outputs, gradients, 1e-4, ZERO_GRADIENTS[name]) == {}
    running = {key: value.numpy() for key, value in module.state_dict().items() if "running" in key}
    assert running
    errors = {key: relative_error(outputs[f"next:stat/{key}"], value) for key, value in running.items()}
    assert {key: error for key, error in errors.items() if error > 1e-4} == {}


def losses_of(
    module: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]], settings: Mapping[str, float] = SGD
) -> np.ndarray:
    """The losses of PyTorch's steps on the batches; the module is trained."""
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), **settings)
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(module(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


@spread("name", ["mobile", "resnet50", "resnet50_gelu"], test_all=1)
@pytest.mark.slow
def test_ten_steps_and_inference_after_them(name, tmp_path):
    """Losses are those of PyTorch in float64.

    The steps are small, so that they make little of what was rounded: at four times the rate PyTorch's own two layouts of memory
    part by a hundredth after ten steps, where rounding has taken a value across the kink of a ReLU.
    """
    module, settings = copy.deepcopy(case(name).module), {**SGD, "lr": SGD["lr"] / 4}
    session = burnish.Session(burnish.compile(case(name).model, optimizer=burnish.optim.sgd(**settings)))
    losses = np.array([session.step(as_batch(x, labels))["loss"] for x, labels in case(name).batches])
    exact = losses_of(copy.deepcopy(module).double(), [(x.double(), labels) for x, labels in case(name).batches], settings)
    np.testing.assert_allclose(losses, exact, rtol=1e-4)

    state = {
        key.split("/", 1)[1]: torch.from_numpy(value) for key, value in session.state().items() if key[:5] in ("param", "stat/")
    }
    module.load_state_dict(state, strict=False)
    x, labels = case(name).batches[0]
    with torch.no_grad():
        logits = module.eval()(x).numpy()
    assert relative_error(session.predict({"x": x.numpy()})["logits"], logits) < 1e-5
    evaluated = session.evaluate(as_batch(x, labels))
    assert evaluated["loss"] == pytest.approx(cross_entropy(torch.from_numpy(logits), labels).item(), rel=1e-5)
    assert evaluated["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == labels.numpy()))

    unfolded = run_file(session.export(tmp_path / "unfolded.onnx", fold_norm=False), x)
    folded = run_file(session.export(tmp_path / "folded.onnx"), x)
    assert relative_error(unfolded, logits) < 1e-5
    assert relative_error(folded, unfolded) < 1e-5


@pytest.mark.slow
def test_ten_steps_in_float64():
    """Losses, parameters and running statistics to twelve digits: nothing here hides behind rounding that has grown."""
    mobile = case("mobile")
    module = without_rounded_attributes(copy.deepcopy(mobile.module).double())
    model = torch_models.export_onnx(module, torch.randn(2, 3, 64, 64, dtype=torch.float64))
    settings = {key: float(np.float32(value)) for key, value in SGD.items()}
    session = burnish.Session(burnish.compile(model, optimizer=burnish.optim.sgd(**settings)), engine="torch")
    batches = [(x.double(), labels) for x, labels in mobile.batches]
    ours = np.array([session.step(as_batch(x, labels))["loss"] for x, labels in batches])
    np.testing.assert_allclose(ours, losses_of(module, batches, settings), rtol=1e-12)
    state = {key.split("/", 1)[1]: value for key, value in session.state().items() if key.startswith(("param/", "stat/"))}
    wanted = {key: value.numpy() for key, value in module.state_dict().items() if not key.endswith("num_batches_tracked")}
    assert set(state) == set(wanted)
    errors = {key: relative_error(state[key], value) for key, value in wanted.items()}
    assert {key: error for key, error in errors.items() if error > 1e-11} == {}


def without_rounded_attributes(module: nn.Module) -> nn.Module:
    """Attributes of ONNX are float32: give the module what comes back from them."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            child.eps, child.momentum = float(np.float32(1e-5)), 1 - float(np.float32(0.9))
    return module


def run_file(path, x: torch.Tensor) -> np.ndarray:
    return onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})[0]


@pytest.mark.parametrize("name", [pytest.param("resnet50", marks=pytest.mark.slow), "mobile"])
def test_the_export_in_inference_mode_whose_batch_norm_is_folded(name):
    """PyTorch trains the same folded network: convolutions with a bias, and no batch normalization."""
    module = copy.deepcopy(case(name).module).eval()
    for _, child in module.named_modules():
        if isinstance(child, nn.BatchNorm2d):
            nn.init.uniform_(child.running_var, 2.0, 4.0)
            nn.init.uniform_(child.weight, 0.1, 1.0)
    model = torch_models.export_onnx(module, torch.randn(2, 3, 64, 64), training=False)
    assert not [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    program = burnish.compile(model)
    folded = fold_in_pytorch(module)
    x, labels = case(name).batches[0]
    loss, gradients, _ = first_step(folded, x, labels)
    state = program.initial_state()
    inputs = {entry.name for entry in program.signature["grad"].inputs}
    feeds = {key: value for key, value in state.items() if key in inputs} | as_batch(x, labels)
    outputs = burnish.engines.get("onnxruntime").run(program.grad, feeds)
    assert outputs["loss"] == pytest.approx(loss, rel=1e-5)
    ours = [outputs[entry.name] for entry in program.signature["grad"].outputs if entry.name.startswith("grad:")]
    assert len(ours) == len(gradients)
    for gradient in gradients.values():
        same_shape = [candidate for candidate in ours if candidate.shape == gradient.shape]
        assert min(relative_error(candidate, gradient) for candidate in same_shape) < 1e-4


def fold_in_pytorch(module: nn.Module) -> nn.Module:
    """Fold every batch normalization into the convolution that comes before it, with PyTorch's own function."""
    folded = copy.deepcopy(module)
    for parent in folded.modules():
        previous: tuple[str, nn.Conv2d] | None = None
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                previous = (name, child)
            elif isinstance(child, nn.BatchNorm2d) and previous is not None:
                setattr(parent, previous[0], nn.utils.fuse_conv_bn_eval(previous[1], child))
                setattr(parent, name, nn.Identity())
                previous = None
    return folded.requires_grad_()


@pytest.mark.slow
def test_resnet50_keeps_its_53_batch_normalizations():
    model = case("resnet50").model
    assert sum(node.op_type == "BatchNormalization" for node in model.graph.node) == 53
    program = burnish.compile(model)
    training = [node for node in program.step.graph if "training_mode" in node.attributes]
    assert len(training) == 53
    assert sum(entry.role == "statistic" for entry in program.signature.state) == 106


@pytest.mark.slow
def test_a_tiny_residual_network_in_float64():
    """Without rounding in the way: every gradient to twelve digits, on the reference engine."""
    torch.manual_seed(2)
    module = torch_models.ResNet((1, 1), 4, CLASSES).double()
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            nn.init.uniform_(child.weight, -1.0, 1.0)
    without_rounded_attributes(module)
    model = torch_models.export_onnx(module, torch.randn(2, 3, 16, 16, dtype=torch.float64))
    x, labels = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.randint(0, CLASSES, (3,))
    program = burnish.compile(model)
    inputs = {entry.name for entry in program.signature["grad"].inputs}
    feeds = {key: value for key, value in program.initial_state().items() if key in inputs} | as_batch(x, labels)
    outputs = burnish.engines.get("reference").run(program.grad, feeds)
    loss, gradients, module = first_step(module, x, labels)
    assert outputs["loss"] == pytest.approx(loss, rel=1e-12)
    assert wrong_gradients(outputs, gradients, 1e-12) == {}
    for key, value in module.state_dict().items():
        if "running" in key:
            assert relative_error(outputs[f"next:stat/{key}"], value.numpy()) < 1e-12

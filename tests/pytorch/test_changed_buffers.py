"""Modules whose ``forward`` changes buffers, and parametrized ones, beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import burnish
import burnish.torch
from burnish.errors import FixedBatchWarning, UnsupportedOperatorError
from oracles.combinations import spread

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")


class Remembering(nn.Module):
    """Counts its calls, keeps a moving average of its batches, which it subtracts, and the sample that came last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.full((3,), 0.5))
        self.register_buffer("last", torch.zeros(2, 3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.calls += 1
        if self.training:
            with torch.no_grad():
                self.average.detach().mul_(0.9).add_(y.mean(0), alpha=0.1)
        self.last[0] = y[-1].detach()
        return torch.sigmoid(y - self.average) * self.average.sum()


class Scaled(nn.Module):
    """Has a factor by the statistics of the batch, which no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, eps=2.0**-17, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = self.norm(self.linear(x))
        return self.linear(x) * factor


def convolutional() -> nn.Module:
    return nn.Sequential(spectral_norm(nn.Conv2d(2, 3, 3)), nn.Flatten(), weight_norm(nn.Linear(12, 2)))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "remembering": (Remembering, (3,)),
    "normalized": (Scaled, (3,)),
    "spectral": (lambda: nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh()), (3,)),
    "convolutional": (convolutional, (2, 4, 4)),
}


def trained(module: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Train for a step on each batch, and evaluate; returns what came out, with all gradients and the state."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    results = []
    for x in batches:
        optimizer.zero_grad()
        y = module(x.requires_grad_())
        y.square().mean().backward()
        results += [y, x.grad, *(parameter.grad for parameter in module.parameters())]
        optimizer.step()
        results += [buffer.clone() for buffer in module.buffers()]
    results.append(module.eval()(batches[0]))
    return [*results, *module.parameters(), *module.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_buffers_that_forward_changes_are_written_back(name: str) -> None:
    build, sample = CASES[name]
    torch.manual_seed(0)
    module = build().double()
    wrapped = burnish.torch.wrap(copy.deepcopy(module), torch.randn(2, *sample, dtype=torch.float64))
    batches = [torch.randn(size, *sample, dtype=torch.float64) for size in (4, 3, 4)]
    ours, theirs = (trained(model, [batch.clone() for batch in batches]) for model in (wrapped, module))
    assert len(ours) == len(theirs)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_a_gradient_of_a_gradient_reads_buffers_as_they_were_at_the_call() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh()).double()
    wrapped = burnish.torch.wrap(copy.deepcopy(module), torch.randn(2, 3, dtype=torch.float64))
    x = torch.randn(4, 3, dtype=torch.float64)
    found = []
    for model in (wrapped, module):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(leaf).square().sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [leaf, *model.parameters()], allow_unused=True))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None or not ours.any()) if theirs is None else torch.allclose(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_what_a_program_would_have_to_change_is_refused_with_what_does() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"'average', and .* Train the module with burnish\.torch\.wrap"):
        burnish.compile(Remembering(), example_inputs=(torch.randn(2, 3),))


def test_a_layer_of_normalized_weights_trains_as_a_program() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(weight_norm(nn.Linear(3, 4)))
    x, labels = torch.randn(8, 3), torch.randint(0, 4, (8,))
    program = burnish.compile(copy.deepcopy(module), example_inputs=(x,), optimizer="sgd:lr=0.5")
    session = burnish.Session(program, engine="onnxruntime")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        session.step({"input": x.numpy(), "labels": labels.numpy()})
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), labels).backward()
        optimizer.step()
    state = session.state()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(state[f"param/{name}"], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@spread("activation", [nn.Hardswish(), nn.Hardsigmoid()], test=1)
def test_a_sixth_has_all_digits_of_float64(activation: nn.Module) -> None:
    x = torch.linspace(-4.5, 4.4, 60, dtype=torch.float64)
    wrapped = burnish.torch.wrap(nn.Sequential(activation), x)
    ours = x.clone().requires_grad_()
    y = wrapped(ours)
    torch.testing.assert_close(y, activation(x), rtol=1e-14, atol=1e-15)
    (found,) = torch.autograd.grad(y.sum(), ours)
    # PyTorch's own derivative of hardsigmoid has a sixth of float32.
    inside = x.abs() < 3
    slope = (2 * x + 3) / 6 if isinstance(activation, nn.Hardswish) else torch.full_like(x, 1 / 6)
    beyond = (x >= 3).double() if isinstance(activation, nn.Hardswish) else torch.zeros_like(x)
    torch.testing.assert_close(found, torch.where(inside, slope, beyond), rtol=1e-12, atol=1e-13)


class Reshaping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.reshape(4, 6))


@spread("enter", [burnish.torch.wrap, lambda module, x: burnish.compile(module, example_inputs=(x,))], test=1)
def test_a_warning_of_a_fixed_batch_names_the_line_of_the_caller(enter: Callable[..., object]) -> None:
    with pytest.warns(FixedBatchWarning) as caught:
        enter(Reshaping(), torch.randn(4, 2, 3))
    assert [warning.filename for warning in caught if warning.category is FixedBatchWarning] == [__file__]

"""Architectures that people name, compiled whole, wrapped and through ``torch.compile``, beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import burnish
import burnish.torch
from burnish.torch.backend import compile_graph, reported
from oracles.named_architectures import CLASSES, NAMED, Named

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

Tensors = dict[str, torch.Tensor]
Batches = list[tuple[Tensors, torch.Tensor]]
BATCH, STEPS, LONG = 4, 3, 10
RATE, MOMENTUM = 2.0**-4, 0.875
"""A program holds them in float32, which has these."""
FROM_TRANSFORMERS = ("bert", "gpt2")
WAYS = ("whole", "wrapped", "compiled")
QUICK = (("resnet18", "whole"),)
SLOW = (("bert", "wrapped"), ("gpt2", "whole"))
SLOW_IN_FLOAT32 = (("efficientnet", "wrapped"),)


class Trained(NamedTuple):
    """What training came to.

    Attributes:
        losses: of each step.
        gradients: of the first step, by the names of parameters.
        module: with the parameters and buffers after the last step.
    """

    losses: list[float]
    gradients: Tensors
    module: nn.Module


def batches(case: Named, dtype: torch.dtype, count: int) -> Batches:
    """Inputs, and targets for modules that return no loss; the second batch is smaller."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        size = BATCH - (seed == 1)
        inputs = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in case.inputs(size, generator).items()
        }
        made.append((inputs, torch.randint(CLASSES, (size, *case.labelled), generator=generator)))
    return made


def loss_of(module: nn.Module, inputs: Tensors, targets: torch.Tensor) -> torch.Tensor:
    if "labels" in inputs:
        return module(**inputs)["loss"]
    return nn.functional.cross_entropy(module(*inputs.values()), targets)


def answers(module: nn.Module, inputs: Tensors) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs)["logits"] if "labels" in inputs else module(*inputs.values())


def in_pytorch(module: nn.Module, given: Batches) -> Trained:
    """Train a module by SGD in a loop of PyTorch's, whoever computes it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    losses, gradients = [], {}
    for inputs, targets in given:
        optimizer.zero_grad()
        loss = loss_of(module, inputs, targets)
        loss.backward()
        gradients = gradients or {name: tensor.grad.clone() for name, tensor in module.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, plain_names(gradients), module)


def whole(module: nn.Module, given: Batches) -> Trained:
    """Train a program of a module, and write what it came to into the module."""
    inputs = given[0][0]
    returns_loss = "labels" in inputs
    program = burnish.compile(
        module,
        example_inputs=inputs if returns_loss else tuple(inputs.values()),
        optimizer=burnish.optim.sgd(lr=RATE, momentum=MOMENTUM),
        metrics=(),
        **({"output": "loss"} if returns_loss else {"loss": "cross_entropy"}),
    )
    data = [entry.name for entry in program.signature["predict"].inputs if entry.role is burnish.program.Role.DATA]
    renamed = {} if returns_loss else dict(zip(inputs, data, strict=True))
    feeds = [{renamed.get(name, name): tensor.numpy() for name, tensor in batch.items()} for batch, _ in given]
    if not returns_loss:
        feeds = [feed | {"labels": targets.numpy()} for feed, (_, targets) in zip(feeds, given, strict=True)]
    values = program.initial_state() | feeds[0]
    outputs = burnish.engines.get("torch").run(
        program.grad, {entry.name: values[entry.name] for entry in program.signature["grad"].inputs}
    )
    gradients = {name: torch.from_numpy(outputs[f"grad:{name}"]) for name, _ in module.named_parameters()}
    with burnish.Session(program, engine="torch") as session:
        losses = [session.step(feed)["loss"] for feed in feeds]
        burnish.torch.load_into(module, session)
    return Trained(losses, gradients, module)


def wrapped(module: nn.Module, given: Batches) -> Trained:
    inputs = given[0][0]
    return in_pytorch(burnish.torch.wrap(module, inputs if "labels" in inputs else tuple(inputs.values())), given)


def compiled(module: nn.Module, given: Batches) -> Trained:
    """As a user of recurrent layers has to: Dynamo captures them where that is allowed alone."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True), reported() as graphs:
        trained = in_pytorch(torch.compile(module, backend=compile_graph), given)
    assert any(part.runs_in == "burnish" for parts in graphs for part in parts)
    return trained


TRAIN: dict[str, Callable[[nn.Module, Batches], Trained]] = {"whole": whole, "wrapped": wrapped, "compiled": compiled}


def agree(found: Tensors, wanted: Tensors, relative: float) -> None:
    """Compare tensors by their norms; one that is nearly zero beside the others by theirs."""
    assert found.keys() == wanted.keys()
    everything = sum(float(tensor.double().norm()) ** 2 for tensor in wanted.values()) ** 0.5
    errors = {
        name: float((found[name] - tensor).double().norm()) / max(float(tensor.double().norm()), 1e-6 * everything)
        for name, tensor in wanted.items()
    }
    assert {name: error for name, error in errors.items() if error > relative} == {}


def plain_names(state: Tensors) -> Tensors:
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


def cases(quick: tuple[tuple[str, str], ...], slow: tuple[tuple[str, str], ...]) -> list[object]:
    def marks(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
        return [] if case in quick else [pytest.mark.slow if case in slow else pytest.mark.campaign]

    return [pytest.param(*case, marks=marks(case), id="-".join(case)) for name in NAMED for way in WAYS for case in [(name, way)]]


def named(name: str) -> Named:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    return NAMED[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), cases(QUICK, SLOW))
def test_steps_in_float64_are_those_of_pytorch_and_so_is_evaluation(name: str, way: str) -> None:
    case = named(name)
    given = batches(case, torch.float64, STEPS)
    module = case.module(torch.float64)
    ours, theirs = TRAIN[way](copy.deepcopy(module), given), in_pytorch(module, given)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-6)
    agree(ours.gradients, theirs.gradients, case.relative)
    state = plain_names(ours.module.state_dict())
    agree(state, theirs.module.state_dict(), 1e-6)
    fresh = case.module(torch.float64)
    fresh.load_state_dict(state)
    inputs = given[0][0]
    found = answers(ours.module.eval(), inputs)
    torch.testing.assert_close(found, answers(theirs.module.eval(), inputs), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, answers(fresh.eval(), inputs), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "way"), cases((), SLOW_IN_FLOAT32))
def test_ten_steps_in_float32_are_as_near_as_those_of_pytorch(name: str, way: str) -> None:
    """Errors are those beside the steps in float64: of losses, of all parameters together, and of all buffers."""
    case = named(name)
    given = batches(case, torch.float32, LONG)
    start = case.module(torch.float32)
    exact = in_pytorch(case.module(torch.float64), batches(case, torch.float64, LONG))
    ours, theirs = TRAIN[way](copy.deepcopy(start), given), in_pytorch(start, given)
    own = np.abs(np.subtract(theirs.losses, exact.losses)).max()
    assert np.abs(np.subtract(ours.losses, exact.losses)).max() <= 4 * own + 1e-6

    def error(tensors: Tensors, true: Tensors) -> float:
        assert tensors.keys() == true.keys()
        return sum(float((tensors[name] - true[name]).detach().square().sum()) for name in true) ** 0.5

    for kind in (nn.Module.named_parameters, nn.Module.named_buffers):
        our_tensors, their_tensors, true = (plain_names(dict(kind(trained.module))) for trained in (ours, theirs, exact))
        assert error(our_tensors, true) <= 4 * error(their_tensors, true) + 1e-6

"""Architectures that people name, compiled whole, wrapped and through ``torch.compile``, beside PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import burnish
import burnish.torch
from burnish.torch.backend import compile_graph
from oracles.named_architectures import NAMED, Named

pytest.importorskip("onnxscript", reason="PyTorch exports modules by onnxscript")

Batch = dict[str, torch.Tensor]
BATCH, STEPS, LONG = 4, 3, 10
RATE, MOMENTUM = 2.0**-4, 0.875
"""A program holds them in float32, which has these."""
FROM_TRANSFORMERS = ("bert", "gpt2")
CASES = (("bert", "wrapped"), ("bert", "compiled"), ("densenet", "compiled"), ("resnet18", "whole"), ("gpt2", "whole"))
QUICK = (("resnet18", "whole"),)
IN_ALL_WAYS = ("resnet50", "mobilenetv2", "mobilenetv3")
CAMPAIGN = tuple((name, way) for name in IN_ALL_WAYS for way in ("whole", "wrapped", "compiled"))


def batches(case: Named, dtype: torch.dtype, count: int) -> list[tuple[Batch, torch.Tensor]]:
    """Inputs, and targets for modules that return no loss; the second batch is smaller."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        size = BATCH - (seed == 1)
        inputs = {
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in case.inputs(size, generator).items()
        }
        made.append((inputs, torch.randint(4, (size,), generator=generator)))
    return made


def loss_of(module: nn.Module, inputs: Batch, targets: torch.Tensor) -> torch.Tensor:
    if "labels" in inputs:
        return module(**inputs)["loss"]
    return nn.functional.cross_entropy(module(*inputs.values()), targets)


def answers(module: nn.Module, inputs: Batch) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs)["logits"] if "labels" in inputs else module(*inputs.values())


def trained(module: nn.Module, given: list[tuple[Batch, torch.Tensor]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of SGD's steps, and the first gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)
    losses, gradients = [], {}
    for inputs, targets in given:
        optimizer.zero_grad()
        loss = loss_of(module, inputs, targets)
        loss.backward()
        gradients = gradients or {name: tensor.grad.clone() for name, tensor in module.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def wrapped(module: nn.Module, inputs: Batch) -> nn.Module:
    return burnish.torch.wrap(module, inputs if "labels" in inputs else tuple(inputs.values()))


def compiled(module: nn.Module, inputs: Batch) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(module, backend=compile_graph)


def agree(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: float) -> None:
    """Compare tensors by their norms; one that is nearly zero beside the others by theirs."""
    assert found.keys() == wanted.keys()
    whole = sum(float(tensor.double().norm()) ** 2 for tensor in wanted.values()) ** 0.5
    errors = {
        name: float((found[name] - tensor).double().norm()) / max(float(tensor.double().norm()), 1e-6 * whole)
        for name, tensor in wanted.items()
    }
    assert {name: error for name, error in errors.items() if error > relative} == {}


def plain_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}


def cases(*ways: str) -> list[object]:
    def mark(case: tuple[str, str]) -> list[pytest.MarkDecorator]:
        return [] if case in QUICK else [pytest.mark.slow if case in CASES else pytest.mark.campaign]

    return [pytest.param(*case, marks=mark(case), id="-".join(case)) for case in (*CASES, *CAMPAIGN) if case[1] in ways]


WAYS: dict[str, Callable[[nn.Module, Batch], nn.Module]] = {"wrapped": wrapped, "compiled": compiled}


@pytest.mark.parametrize(("name", "way"), cases("wrapped", "compiled"))
def test_steps_in_float64_are_those_of_pytorch_and_so_is_evaluation(name: str, way: str) -> None:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    case = NAMED[name]
    reference = case.module(torch.float64)
    given = batches(case, torch.float64, STEPS)
    module = WAYS[way](copy.deepcopy(reference), given[0][0])
    (losses, gradients), (expected, wanted) = trained(module, given), trained(reference, given)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    agree(plain_names(gradients), wanted, case.relative)
    state = plain_names(module.state_dict())
    agree(state, reference.state_dict(), 1e-6)
    fresh = case.module(torch.float64)
    fresh.load_state_dict(state)
    found = answers(module.eval(), given[0][0])
    torch.testing.assert_close(found, answers(reference.eval(), given[0][0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, answers(fresh.eval(), given[0][0]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "way"), cases("whole"))
def test_a_program_of_the_whole_takes_the_steps_of_pytorch(name: str, way: str) -> None:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    case = NAMED[name]
    module = case.module(torch.float64)
    given = batches(case, torch.float64, STEPS)
    inputs = given[0][0]
    returns_loss = "labels" in inputs
    program = burnish.compile(
        module,
        example_inputs=inputs if returns_loss else tuple(inputs.values()),
        optimizer=burnish.optim.sgd(lr=RATE, momentum=MOMENTUM),
        metrics=(),
        **({"output": "loss"} if returns_loss else {"loss": "cross_entropy"}),
    )
    feeds = [{name: tensor.numpy() for name, tensor in batch.items()} for batch, _ in given]
    if not returns_loss:
        feeds = [feed | {"labels": targets.numpy()} for feed, (_, targets) in zip(feeds, given, strict=True)]
        data = next(entry.name for entry in program.signature["predict"].inputs if entry.name not in program.initial_state())
        feeds = [{data: feed["input"], "labels": feed["labels"]} for feed in feeds]
    restored = copy.deepcopy(module)
    values = program.initial_state() | feeds[0]
    outputs = burnish.engines.get("torch").run(
        program.grad, {entry.name: values[entry.name] for entry in program.signature["grad"].inputs}
    )
    expected, wanted = trained(module, given)
    agree({name: torch.from_numpy(outputs[f"grad:{name}"]) for name in wanted}, wanted, case.relative)
    with burnish.Session(program, engine="torch") as session:
        losses = [session.step(feed)["loss"] for feed in feeds]
        burnish.torch.load_into(restored, session)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    agree(restored.state_dict(), module.state_dict(), 1e-6)
    torch.testing.assert_close(answers(restored.eval(), inputs), answers(module.eval(), inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["efficientnet"])
def test_ten_steps_in_float32_are_as_near_as_those_of_pytorch(name: str) -> None:
    case = NAMED[name]
    given = batches(case, torch.float32, LONG)
    theirs, exact = case.module(torch.float32), case.module(torch.float64)
    ours = wrapped(copy.deepcopy(theirs), given[0][0])
    (our_losses, _), (their_losses, _) = trained(ours, given), trained(theirs, given)
    true_losses, _ = trained(exact, batches(case, torch.float64, LONG))
    own = np.abs(np.subtract(their_losses, true_losses)).max()
    assert np.abs(np.subtract(our_losses, true_losses)).max() <= 4 * own + 1e-6

    def error(module: nn.Module) -> float:
        true = dict(exact.named_parameters())
        squares = [float((tensor.double() - true[key]).square().sum()) for key, tensor in module.named_parameters()]
        return sum(squares) ** 0.5

    assert error(ours) <= 4 * error(theirs)

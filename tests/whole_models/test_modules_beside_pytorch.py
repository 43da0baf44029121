"""The architectures that people train, compiled as modules: gradients, steps, buffers and evaluation beside PyTorch's own.

In float64, so that nothing but the mathematics is compared. ONNX holds the epsilon of a normalization in float32, and so does the
module here.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import burnish
from architectures.catalogue import ARCHITECTURES
from burnish.torch import load_into
from oracles import whole_models
from oracles.combinations import spread
from oracles.pytorch_modules import MODULES, tensors_of
from oracles.whole_models import Feeds, Trained

# Between them they have the parts that the others have.
REGULAR = ("mnist", "gpt2", "llama", "lraspp", "lstm", "swin_v2", "yolo")


def in_float64(module: nn.Module) -> nn.Module:
    module = module.double().train()
    for layer in module.modules():
        if isinstance(getattr(layer, "eps", None), float):
            layer.eps = float(np.float32(layer.eps))
    return module


def feeds(name: str) -> tuple[list[Feeds], list[torch.Tensor]]:
    """The batches as a program takes them, and the inputs of the first as the module does."""
    batches = whole_models.batches(name)
    cast = [
        {key: whole_models.as_dtype(tensor, torch.float64) for key, tensor in (inputs | labels).items()}
        for inputs, labels in batches
    ]
    return [{key: tensor.numpy() for key, tensor in batch.items()} for batch in cast], [cast[0][key] for key in batches[0][0]]


def compiled(name: str, module: nn.Module, examples: list[torch.Tensor]) -> burnish.Program:
    architecture = ARCHITECTURES[name]
    target = {"output": "output"} if architecture.loss is None else {"loss": architecture.loss}
    optimizer = whole_models.optimizer_of(architecture)
    return burnish.compile(module, example_inputs=tuple(examples), optimizer=optimizer, metrics=(), **target)


def gradients_agree(program: burnish.Program, batch: Feeds, expected: Trained) -> None:
    values = program.initial_state() | batch
    outputs = burnish.engines.get("torch").run(
        program.grad, {entry.name: values[entry.name] for entry in program.signature["grad"].inputs}
    )
    whole = np.sqrt(sum(np.sum(gradient**2) for gradient in expected.gradients.values()))
    errors = {
        name: np.linalg.norm(outputs[f"grad:{name}"] - gradient) / max(np.linalg.norm(gradient), 1e-6 * whole)
        for name, gradient in expected.gradients.items()
    }
    assert {name: error for name, error in errors.items() if error > 1e-10} == {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.campaign if name not in REGULAR else [pytest.mark.slow] * (name != "mnist"))
        for name in ARCHITECTURES
    ],
)
def test_a_module_trains_as_in_pytorch(name: str) -> None:
    module = in_float64(whole_models.build(name, "sdpa" if len(name) % 2 else "eager"))
    batches, examples = feeds(name)
    program = compiled(name, module, examples)
    data = [entry.name for entry in program.signature["predict"].inputs if entry.role is burnish.program.Role.DATA]
    renamed = dict(zip(whole_models.batches(name)[0][0], data, strict=True))
    batches = [{renamed.get(key, key): array for key, array in batch.items()} for batch in batches]
    expected = whole_models.in_pytorch(name, module, whole_models.batches(name))
    gradients_agree(program, batches[0], expected)

    with burnish.Session(program, engine="torch") as session:
        losses = [session.step(batch)["loss"] for batch in batches]
        trained = copy.deepcopy(module)
        load_into(trained, session)
        predicted = session.predict({key: batches[0][key] for key in data})
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-6)
    moved = {key: tensor.double().numpy() for key, tensor in trained.state_dict().items()}
    assert moved.keys() == expected.state.keys()
    errors = {key: np.linalg.norm(moved[key] - array) / (np.linalg.norm(array) or 1) for key, array in expected.state.items()}
    assert {key: error for key, error in errors.items() if error > 1e-6} == {}

    with torch.no_grad():
        answer = trained.eval()(*examples)
    np.testing.assert_allclose(predicted["output"], answer.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@spread("name", MODULES, test_all=5)
def test_a_small_module_trains_as_in_pytorch(name: str) -> None:
    torch.manual_seed(0)
    case = MODULES[name]
    module = in_float64(case.build())
    batches = [case.inputs(size, torch.Generator().manual_seed(size)) for size in (5, 4, 6)]
    examples = batches[0] if case.by_name else tuple(batches[0].values())
    has_loss = isinstance(module(**batches[0]) if case.by_name else module(*batches[0].values()), dict)
    # The module counted the batch of the call.
    module = in_float64(copy.deepcopy(module))
    start = copy.deepcopy(module)
    settings = {"output": "loss"} if has_loss else {"loss": "mse"}
    program = burnish.compile(module, example_inputs=examples, optimizer="sgd:lr=0.05,momentum=0.9", metrics=(), **settings)
    data = [entry.name for entry in program.signature["predict"].inputs if entry.role is burnish.program.Role.DATA]

    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    with burnish.Session(program, engine="torch") as session:
        for batch in batches:
            outputs = module(**batch) if case.by_name else module(*batch.values())
            feeds = dict(zip(data, (tensor.numpy() for tensor in batch.values()), strict=True))
            if has_loss:
                loss = outputs["loss"]
            else:
                targets = torch.randn_like(tensors_of(outputs)[0])
                loss = nn.functional.mse_loss(outputs, targets)
                feeds["targets"] = targets.numpy()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert session.step(feeds)["loss"] == pytest.approx(loss.item(), rel=1e-6)
        load_into(start, session)
    for key, tensor in module.state_dict().items():
        np.testing.assert_allclose(start.state_dict()[key], tensor, rtol=1e-6, atol=1e-7, err_msg=key)

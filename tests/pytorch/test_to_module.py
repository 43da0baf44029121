"""What a program predicts, as a plain module of PyTorch with the trained weights."""

import numpy as np
import pytest
import torch
from torch import nn

import burnish
from burnish.errors import ConfigurationError
from burnish.models import residual_network
from burnish.torch import to_module


@pytest.fixture(scope="module")
def program():
    return burnish.compile(residual_network(width=2, blocks=(1,)), optimizer="adam")


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).normal(size=(6, 1, 8, 8)).astype(np.float32)


def test_a_module_predicts_what_the_session_does(program, images):
    with burnish.Session(program, engine="onnxruntime") as session:
        for _ in range(3):
            session.step({"x": images, "labels": np.arange(6) % 10})
        module = to_module(session)
        (expected,) = session.predict({"x": images}).values()
        trained = session.state()
    np.testing.assert_allclose(module(torch.from_numpy(images)).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    named = dict(module.named_parameters())
    assert {f"param/{name}" for name in named} == {name for name in trained if name.startswith("param/")}
    assert {f"stat/{name}" for name, _ in module.named_buffers()} >= {name for name in trained if name.startswith("stat/")}
    assert all(np.array_equal(trained[f"param/{name}"], parameter.detach()) for name, parameter in named.items())


def test_pytorch_differentiates_the_module(program, images):
    module = to_module(program)
    nn.functional.cross_entropy(module(torch.from_numpy(images)), torch.arange(6)).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())


def test_the_module_calls_nothing_of_burnish(program):
    module = to_module(program)
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called
    assert not [target for target in called if "burnish" in f"{target} {getattr(target, '__module__', '')}"]


def test_a_batch_of_another_size_runs(program, images):
    module = to_module(program)
    assert module(torch.from_numpy(images)).shape == (6, 10)
    assert module(torch.from_numpy(images[:2])).shape == (2, 10)


def test_a_state_that_does_not_fit_is_refused(program):
    state = program.initial_state()
    name = next(name for name in state if name.startswith("param/"))
    with pytest.raises(ConfigurationError, match=f"'{name}' is missing"):
        to_module(program, {other: array for other, array in state.items() if other != name})
    with pytest.raises(ConfigurationError, match=rf"'{name}' has shape \[7\]"):
        to_module(program, state | {name: np.zeros(7, np.float32)})
    with burnish.Session(program) as session, pytest.raises(ConfigurationError, match="a state of its own"):
        to_module(session, state)


def test_a_file_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"give a session or a program, not str; burnish\.torch\.Layer takes an ONNX file"
    ):
        to_module("model.onnx")

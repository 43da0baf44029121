"""Recalibrated running statistics: numpy over the whole data set, and a loop in PyTorch for every layer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import burnish
from burnish.errors import ConfigurationError, EngineError, InputError
from torch_models import ResNet, export_onnx

torch.set_num_threads(1)
SIZES = (5, 2, 9, 1)


def network() -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    module = ResNet((1, 1), 8, 5)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.3)
            nn.init.normal_(layer.running_mean)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return module, export_onnx(module, torch.zeros(2, 3, 32, 32))


def batches(sizes: tuple[int, ...] = SIZES) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.normal(2, 3, (size, 3, 32, 32)).astype(np.float32), "labels": np.zeros(size, np.int64)} for size in sizes]


def pytorch_loop(
    module: nn.Module, data: list[dict[str, np.ndarray]], frozen: tuple[str, ...] = (), ddof: int = 0
) -> dict[str, np.ndarray]:
    """Run a module in float64 over the data in training mode, and take statistics of all that its layers received."""
    received: dict[str, list[np.ndarray]] = {}
    module = module.double().train()
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    for name, layer in layers.items():
        layer.train(name not in frozen)
        layer.register_forward_pre_hook(lambda _, inputs, name=name: received.setdefault(name, []).append(inputs[0].numpy()))
    with torch.no_grad():
        for batch in data:
            module(torch.from_numpy(batch["x"].astype(np.float64)))
    results = {}
    for name in layers:
        if name in frozen:
            continue
        everything = np.concatenate(received[name])
        results[f"stat/{name}.running_mean"] = everything.mean((0, 2, 3))
        results[f"stat/{name}.running_var"] = everything.var((0, 2, 3), ddof=ddof)
    return results


def assert_close(state: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, wanted in expected.items():
        assert state[name].dtype == np.float32
        assert np.linalg.norm(state[name] - wanted) <= tolerance * np.linalg.norm(wanted), name


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "ddof"), [("pytorch", 1), ("onnx", 0)])
def test_every_layer_agrees_with_a_loop_in_pytorch(rule: str, ddof: int) -> None:
    module, proto = network()
    session = burnish.Session(burnish.compile(proto, running_variance=rule))
    before = session.state()
    changed = burnish.surgery.recalibrate(session, batches())
    state = session.state()
    expected = pytorch_loop(module, batches(), ddof=ddof)
    assert set(changed) == set(expected) == {name for name in before if name.startswith("stat/")}
    assert_close(state, expected, 2e-6)
    for name, array in state.items():
        if name in changed:
            np.testing.assert_array_equal(array, changed[name])
        else:
            np.testing.assert_array_equal(array, before[name])


def test_the_first_layer_is_exact_however_the_data_is_split() -> None:
    """A mean of 10⁴ deviations: the digits of the variance survive, and the order of batches plays no part beyond rounding."""
    text = """
    <ir_version: 8, opset_import: ["": 18]>
    g (float[batch, 2, 4] x) => (float[batch, 2, 4] y)
    <float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] variance = {1, 1}> {
        y = BatchNormalization(x, scale, bias, mean, variance)
    }
    """
    session = burnish.Session(burnish.compile(onnx.parser.parse_model(text), loss="mse", running_variance="onnx"))
    everything = (1e4 + np.random.default_rng(0).normal(size=(40, 2, 4))).astype(np.float32)
    wide = everything.astype(np.float64)
    for borders in ([], [1, 2, 30], list(range(1, 40))):
        changed = burnish.surgery.recalibrate(session, [{"x": part} for part in np.split(everything, borders)])
        np.testing.assert_array_equal(changed["stat/mean"], wide.mean((0, 2)).astype(np.float32))
        np.testing.assert_allclose(changed["stat/variance"], wide.var((0, 2)), rtol=1e-6)


@pytest.mark.slow
def test_frozen_layers_stay_and_normalize_with_their_running_statistics() -> None:
    module, proto = network()
    frozen = ("bn1", "stages.0.0.bn2")
    session = burnish.Session(burnish.compile(proto, norm={name: "frozen" for name in frozen}, running_variance="onnx"))
    before = session.state()
    changed = burnish.surgery.recalibrate(session, batches())
    assert not any(name.removeprefix("stat/").rsplit(".", 1)[0] in frozen for name in changed)
    for name in frozen:
        np.testing.assert_array_equal(session.state()[f"stat/{name}.running_mean"], before[f"stat/{name}.running_mean"])
    assert_close(session.state(), pytorch_loop(module, batches(), frozen), 2e-6)


@pytest.mark.slow
def test_at_the_weights_of_now() -> None:
    """After training, and the session goes on: evaluation uses the new statistics."""
    module, proto = network()
    session = burnish.Session(burnish.compile(proto, optimizer=burnish.optim.sgd(lr=0.05), running_variance="onnx"))
    for batch in batches((8, 8)):
        session.step(batch)
    state = session.state()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(state[f"param/{name}"]))
    (batch,) = batches((16,))
    unadjusted = session.evaluate(batch)["loss"]
    changed = burnish.surgery.recalibrate(session, [batch])
    assert_close(changed, pytorch_loop(module, [batch]), 2e-6)
    assert session.evaluate(batch)["loss"] != unadjusted
    assert session.step_count == 2
    session.step(batch)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ghost:2", "renorm"])
def test_other_policies_take_the_statistics_of_whole_batches(policy: str) -> None:
    module, proto = network()
    session = burnish.Session(burnish.compile(proto, norm=policy, running_variance="onnx"))
    data = batches((4, 2))
    assert_close(burnish.surgery.recalibrate(session, data), pytorch_loop(module, data), 2e-6)


def test_the_reference_engine_of_a_session_measures() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 18]>
    g (double[batch, 2] x) => (double[batch, 2] y)
    <double[2] scale = {1, 1}, double[2] bias = {0, 0}, double[2] mean = {0, 0}, double[2] variance = {1, 1}> {
        y = BatchNormalization(x, scale, bias, mean, variance)
    }
    """
    session = burnish.Session(burnish.compile(onnx.parser.parse_model(text), loss="mse"), engine="reference")
    x = np.random.default_rng(0).normal(5, 2, (9, 2))
    changed = burnish.surgery.recalibrate(session, [{"x": x[:4]}, {"x": x[4:]}])
    np.testing.assert_allclose(changed["stat/mean"], x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(changed["stat/variance"], x.var(0), rtol=1e-14)


@pytest.mark.slow
def test_a_layer_that_runs_twice_gets_the_statistics_of_all_its_inputs() -> None:
    text = """
    <ir_version: 8, opset_import: ["": 18]>
    g (float[batch, 2] x) => (float[batch, 2] y)
    <float[2] scale = {2, 3}, float[2] bias = {1, -1}, float[2] mean = {0, 0}, float[2] variance = {1, 1}> {
        a = BatchNormalization <epsilon = 0.0> (x, scale, bias, mean, variance)
        y = BatchNormalization <epsilon = 0.0> (a, scale, bias, mean, variance)
    }
    """
    session = burnish.Session(burnish.compile(onnx.parser.parse_model(text), loss="mse", running_variance="onnx"))
    x = np.random.default_rng(0).normal(5, 2, (9, 2)).astype(np.float32)
    changed = burnish.surgery.recalibrate(session, [{"x": x[:4]}, {"x": x[4:]}])
    first = [part.astype(np.float64) for part in (x[:4], x[4:])]
    second = [(part - part.mean(0)) / part.std(0) * [2, 3] + [1, -1] for part in first]
    received = np.concatenate(first + second)
    np.testing.assert_allclose(changed["stat/mean"], received.mean(0), rtol=1e-6)
    np.testing.assert_allclose(changed["stat/variance"], received.var(0), rtol=1e-6)


DENSE = """
<ir_version: 8, opset_import: ["": 18]>
g (float[batch, 2] x) => (float[batch, 2] y)
<float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0, 0}, float[2] variance = {1, 1}> {
    [standardize] y = BatchNormalization(x, scale, bias, mean, variance)
}
"""


def dense_session(**options: object) -> burnish.Session:
    return burnish.Session(burnish.compile(onnx.parser.parse_model(DENSE), loss="mse", **options))  # type: ignore[arg-type]


def test_a_single_element_under_the_unbiased_rule() -> None:
    session = dense_session(running_variance="pytorch")
    with pytest.raises(
        InputError, match=r"'standardize' has a single element per channel in the whole data set.*running_variance='onnx'"
    ):
        burnish.surgery.recalibrate(session, [{"x": np.ones((1, 2), np.float32)}])
    changed = burnish.surgery.recalibrate(session, [{"x": np.full((1, 2), number, np.float32)} for number in (1, 4)])
    np.testing.assert_array_equal(changed["stat/variance"], [4.5, 4.5])


def test_nothing_to_recalibrate() -> None:
    with pytest.raises(ConfigurationError, match=r"no running statistics that training updates.*norm='train'.*surgery\.insert"):
        burnish.surgery.recalibrate(dense_session(norm="frozen"), [{"x": np.ones((2, 2), np.float32)}])


def test_what_is_no_session_and_no_engine() -> None:
    session = dense_session()
    with pytest.raises(ConfigurationError, match=r"a Program holds none: give burnish\.Session\(program\)"):
        burnish.surgery.recalibrate(session.program, [])  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"engine=3 is not an engine: give one of onnxruntime, reference.*or an object"):
        burnish.surgery.recalibrate(session, [{"x": np.ones((2, 2), np.float32)}], engine=3)  # type: ignore[arg-type]


def failing() -> Iterator[dict[str, np.ndarray]]:
    yield {"x": np.ones((2, 2), np.float32)}
    yield {"x": np.full((2, 2), np.inf, np.float32)}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no batch to measure"),
        (failing(), "values at the layer 'standardize' are not finite"),
        ([{"labels": np.zeros(2)}], "lacks the input 'x'"),
        ([{"x": np.ones((2, 3), np.float32)}], r"'x' has shape \[2, 3\], and the model takes FLOAT of shape \[batch, 2\]"),
    ],
)
def test_bad_data_leaves_the_state_as_it_was(data: object, message: str) -> None:
    session = dense_session()
    before = session.state()
    with pytest.raises(InputError, match=message):
        burnish.surgery.recalibrate(session, data)  # type: ignore[arg-type]
    for name, array in session.state().items():
        np.testing.assert_array_equal(array, before[name])

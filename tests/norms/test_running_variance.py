"""The running statistics that a step leaves, by the standard's rule and by PyTorch's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
normalized (float[batch, 2] x) => (float[batch, 2] logits)
<float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0.5, -1}, float[2] variance = {2, 3}> {
    logits = BatchNormalization <momentum = 0.75> (x, scale, bias, mean, variance)
}
"""


def batches(number, samples, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(3, 2, (samples, 2)).astype(np.float32) for _ in range(number)]


@pytest.mark.parametrize("samples", [2, 5])
@pytest.mark.parametrize(("rule", "ddof"), [("onnx", 0), ("pytorch", 1)])
def test_running_statistics_after_a_step(rule, ddof, samples):
    program = burnish.compile(onnx.parser.parse_model(MODEL), running_variance=rule)
    session = burnish.Session(program)
    (x,) = batches(1, samples)
    session.step({"x": x, "labels": np.zeros(samples, np.int64)})
    state = session.state()
    np.testing.assert_allclose(state["stat/mean"], 0.75 * np.array([0.5, -1]) + 0.25 * x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(state["stat/variance"], 0.75 * np.array([2, 3]) + 0.25 * x.var(axis=0, ddof=ddof), rtol=1e-5)


@pytest.mark.parametrize(("rule", "ddof"), [("onnx", 0), ("pytorch", 1)])
def test_the_cumulative_average_is_the_mean_over_the_steps(rule, ddof):
    program = burnish.compile(onnx.parser.parse_model(MODEL), running_variance=rule, norm="train:momentum=cumulative")
    session = burnish.Session(program)
    steps = batches(4, 6)
    for number in range(1, len(steps) + 1):
        session.step({"x": steps[number - 1], "labels": np.zeros(6, np.int64)})
        state = session.state()
        np.testing.assert_allclose(state["stat/mean"], np.mean([x.mean(axis=0) for x in steps[:number]], axis=0), rtol=1e-5)
        variance = np.mean([x.var(axis=0, ddof=ddof) for x in steps[:number]], axis=0)
        np.testing.assert_allclose(state["stat/variance"], variance, rtol=1e-5)


def test_a_cumulative_average_goes_on_from_the_batches_that_were_seen():
    program = burnish.compile(onnx.parser.parse_model(MODEL), norm="train:momentum=cumulative,seen=3")
    session = burnish.Session(program)
    mean = np.array([0.5, -1])
    for number, x in enumerate(batches(3, 6), start=4):
        session.step({"x": x, "labels": np.zeros(6, np.int64)})
        mean += (x.mean(axis=0) - mean) / number
        np.testing.assert_allclose(session.state()["stat/mean"], mean, rtol=1e-5, atol=1e-6)


def test_a_momentum_of_the_policy_stands_in_for_the_model_s():
    program = burnish.compile(onnx.parser.parse_model(MODEL), norm=burnish.norms.Train(momentum=0.5))
    session = burnish.Session(program)
    (x,) = batches(1, 6)
    session.step({"x": x, "labels": np.zeros(6, np.int64)})
    np.testing.assert_allclose(session.state()["stat/mean"], 0.5 * np.array([0.5, -1]) + 0.5 * x.mean(axis=0), rtol=1e-5)


SHARED = """
<ir_version: 8, opset_import: ["": 18]>
twice (float[batch, 2] x) => (float[batch, 2] logits)
<float[2] scale = {1, 1}, float[2] bias = {0, 0}, float[2] mean = {0.5, -1}, float[2] variance = {2, 3},
 float[2] factor = {2, 3}> {
    first = BatchNormalization <momentum = 0.75> (x, scale, bias, mean, variance)
    scaled = Mul(x, factor)
    second = BatchNormalization <momentum = 0.75> (scaled, scale, bias, mean, variance)
    logits = Add(first, second)
}
"""


@pytest.mark.parametrize("norm", ["train", "train:momentum=cumulative"])
def test_statistics_that_two_layers_share_are_updated_by_both(norm):
    program = burnish.compile(onnx.parser.parse_model(SHARED), norm=norm, trainable=["scale", "bias"])
    session = burnish.Session(program)
    expected, updates = np.array([0.5, -1]), 0
    for x in batches(3, 6):
        session.step({"x": x, "labels": np.zeros(6, np.int64)})
        for used in (x, x * np.array([2, 3])):
            updates += 1
            rate = 0.25 if norm == "train" else 1 / updates
            expected = expected + rate * (used.mean(axis=0) - expected)
        np.testing.assert_allclose(session.state()["stat/mean"], expected, rtol=1e-5)

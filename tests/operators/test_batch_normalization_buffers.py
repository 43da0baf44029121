"""Training-mode batch normalization on ONNX Runtime, which writes its running outputs over its running inputs.

The oracle is the reference engine, which keeps every value apart.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from oracles.combinations import diagonal, named, spread


def two_layers(channels: int, second: str) -> onnx.ModelProto:
    """Two normalization layers of as many channels; ``second`` names scale and bias of the second one."""
    scale, bias = second.split(",")
    ones, zeros = (f"{{{', '.join([digit] * channels)}}}" for digit in "10")
    vector = f"float[{channels}]"
    return onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["": 18]>
two_layers (float[batch, {channels}, length] x) => (float[batch, {channels}] y)
<{vector} scale1 = {ones}, {vector} bias1 = {zeros}, {vector} scale2 = {ones}, {vector} bias2 = {zeros},
 {vector} mean1 = {zeros}, {vector} variance1 = {ones}, {vector} mean2 = {zeros}, {vector} variance2 = {ones}> {{
    axes = Constant <value_ints = [2]> ()
    first = BatchNormalization (x, scale1, bias1, mean1, variance1)
    active = Relu (first)
    second = BatchNormalization (active, {scale}, {bias}, mean2, variance2)
    square = Mul (second, first)
    y = ReduceMean <keepdims = 0> (square, axes)
}}""")


def batch(channels: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(2, 3, (6, channels, 5)).astype(np.float32)
    return {"x": x * np.float32(scale), "targets": generator.normal(size=(6, channels)).astype(np.float32)}


@pytest.mark.slow
@diagonal(("channels", [1, 3]), ("second", named(["scale2,bias2", "scale1,bias1"], ["apart", "tied"])))
def test_layers_of_equal_size_keep_their_own_statistics(channels, second):
    program = burnish.compile(two_layers(channels, second), loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    states = []
    for engine in ("onnxruntime", "reference"):
        session = burnish.Session(program, engine=engine)
        session.step(batch(channels))
        session.step(batch(channels, 2.0))
        states.append(session.state())
    for name, expected in states[1].items():
        np.testing.assert_allclose(states[0][name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@spread("value", [np.nan, np.inf], test=1)
def test_a_step_that_failed_leaves_no_trace_in_the_next(value):
    program = burnish.compile(two_layers(3, "scale2,bias2"), loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    session, untouched = burnish.Session(program), burnish.Session(program)
    for each in (session, untouched):
        each.step(batch(3))
    with pytest.raises(burnish.errors.NonFiniteLossError, match="loss at step 1"):
        session.step(batch(3, value))
    assert session.step(batch(3)) == untouched.step(batch(3))
    for name, expected in untouched.state().items():
        np.testing.assert_array_equal(session.state()[name], expected, err_msg=name)

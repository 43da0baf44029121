"""The running statistics that a step leaves, by the standard's rule and by PyTorch's, down to a single element per channel."""

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


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize(("rule", "ddof"), [("onnx", 0), ("pytorch", 1)])
def test_running_statistics_after_a_step(rule, ddof, samples):
    program = burnish.compile(onnx.parser.parse_model(MODEL), running_variance=rule)
    session = burnish.Session(program)
    x = np.random.default_rng(0).normal(3, 2, (samples, 2)).astype(np.float32)
    session.step({"x": x, "labels": np.zeros(samples, np.int64)})
    state = session.state()
    batch_variance = x.var(axis=0, ddof=ddof if samples > 1 else 0)
    np.testing.assert_allclose(state["stat/mean"], 0.75 * np.array([0.5, -1]) + 0.25 * x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(state["stat/variance"], 0.75 * np.array([2, 3]) + 0.25 * batch_variance, rtol=1e-5)

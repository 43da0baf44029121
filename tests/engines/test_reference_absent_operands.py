"""Outputs that one node leaves out are not inputs that another leaves out, on the reference engine."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from burnish import engines

HEADER = '<ir_version: 8, opset_import: ["": 18]>\n'


def test_an_input_left_out_behind_an_output_left_out() -> None:
    """Nobody wants the mean of the layer normalization; Clip has no lower bound, in a branch either."""
    proto = onnx.parser.parse_model(
        HEADER
        + """g (float[N, 4] x, bool yes) => (float[N, 4] y, float[N, 4] z, float[N, 1] r)
<float[4] scale = {1, 1, 1, 1}, float top = {0.5}> {
    n, , r = LayerNormalization (x, scale)
    y = Clip (n, , top)
    z = If (yes) <
        then_branch = a () => (c) { m, , s = LayerNormalization (x, scale) c = Clip (m, , top) },
        else_branch = b () => (d) { d = Identity (x) }
    >
}"""
    )
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    found = engines.get("reference").run(ir.from_proto(proto), {"x": x, "yes": np.array(True)})
    deviation = np.sqrt(x.var(1, keepdims=True) + 1e-5)
    expected = np.minimum((x - x.mean(1, keepdims=True)) / deviation, 0.5)
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["z"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["r"], 1 / deviation, rtol=1e-5)

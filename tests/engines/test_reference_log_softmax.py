"""LogSoftmax on the reference engine, where a probability is too small for the dtype."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import burnish


@pytest.mark.parametrize("axis", ["", "<axis = 0>", "<axis = 1>"])
def test_a_probability_that_underflows_has_a_logarithm(axis):
    model = onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 18]>
scores (float[rows, 3] x) => (float[rows, 3] y) {{ y = LogSoftmax {axis} (x) }}""")
    x = np.array([[0, 200, 1500], [3, 2, 1], [-700, 0, 700]], np.float32)
    y = burnish.engines.get("reference").run(burnish.load(model), {"x": x})["y"]
    expected = torch.log_softmax(torch.from_numpy(x), dim=0 if "0" in axis else 1).numpy()
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    assert y.dtype == np.float32

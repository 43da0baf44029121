"""Inference graphs keep their digits where a runtime's expansion of a normalization operator would lose them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import burnish

MODELS = {
    "GroupNormalization": (
        "y = GroupNormalization <num_groups = 2, epsilon = 1e-5> (x, scale, bias)",
        lambda x: functional.group_norm(x, 2, eps=1e-5),
    ),
    "MeanVarianceNormalization": (
        "n = MeanVarianceNormalization <axes = [2, 3]> (x) m = Mul (n, weight) y = Add (m, shift)",
        lambda x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True, correction=0),
    ),
}


@pytest.mark.parametrize("operator", MODELS)
def test_predictions_and_exports_with_a_mean_of_a_thousand_deviations(operator, tmp_path):
    body, oracle = MODELS[operator]
    model = onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 21]>
layer (float[batch, 4, 6, 6] x) => (float[batch, 4, 6, 6] y)
<float[4] scale = {{1, 1, 1, 1}}, float[4] bias = {{0, 0, 0, 0}},
 float[4, 1, 1] weight = {{1, 1, 1, 1}}, float[4, 1, 1] shift = {{0, 0, 0, 0}}> {{ {body} }}""")
    x = (np.random.default_rng(0).standard_normal((3, 4, 6, 6)) + 1000).astype(np.float32)
    exact = oracle(torch.from_numpy(x).double()).numpy()
    session = burnish.Session(burnish.compile(model, loss="mse"))
    exported = burnish.load(session.export(tmp_path / "exported.onnx"))
    for y in (session.predict({"x": x})["y"], burnish.engines.get("onnxruntime").run(exported, {"x": x})["y"]):
        assert np.linalg.norm(y - exact) < 3e-7 * np.linalg.norm(exact)

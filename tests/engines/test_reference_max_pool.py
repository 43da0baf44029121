"""Max pooling on the reference engine: values, indices and the gradient that is put at the indices."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from torch.nn import functional

import burnish


@pytest.mark.parametrize(
    ("attributes", "options"),
    [
        ("kernel_shape=[3,3]", {}),
        ("kernel_shape=[3,3],strides=[1,1],pads=[1,1,1,1]", {"padding": 1, "stride": 1}),
        ("kernel_shape=[3,3],strides=[2,2]", {"stride": 2}),
        ("kernel_shape=[3,3],strides=[2,1],dilations=[2,1]", {"stride": (2, 1), "dilation": (2, 1)}),
    ],
)
def test_the_gradient_goes_where_the_maximum_was(attributes, options):
    model = onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 18]>
pool (double[batch, 2, 7, 7] x) => (double[batch, 2, height, width] y) {{ y = MaxPool <{attributes}> (x) }}""")
    random = np.random.default_rng(0)
    x = torch.from_numpy(random.standard_normal((3, 2, 7, 7))).requires_grad_()
    y = functional.max_pool2d(x, 3, **({"stride": 1} | options))
    cotangent = random.standard_normal(tuple(y.shape))
    y.backward(torch.from_numpy(cotangent))
    outputs = burnish.engines.get("reference").run(burnish.grad(model, "x"), {"x": x.detach().numpy(), "cotangent:y": cotangent})
    np.testing.assert_array_equal(outputs["y"], y.detach().numpy())
    np.testing.assert_allclose(outputs["grad:x"], x.grad.numpy(), rtol=1e-12)

"""The gradient of a softmax as PyTorch's one kernel of it."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch.families.softmax.fusion import fuse_softmax

TEXT = """
<ir_version: 10, opset_import: ["": 18]>
graph (float[batch, 6, 50] x) => (float[batch, 6, 50] y) {{
    y = Softmax <axis = {axis}> (x)
}}"""


@pytest.mark.parametrize("axis", [-1, 1])
def test_the_gradient_of_a_softmax_is_one_kernel_and_keeps_its_digits(axis):
    source = onnx.parser.parse_model(TEXT.format(axis=axis))
    model = burnish.grad(source, wrt=["x"], of="y")
    plain = model.clone()
    fuse_softmax(model.graph)
    kinds = [node.op_type for node in model.graph if node.op_type != "Constant"]
    assert sorted(kinds) == ["FusedSoftmaxGrad", "Softmax"]
    generator = np.random.default_rng(0)
    x, dy = (generator.normal(size=(3, 6, 50)).astype(np.float32) * scale for scale in (3, 1))
    found = TorchEngine().run(model, {"x": x, "cotangent:y": dy})
    exponentials = np.exp(x.astype(np.float64))
    y = exponentials / exponentials.sum(axis, keepdims=True)
    exact = y * (dy - (dy * y).sum(axis, keepdims=True))
    np.testing.assert_allclose(found["grad:x"], exact, rtol=1e-5, atol=1e-7)
    assert [node.op_type for node in plain.graph].count("Mul") == 2


def test_what_is_read_elsewhere_stays():
    text = """
<ir_version: 10, opset_import: ["": 18]>
graph (float[2, 30] x, float[2, 30] dy) => (float[2, 30] dx, float[2, 30] p) {
    axes = Constant <value_ints = [-1]> ()
    y = Softmax <axis = -1> (x)
    p = Mul (dy, y)
    s = ReduceSum <keepdims = 1> (p, axes)
    d = Sub (dy, s)
    dx = Mul (d, y)
}"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))
    fuse_softmax(model.graph)
    assert "FusedSoftmaxGrad" not in [node.op_type for node in model.graph]

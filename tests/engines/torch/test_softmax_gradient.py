"""The gradients of Softmax and LogSoftmax as PyTorch's one kernel of each, and in standard operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish.engines.torch import TorchEngine
from burnish.operators.activation import LOG_SOFTMAX_GRAD, SOFTMAX_GRAD
from oracles.semantic_gradients import semantic_gradients

TEXT = """
<ir_version: 10, opset_import: ["": 18]>
graph ({dtype}[batch, 6, 50] x) => ({dtype}[batch, 6, 50] y) {{
    y = {operator} <axis = {axis}> (x)
}}"""
ROUNDING = {"float": 2.0**-23, "double": 2.0**-52}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("operator", [SOFTMAX_GRAD, LOG_SOFTMAX_GRAD], ids=["Softmax", "LogSoftmax"])
def test_the_gradient_is_one_operator_whose_kernel_and_lowering_keep_its_digits(operator, axis, dtype):
    forward = operator.name.removesuffix("Grad")
    source = onnx.parser.parse_model(TEXT.format(operator=forward, axis=axis, dtype=dtype))
    model = semantic_gradients(source, wrt=["x"], of="y")
    assert [node.op_type for node in model.graph] == [forward, operator.name]
    generator = np.random.default_rng(0)
    kind = np.float32 if dtype == "float" else np.float64
    x, dy = (generator.normal(size=(3, 6, 50)).astype(kind) * scale for scale in (kind(3), kind(1)))
    feeds = {"x": x, "cotangent:y": dy}
    exponentials = np.exp(x.astype(np.longdouble))
    y = exponentials / exponentials.sum(axis, keepdims=True)
    if operator is SOFTMAX_GRAD:
        exact = y * (dy - (dy * y).sum(axis, keepdims=True))
    else:
        exact = dy - y * dy.astype(np.longdouble).sum(axis, keepdims=True)
    lowered = burnish.grad(source, wrt=["x"], of="y")
    for found in (TorchEngine().run(model, feeds), TorchEngine().run(lowered, feeds)):
        assert found["grad:x"].dtype == kind
        np.testing.assert_allclose(found["grad:x"], exact.astype(np.float64), rtol=80 * ROUNDING[dtype], atol=8 * ROUNDING[dtype])

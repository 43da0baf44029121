"""Quantization as ONNX Runtime's own operators, which quantize_static writes for integers of sixteen bits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import burnish
from oracles.onnxruntime_outputs import onnxruntime_outputs

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)


def rounded(dtype: type, opset: int, attributes: dict[str, int] | None = None) -> onnx.ModelProto:
    """``x`` after a quantization, times a matrix."""
    constants = {"scale": np.float32(0.05), "zero": np.array(3 if np.issubdtype(dtype, np.signedinteger) else 128, dtype), "w": W}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], domain="com.microsoft", **(attributes or {})),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"], domain="com.microsoft", **(attributes or {})),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "rounded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize(("dtype", "opset"), [(np.uint8, 13), (np.int8, 18), (np.uint16, 21), (np.int16, 21)])
def test_the_standard_has_it_too(dtype: type, opset: int) -> None:
    file = rounded(dtype, opset)
    loaded = burnish.load(file)
    assert {node.domain for node in loaded.graph} == {""}
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, {"x": X})["y"], onnxruntime_outputs(file, {"x": X})["y"])
    gradients = burnish.grad(file, ["x", "w"])
    results = onnxruntime_outputs(gradients, {"x": X, "cotangent:y": np.ones((4, 2), np.float32)})
    np.testing.assert_allclose(results["grad:x"], np.broadcast_to(W.sum(1), (4, 3)), rtol=1e-6)


def test_integers_that_the_opset_does_not_have_stay() -> None:
    with pytest.raises(burnish.errors.ModelError, match="the dtype of 'q'"):
        burnish.load(rounded(np.uint16, 17))

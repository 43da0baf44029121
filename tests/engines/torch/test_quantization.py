"""Integers that stand for floating-point numbers on the torch engine, beside ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import burnish
from burnish.engines import registry

X = (2 * np.random.default_rng(0).normal(size=(2, 3, 4))).astype(np.float32)

MODELS = {
    "one scale": """(float[2, 3, 4] x) => (uint8[2, 3, 4] q, float[2, 3, 4] y) <float s = {0.021}, uint8 z = {100}> {
        q = QuantizeLinear (x, s, z)
        y = DequantizeLinear (q, s, z)
    }""",
    "no zero point": """(float[2, 3, 4] x) => (uint8[2, 3, 4] q, float[2, 3, 4] y) <float s = {0.021}> {
        q = QuantizeLinear (x, s)
        y = DequantizeLinear (q, s)
    }""",
    "sixteen bits": """(float[2, 3, 4] x) => (uint16[2, 3, 4] q, float[2, 3, 4] y)
    <float s = {0.0001}, uint16 z = {30000}> {
        q = QuantizeLinear (x, s, z)
        y = DequantizeLinear (q, s, z)
    }""",
    "one vector of one scale": """(float[2, 3, 4] x) => (int8[2, 3, 4] q, float[2, 3, 4] y)
    <float[1] s = {0.02}, int8[1] z = {3}> {
        q = QuantizeLinear (x, s, z)
        y = DequantizeLinear (q, s, z)
    }""",
    "an axis": """(float[2, 3, 4] x) => (int8[2, 3, 4] q, float[2, 3, 4] y)
    <float[3] s = {0.01, 0.02, 0.03}, int8[3] z = {1, -2, 3}> {
        q = QuantizeLinear <axis = -2> (x, s, z)
        y = DequantizeLinear <axis = -2> (q, s, z)
    }""",
    "blocks": """(float[2, 3, 4] x) => (int8[2, 3, 4] q, float[2, 3, 4] y)
    <float[2, 2, 4] s = {0.01, 0.02, 0.03, 0.01, 0.02, 0.01, 0.02,
     0.03, 0.03, 0.01, 0.02, 0.03, 0.02, 0.01, 0.02, 0.03}> {
        q = QuantizeLinear <axis = 1, block_size = 2, output_dtype = 3> (x, s)
        y = DequantizeLinear <axis = 1, block_size = 2> (q, s)
    }""",
    "a scale of the data": """(float[2, 3, 4] x) => (uint8[2, 3, 4] q, float s, uint8 z) {
        q, s, z = DynamicQuantizeLinear (x)
    }""",
    "a convolution": """(float[2, 3, 4] x) => (int32[2, 2, 5] p, int32[2, 2, 2] r)
    <uint8[2, 3, 2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, uint8 wz = {4}, uint8 z = {128}, float s = {0.03}> {
        q = QuantizeLinear (x, s, z)
        p = ConvInteger <pads = [1, 1]> (q, w, z, wz)
        r = ConvInteger <strides = [2], auto_pad = "SAME_UPPER"> (q, w, , wz)
    }""",
    "a product": """(float[2, 3, 4] x) => (int32[2, 3, 2] p, int32[2, 3, 2] r)
    <int8[4, 2] w = {1, -2, 3, -4, 60, -64, 63, 5}, int8[2] wz = {1, -1}, uint8 z = {128}, float s = {0.03}> {
        q = QuantizeLinear (x, s, z)
        p = MatMulInteger (q, w, z, wz)
        r = MatMulInteger (q, w)
    }""",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("factor", [1, 0])
def test_integers_are_those_of_onnx_runtime(name: str, factor: int) -> None:
    model = burnish.load(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {MODELS[name]}'))
    one, other = (registry.get(engine).load(model)({"x": factor * X}) for engine in ("onnxruntime", "torch"))
    for output, expected in one.items():
        assert other[output].dtype == expected.dtype
        if name == "a scale of the data" and factor == 0 and output == "s":
            assert other[output] in (0, 1)  # the scale of zeros alone is open
        elif expected.dtype == np.float32:
            np.testing.assert_allclose(other[output], expected, rtol=1e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(other[output], expected)


def test_a_convolution_of_integers_with_a_zero_point_for_each_channel() -> None:
    """ONNX Runtime has none; of a kernel of one place it is a product."""
    model = burnish.load(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (uint8[2, 3, 4] q, uint8 z) => (int32[2, 2, 4] p)
        <uint8[2, 3, 1] w = {1, 2, 3, 4, 5, 6}, uint8[2] wz = {3, 5}> { p = ConvInteger (q, w, z, wz) }""")
    )
    q = np.random.default_rng(0).integers(0, 255, (2, 3, 4)).astype(np.uint8)
    found = registry.get("torch").load(model)({"q": q, "z": np.asarray(7, np.uint8)})["p"]
    weight = np.arange(1, 7).reshape(2, 3) - np.array([[3], [5]])
    np.testing.assert_array_equal(found, weight @ (q.astype(np.int32) - 7))

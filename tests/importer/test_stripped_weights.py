"""Weights that a file holds by their shape alone."""

from __future__ import annotations

import numpy as np
import onnx

from burnish.importer import InitializerKind, classify_initializers, load

NETWORK = """
<ir_version: 10, opset_import: ["": 18]>
network (float[1, 2, 4, 4] x) => (float y)
<float[1, 1] single = {5}, float[2, 2] unread = {1, 2, 3, 4}, int64[4] k = {3, 2, 3, 3}, int64[1] c = {3},
 int64[4] s = {1, 3, 1, 1}> {
  w = ConstantOfShape <value = float[1] {0.5}> (k)
  scale = ConstantOfShape <value = float[1] {1.0}> (c)
  bias = ConstantOfShape (c)
  mean = ConstantOfShape (c)
  variance = ConstantOfShape <value = float[1] {1.0}> (c)
  factor = ConstantOfShape <value = float[1] {2.0}> (c)
  shift = ConstantOfShape (c)
  factors = Reshape(factor, s)
  shifts = Reshape(shift, s)
  convolved = Conv(x, w)
  normal = BatchNormalization(convolved, scale, bias, mean, variance)
  scaled = Mul(normal, factors)
  shifted = Add(scaled, shifts)
  y = Div(shifted, single)
}"""


def kinds(text: str) -> dict[str, InitializerKind]:
    return classify_initializers(load(onnx.parser.parse_model(text)))


def test_fills_where_layers_read_weights_are_weights():
    found = kinds(NETWORK)
    weights = {name for name, kind in found.items() if kind is InitializerKind.WEIGHT}
    statistics = {name for name, kind in found.items() if kind is InitializerKind.STATISTIC}
    assert weights == {
        "w",
        "scale",
        "bias",
        "factor",
        "shift",
        "single",
    }  # beside a matrix of one element, and one that nothing reads
    assert statistics == {"mean", "variance"}
    value = load(onnx.parser.parse_model(NETWORK)).graph.initializers["w"]
    assert value.const_value is not None
    np.testing.assert_array_equal(value.const_value.numpy(), np.full((3, 2, 3, 3), 0.5, np.float32))


def test_a_fill_takes_no_memory():
    text = """
<ir_version: 10, opset_import: ["": 18]>
dense (float[1, 30000] x) => (float y) <int64[2] extents = {30000, 30000}> { w = ConstantOfShape(extents) y = Gemm(x, w) }"""
    value = load(onnx.parser.parse_model(text)).graph.initializers["w"]
    assert value.const_value is not None
    assert value.const_value.numpy().strides == (0, 0)


def test_in_a_model_with_weights_a_fill_is_what_a_layer_lacks():
    text = """
<ir_version: 10, opset_import: ["": 18]>
dense (float[1, 3] x) => (float y) <int64[1] extents = {1}, float[3, 1] held = {1, 2, 3}> {
  zero = ConstantOfShape(extents)
  y = Gemm(x, held, zero)
}"""
    assert {name for name, kind in kinds(text).items() if kind is InitializerKind.WEIGHT} == {"held"}

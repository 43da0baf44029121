"""A graph in float64 on the reference engine."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from burnish.engines.reference import ReferenceEngine
from burnish.rewriting.change_dtypes import compute_in_float64

TEXT = """<ir_version: 10, opset_import: ["": 18]>
network (float[2, 3] x, int64[2] shape, bool flag) => (float[2, 3] y, float16[2, 3] half, int64[2, 3] rounded)
<float[3] w = {0.1, 0.2, 0.3}>
{
    third = Constant <value_float = 0.3333333> ()
    zeros = ConstantOfShape (shape)
    sixteen = Cast <to = 10> (x)
    back = Cast <to = 1> (sixteen)
    sum = Add (back, zeros)
    scaled = Mul (sum, w)
    chosen = If (flag) <
        then_branch = then () => (float[2, 3] a) { half_of = Constant <value = float {0.5}> () a = Mul (scaled, half_of) },
        else_branch = otherwise () => (float[2, 3] b) { b = Identity (scaled) }
    >
    y = Mul (chosen, third)
    half = Cast <to = 10> (y)
    rounded = Cast <to = 7> (y)
}"""


def test_every_floating_point_value_is_float64_and_nothing_is_rounded_on_the_way():
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TEXT)))
    wide = compute_in_float64(model)
    assert {value.dtype for value in wide.graph.inputs} == {ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.BOOL}
    x = np.random.default_rng(0).normal(size=(2, 3))
    found = ReferenceEngine().run(wide, {"x": x, "shape": np.array([2, 3]), "flag": np.array(True)})
    expected = x * np.float32([0.1, 0.2, 0.3]).astype(float) * 0.5 * float(np.float32(0.3333333))
    np.testing.assert_allclose(found["y"], expected, rtol=1e-15)
    np.testing.assert_array_equal(found["half"], found["y"])
    assert found["half"].dtype == np.float64
    assert found["rounded"].dtype == np.int64


def test_the_model_is_left_as_it_is():
    model = ir.from_proto(onnx.parser.parse_model(TEXT))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    compute_in_float64(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before

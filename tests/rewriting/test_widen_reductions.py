"""Sums of sixteen-bit values are taken in float32, and not rounded where float32 is wanted."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.graph.uses import remove_unused
from burnish.rewriting.change_dtypes import widen_reductions
from oracles.rewritten import rewritten

X = np.full((2, 5000), 20.0, np.float16)


def widened(nodes: str, outputs: str) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float16[2, 5000] x) => ({outputs}) {{ {nodes} }}'
    model = rewritten(widen_reductions, ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))))
    remove_unused(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


AXIS = "axis = Constant<value_ints = [1]>() "


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
@pytest.mark.parametrize("between", ["", "Squeeze", "Transpose"])
def test_a_sum_beyond_float16_is_whole_where_float32_is_wanted(engine, between):
    """2 x 5000 x 20 = 200,000, and the largest float16 is 65,504."""
    shaped = f"t = {between}(s) y = Cast<to = 1>(t)" if between else "y = Cast<to = 1>(s)"
    model = widened(AXIS + "s = ReduceSum(x, axis) " + shaped, "float y")
    assert operators(model) == ["Cast", "ReduceSum", *([between] if between else [])]
    np.testing.assert_array_equal(burnish.engines.get(engine).run(model, {"x": X})["y"].ravel(), [1e5, 1e5])


def test_what_reads_the_sum_in_sixteen_bits_does_so_still():
    model = widened(AXIS + "y = ReduceMean(x, axis)", "float16[2, 1] y")
    assert operators(model) == ["Cast", "ReduceMean", "Cast"]
    assert [(value.name, value.dtype) for value in model.graph.outputs] == [("y", ir.DataType.FLOAT16)]
    np.testing.assert_array_equal(burnish.engines.get("reference").run(model, {"x": X})["y"], [[20], [20]])


def test_a_sum_that_is_read_both_ways():
    model = widened(AXIS + "s = ReduceSum(x, axis) y = Cast<to = 1>(s) z = Neg(s)", "float[2, 1] y, float16[2, 1] z")
    outputs = burnish.engines.get("reference").run(model, {"x": X})
    np.testing.assert_array_equal(outputs["y"], [[1e5], [1e5]])
    np.testing.assert_array_equal(outputs["z"], np.array([[-np.inf], [-np.inf]], np.float16))


def test_float32_sums_stay_as_they_are():
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[2, 3] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }'
    model = ir.from_proto(onnx.parser.parse_model(text))
    assert operators(rewritten(widen_reductions, model)) == ["ReduceSum"]

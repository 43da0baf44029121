"""Equal casts of one value become one; those that are outputs, or differ, stay."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

import burnish
from burnish.rewriting.merge_equal_nodes import merge_casts
from oracles.rewritten import rewritten


def test_equal_casts_of_one_value_become_one():
    nodes = "a = Cast<to = 10>(x) b = Cast<to = 10>(x) c = Cast<to = 11>(x) d = Add(a, b) e = Cast<to = 11>(d) y = Mul(c, e)"
    outputs = "double[3] y, float16[3] z"
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float[3] x) => ({outputs}) {{ {nodes} z = Cast<to = 10>(x) }}'
    x = np.array([0.1, -2.3, 7.7], np.float32)
    engine, before = burnish.engines.get("reference"), ir.from_proto(onnx.parser.parse_model(text))
    expected = engine.run(before, {"x": x})
    model = rewritten(merge_casts, ir.from_proto(onnx.parser.parse_model(text)))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    targets = [node.attributes["to"].as_int() for node in model.graph if node.op_type == "Cast"]
    assert targets == [10, 11, 11, 10]
    for name, array in engine.run(model, {"x": x}).items():
        np.testing.assert_array_equal(array, expected[name])

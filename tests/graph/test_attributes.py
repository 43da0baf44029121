"""Attributes that are told their type are those that ``onnx_ir`` would make."""

import numpy as np
import onnx_ir as ir
import pytest

from burnish.graph import typed_attribute

VALUES = {
    "integers": [1, 2, 3],
    "a pair": (0, -1),
    "floats": [0.5, 1.0],
    "strings": ["a", "b"],
    "mixed numbers": [True, False],
    "integer": 3,
    "float": 0.25,
    "string": "reflect",
    "tensor": ir.tensor(np.arange(3, dtype=np.float32)),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_is_the_attribute_that_onnx_ir_makes(value):
    ours = ir.node("Operator", [], {"name": typed_attribute("name", value)}).attributes["name"]
    theirs = ir.node("Operator", [], {"name": value}).attributes["name"]
    assert (ours.name, ours.type) == (theirs.name, theirs.type)
    assert ours.value is theirs.value if isinstance(value, ir.Tensor) else ours.value == theirs.value

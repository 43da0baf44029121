"""Mean on the reference engine, whose operands are broadcast."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish


@pytest.mark.parametrize(("one", "other"), [([3], [2, 3]), ([2, 1], [1, 3]), ([2, 3], [3])])
def test_the_first_operand_may_be_the_smaller_one(one, other):
    model = onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 18]>
mean (double{one} a, double{other} b, double c) => (double[2, 3] y) {{ y = Mean (a, b, c) }}""")
    inputs = {
        "a": np.arange(np.prod(one), dtype=np.float64).reshape(one),
        "b": np.arange(np.prod(other), dtype=np.float64).reshape(other) ** 2,
        "c": np.array(0.1),
    }
    y = burnish.engines.get("reference").run(burnish.load(model), inputs)["y"]
    np.testing.assert_allclose(y, (inputs["a"] + inputs["b"] + 0.1) / 3, rtol=1e-15)

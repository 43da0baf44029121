"""The reference engine on tensors of rank 0, which numpy turns into numbers on the way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from burnish.engines.reference import ReferenceEngine
from burnish.importer import load

NUMBER = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [])


def run(nodes: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto], **feeds: np.ndarray) -> np.ndarray:
    outputs = [helper.make_tensor_value_info("y", TensorProto.DOUBLE, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return ReferenceEngine().run(load(model), feeds)["y"]


@pytest.mark.parametrize(("op_type", "expected"), [("Softsign", -2 / 3), ("ReduceLogSumExp", -2.0)])
def test_an_operator_on_a_number(op_type: str, expected: float) -> None:
    y = run([helper.make_node(op_type, ["x"], ["y"])], [NUMBER], x=np.array(-2.0))
    assert (y.shape, y.dtype) == ((), np.float64)
    np.testing.assert_allclose(y, expected, rtol=1e-15)


@pytest.mark.parametrize("noop", [0, 1])
def test_logarithms_of_sums_of_nothing_and_of_masked_rows(noop: int) -> None:
    node = helper.make_node("ReduceLogSumExp", ["x"], ["y"], noop_with_empty_axes=noop, keepdims=0)
    value = helper.make_tensor_value_info("x", TensorProto.DOUBLE, [2])
    y = run([node], [value], x=np.array([-np.inf, -np.inf]))
    np.testing.assert_array_equal(y, [-np.inf, -np.inf] if noop else -np.inf)

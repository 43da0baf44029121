"""Average pools that count padding and round up: every ONNX Runtime divides by what lies inside the padded data."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import burnish
from oracles.onnxruntime_outputs import onnxruntime_outputs


def pooling(shape: tuple[int | str, ...], opset: int = 17, **attributes) -> onnx.ModelProto:
    pool = helper.make_node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], count_include_pad=1, ceil_mode=1, **attributes)
    graph = helper.make_graph(
        [pool],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def operators(model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("opset", [10, 17, 22])
@pytest.mark.parametrize(("shape", "pads"), [((2, 2, 6, 8), [0] * 4), (("n", 2, "h", "w"), [0] * 4), (("n", 2, 6, 8), [1] * 4)])
def test_the_runtime_counts_nothing_and_the_averages_are_pytorchs(shape, pads: list[int], opset: int) -> None:
    model = burnish.load(pooling(shape, opset, strides=[2, 2], pads=pads))
    (pool,) = (node for node in model.graph if node.op_type == "AveragePool")
    assert "count_include_pad" not in pool.attributes
    assert ("Pad" in operators(model)) == any(pads)

    x = np.random.default_rng(0).normal(size=(2, 2, 6, 8)).astype(np.float32)
    expected = torch.nn.AvgPool2d(3, 2, pads[0], ceil_mode=True)(torch.from_numpy(x))
    np.testing.assert_allclose(onnxruntime_outputs(model, {"x": x})["y"], expected, rtol=1e-6, atol=1e-7)


def test_windows_that_cannot_be_counted_stay() -> None:
    model = burnish.load(pooling((2, 2, "h", "w"), strides=[2, 2], pads=[1, 1, 1, 1]))
    assert operators(model) == ["AveragePool"]

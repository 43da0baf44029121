"""Batch normalization of float16 values takes its statistics in float32."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch.nn import functional

import burnish


def layer() -> onnx.ModelProto:
    operands = {"scale": [1, 2, 3], "bias": [0, 1, 2], "mean": [0, 0, 0], "variance": [1, 1, 1]}
    shape = ["batch", 3, 40, 40]
    graph = helper.make_graph(
        [helper.make_node("BatchNormalization", ["x", *operands], ["y"], momentum=0.5)],
        "layer",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, shape)],
        [onnx.numpy_helper.from_array(np.array(values, np.float16), name) for name, values in operands.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("norm", ["train", "ghost:50", "renorm"])
def test_statistics_of_more_elements_than_float16_can_count(norm):
    """80,000 elements per channel, with a mean of thirty deviations: the squares alone would overflow."""
    x = (np.random.default_rng(0).standard_normal((50, 3, 40, 40)) + 30).astype(np.float16)
    exact = torch.from_numpy(x).double()
    scale, bias = torch.tensor([1.0, 2, 3]).double(), torch.tensor([0.0, 1, 2]).double()
    y = functional.batch_norm(exact, None, None, scale, bias, training=True).numpy()
    program = burnish.compile(layer(), loss=burnish.losses.mean_squared_error(), trainable=["scale"], norm=norm)
    session = burnish.Session(program)
    metrics = session.step({"x": x, "targets": y.astype(np.float32)})
    assert metrics["loss"] < 1e-6
    variance = session.state()["stat/variance"]
    assert variance.dtype == np.float32
    np.testing.assert_allclose(variance, 0.5 + 0.5 * exact.numpy().var((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(session.state()["stat/mean"], 0.5 * exact.numpy().mean((0, 2, 3)), rtol=1e-5)

"""Models of float16 weights train on ONNX Runtime, which has few kernels that add up values of sixteen bits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch.nn import functional

import burnish

HALF = onnx.TensorProto.FLOAT16
GENERATOR = np.random.default_rng(0)
ROWS = np.array([[0, 1, 1], [4, 1, 0], [0, 0, 0], [2, 3, 0]])


def model(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], input_shape: list[int | str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("x", HALF, input_shape)],
        [helper.make_tensor_value_info("y", HALF, ["batch", 3])],
        [onnx.numpy_helper.from_array(array.astype(np.float16), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def dense() -> tuple[onnx.ModelProto, np.ndarray]:
    weights = {"weight": GENERATOR.standard_normal((4, 3)), "bias": np.zeros(3)}
    return model([helper.make_node("Gemm", ["x", *weights], ["y"])], weights, ["batch", 4]), GENERATOR.standard_normal((8, 4))


def max_pooled() -> tuple[onnx.ModelProto, np.ndarray]:
    """The weight is before the pooling, so that its gradient goes through it."""
    nodes = [
        helper.make_node("Mul", ["x", "scale"], ["scaled"]),
        helper.make_node("MaxPool", ["scaled"], ["pooled"], kernel_shape=[3, 3], strides=[1, 1]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "weight"], ["y"]),
    ]
    weights = {"scale": GENERATOR.uniform(0.5, 1.5, (2, 1, 1)), "weight": GENERATOR.standard_normal((8, 3))}
    return model(nodes, weights, ["batch", 2, 4, 4]), GENERATOR.standard_normal((8, 2, 4, 4))


def gathered() -> tuple[onnx.ModelProto, np.ndarray]:
    """GatherElements takes the rows of its indices, as many as they are."""
    nodes = [
        helper.make_node("GatherElements", ["table", "indices"], ["rows"], axis=0),
        helper.make_node("Gemm", ["x", "rows"], ["y"]),
    ]
    proto = model(nodes, {"table": GENERATOR.standard_normal((5, 3))}, ["batch", 4])
    proto.graph.initializer.append(onnx.numpy_helper.from_array(ROWS, "indices"))
    return proto, GENERATOR.standard_normal((8, 4))


ORACLES = {
    dense: lambda x, weight, bias: x @ weight + bias,
    max_pooled: lambda x, scale, weight: functional.max_pool2d(x * scale, 3, 1).flatten(1) @ weight,
    gathered: lambda x, table: x @ table.gather(0, torch.from_numpy(ROWS)),
}


@pytest.mark.parametrize("build", ORACLES)
def test_a_float16_classifier_takes_the_step_of_pytorch(build):
    source, x = build()
    x, labels = x.astype(np.float16), np.arange(8) % 3
    session = burnish.Session(burnish.compile(source, loss="cross_entropy", optimizer=burnish.optim.SGD(lr=0.5)), "onnxruntime")
    weights = {name: array for name, array in session.state().items() if name.startswith("param/")}
    exact = [torch.from_numpy(array).double().requires_grad_() for array in weights.values()]
    loss = functional.cross_entropy(ORACLES[build](torch.from_numpy(x).double(), *exact), torch.from_numpy(labels))
    loss.backward()
    assert session.step({"x": x, "labels": labels})["loss"] == pytest.approx(loss.item(), rel=5e-3)
    for name, before in zip(weights, exact, strict=True):
        stepped = session.state()[name]
        assert stepped.dtype == np.float16
        np.testing.assert_allclose(stepped, (before - 0.5 * before.grad).detach(), rtol=5e-3, atol=2e-3)

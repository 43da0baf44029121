"""Batch normalization whose x, scale and statistics differ in dtype, as the standard allows since opset 14."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import burnish
from burnish.errors import ConfigurationError

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(3, 1, (16, 3)).astype(np.float16)
TARGETS = GENERATOR.normal(0, 1, (16, 3)).astype(np.float16)
WEIGHTS = {
    "stem[0].bn.weight": np.array([0.5, 1.5, -1.0]),
    "stem[0].bn.bias": np.array([0.25, 0.0, -0.5]),
    "stem[0].bn.running_mean": np.array([3.0, 2.75, 3.1]),
    "stem[0].bn.running_var": np.array([1.0, 0.75, 1.25]),
}


def layer(affine: type, statistics: type) -> onnx.ModelProto:
    """A batch normalization of float16 values [batch, 3]."""
    dtypes = [affine, affine, statistics, statistics]
    graph = helper.make_graph(
        [helper.make_node("BatchNormalization", ["x", *WEIGHTS], ["y"], name="norm")],
        "graph",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, ["batch", 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, ["batch", 3])],
        [
            numpy_helper.from_array(array.astype(dtype), name)
            for (name, array), dtype in zip(WEIGHTS.items(), dtypes, strict=True)
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def test_gradients_by_every_operand_of_a_layer_in_inference():
    """By the statistics too, which a model may compute."""
    program = burnish.grad(layer(np.float32, np.float32), wrt=["x", *WEIGHTS], of="y")
    x, cotangent = X, GENERATOR.normal(0, 1, X.shape).astype(np.float16)
    found = burnish.engines.get("reference").run(program, {"x": x, "cotangent:y": cotangent})
    operands = [torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in (x, *WEIGHTS.values())]
    data, scale, bias, mean, variance = operands
    y = (data - mean) / torch.sqrt(variance + 1e-5) * scale + bias
    expected = torch.autograd.grad(y, operands, torch.from_numpy(cotangent.astype(np.float64)))
    for name, gradient in zip(("x", *WEIGHTS), expected, strict=True):
        np.testing.assert_allclose(found[f"grad:{name}"], gradient, rtol=2e-3, atol=2e-3, err_msg=name)


@pytest.mark.parametrize(("affine", "statistics"), [(np.float16, np.float16), (np.float16, np.float32), (np.float32, np.float32)])
def test_gradients_of_a_frozen_layer(affine, statistics):
    program = burnish.compile(layer(affine, statistics), loss="mse", norm="frozen")
    state = program.initial_state()
    feeds = {entry.name: state[entry.name] for entry in program.signature["grad"].inputs if entry.name in state}
    outputs = burnish.engines.get("onnxruntime").run(program.grad, feeds | {"x": X, "targets": TARGETS.astype(np.float32)})
    dtypes = [affine, affine, statistics, statistics]
    scale, bias, mean, variance = (
        array.astype(dtype).astype(np.float64) for array, dtype in zip(WEIGHTS.values(), dtypes, strict=True)
    )
    normalized = (X.astype(np.float64) - mean) / np.sqrt(variance + 1e-5)
    difference = scale * normalized + bias - TARGETS
    dy = 2 * difference / difference.size
    assert outputs["loss"] == pytest.approx(np.mean(difference**2), rel=1e-5)
    for name, expected in (("weight", (dy * normalized).sum(0)), ("bias", dy.sum(0))):
        gradient = outputs[f"grad:stem[0].bn.{name}"]
        assert gradient.dtype == np.float32
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pattern", ["stem[0].bn", "stem*", "norm"])
def test_a_layer_with_brackets_in_its_name_is_chosen_by_it(pattern):
    program = burnish.compile(layer(np.float16, np.float32), loss="mse", norm={pattern: "frozen"})
    assert program.options["norm_layers"] == {"stem[0].bn": "frozen"}


def test_brackets_are_a_pattern_where_they_are_no_name():
    with pytest.raises(ConfigurationError, match=r"'stem\[1\]\.bn' matches no batch normalization layer"):
        burnish.compile(layer(np.float16, np.float32), loss="mse", norm={"stem[1].bn": "frozen"})

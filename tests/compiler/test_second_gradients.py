"""The gradient of a gradient: a name for every output, and numbers as PyTorch's."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import burnish
from burnish.errors import ConfigurationError

CUBIC = """
<ir_version: 10, opset_import: ["": 18]>
graph (double[3] x, double[3] y) => (double s, double t) {
    xy = Mul (x, y)
    product = Mul (xy, x)
    s = ReduceSum <keepdims = 0> (product)
    square = Mul (y, y)
    t = ReduceSum <keepdims = 0> (square)
}"""

X, Y = np.array([1.0, -2.0, 0.5]), np.array([0.25, 3.0, -1.0])


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """On stock ONNX Runtime, which refuses a model with two outputs of one name."""
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()}), strict=True))


def cubic() -> ir.Model:
    return ir.from_onnx_text(CUBIC)


@pytest.mark.parametrize("order", list(itertools.permutations(["x", "y"])))
def test_a_gradient_of_a_gradient_is_named_after_both(order):
    first, second = order
    model = burnish.grad(burnish.grad(cubic(), wrt=order, of="s"), wrt=order, of=f"grad:{first}")
    assert [output.name for output in model.graph.outputs] == [
        *("s", "t"),
        *(f"grad:{name}" for name in order),
        *(f"grad:{first}:{name}" for name in order),
    ]
    results = run(model, {"x": X, "y": Y, f"cotangent:grad:{first}": np.ones(3)})
    np.testing.assert_allclose(results["grad:x"], 2 * X * Y)
    np.testing.assert_allclose(results["grad:y"], X**2)
    np.testing.assert_allclose(results[f"grad:{first}:{second}"], 2 * X)
    np.testing.assert_allclose(results[f"grad:{first}:{first}"], 2 * Y if first == "x" else 0 * Y)


def test_a_third_derivative_goes_on_in_the_same_way():
    model = burnish.grad(burnish.grad(burnish.grad(cubic(), "x", of="s"), "x", of="grad:x"), "y", of="grad:x:x")
    results = run(model, {"x": X, "y": Y, "cotangent:grad:x": np.ones(3), "cotangent:grad:x:x": np.ones(3)})
    np.testing.assert_allclose(results["grad:x:x:y"], np.full(3, 2.0))


def test_gradients_of_two_outputs_have_two_names_and_share_a_cotangent_of_one():
    model = burnish.grad(burnish.grad(cubic(), "y", of="s"), "y", of="t")
    assert [output.name for output in model.graph.outputs] == ["s", "t", "grad:y", "grad:y:of:t"]
    results = run(model, {"x": X, "y": Y})
    np.testing.assert_allclose(results["grad:y"], X**2)
    np.testing.assert_allclose(results["grad:y:of:t"], 2 * Y)
    vector = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 18]>\ngraph (double[3] x) => (double[3] z) { z = Mul (x, x) }'
    )
    twice = burnish.grad(burnish.grad(vector, "x"), "x", of="z")
    assert [value.name for value in twice.graph.inputs] == ["x", "cotangent:z"]
    results = run(twice, {"x": X, "cotangent:z": Y})
    np.testing.assert_allclose(results["grad:x:of:z"], results["grad:x"])
    with pytest.raises(ConfigurationError, match=r"the model has values of the names 'grad:x' and 'grad:x:of:z' already"):
        burnish.grad(twice, "x", of="z")


def test_a_gradient_penalty_through_training_batch_normalization(tmp_path):
    """As critics are trained: the gradient of the sum of squares of the gradient with respect to the samples."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    critic.train()
    torch.onnx.export(
        critic,
        (x.detach(),),
        tmp_path / "critic.onnx",
        input_names=["x"],
        output_names=["score"],
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    parameters = dict(critic.named_parameters())
    (penalty_of_x, *expected) = torch.autograd.grad((slope**2).sum() / 2, [x, *parameters.values()], allow_unused=True)
    model = burnish.grad(burnish.grad(tmp_path / "critic.onnx", "x", of="score"), ["x", *parameters], of="grad:x")
    feeds = {"x": x.detach().numpy(), "cotangent:score": np.ones((5, 1)), "cotangent:grad:x": slope.detach().numpy()}
    results = run(model, feeds)
    np.testing.assert_allclose(results["grad:x"], slope.detach().numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(results["grad:x:x"], penalty_of_x.numpy(), rtol=1e-7, atol=1e-11)
    for name, gradient in zip(parameters, expected, strict=True):
        wanted = np.zeros(parameters[name].shape) if gradient is None else gradient.numpy()
        np.testing.assert_allclose(results[f"grad:x:{name}"], wanted, rtol=1e-7, atol=1e-11, err_msg=name)

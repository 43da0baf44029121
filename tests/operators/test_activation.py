"""What the operator tables cannot say about activations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.autodiff import differentiate
from burnish.graph import Builder, Tensor
from burnish.importer import load
from burnish.modes import bind_as_exported, put_training_forms
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.gradient_harness import Evaluator, gradient_graph, run_gradients
from oracles.rewritten import rewritten
from specs.operator_spec import OperatorSpec, Sample

CLIP = OperatorSpec("Clip", lambda rng: [])
RELU = OperatorSpec("Relu", lambda rng: [])


def test_clip_follows_clamp_on_the_bounds_when_a_bound_is_trained() -> None:
    x, low, high = np.array([-3.0, -1.0, 0.5, 1.5, 2.0]), np.array(-1.0), np.array(1.5)
    cotangent = np.array([0.5, -2.0, 3.0, 1.25, -0.75])
    sample = Sample([x, low, high])
    _, gradients = run_gradients(gradient_graph(CLIP, sample, "float64"), sample, "float64", {0: cotangent})
    leaves = [torch.tensor(array, requires_grad=True) for array in (x, low, high)]
    torch.clamp(*leaves).backward(torch.tensor(cotangent))
    for actual, leaf in zip(gradients, leaves, strict=True):
        np.testing.assert_allclose(actual, leaf.grad.numpy(), rtol=1e-14)


def test_relu_and_clip_read_only_the_output() -> None:
    """The input of an activation dies in the forward pass: a network holds one tensor per activation, not two."""
    for op_type, bounds in (("Relu", ()), ("Clip", (0.0, 6.0))):
        graph = ir.Graph([], [], nodes=[], name="activation", opset_imports={"": 18, "burnish": 1})
        builder = Builder(graph)
        x, dy = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 4])) for n in ("x", "dy"))
        graph.inputs.extend([x, dy])
        y = builder.op(op_type, builder.tensor(x), *bounds)
        gradient = differentiate(builder, {y.value: builder.tensor(dy)}, [x])[x]
        graph.outputs.extend([y.value, gradient.value])
        lower_semantic_operators(ir.Model(graph, ir_version=10))
        assert [use.node.op_type for use in x.uses()] == [op_type]


def test_relu_passes_no_gradient_at_zero() -> None:
    sample = Sample([np.array([-1.0, 0.0, -0.0, 2.0])])
    _, (gradient,) = run_gradients(gradient_graph(RELU, sample, "float32"), sample, "float32", {0: np.array([1.0, 2, 3, 4])})
    np.testing.assert_array_equal(gradient, [0, 0, 0, 4])


@pytest.mark.parametrize("singular", ["Sqrt", "Log", "Reciprocal"])
@pytest.mark.parametrize("bounded", ["Relu", "Clip", "Max"])
def test_an_infinite_cotangent_is_cut_off_like_in_pytorch(bounded: str, singular: str) -> None:
    """The slope of sqrt(relu(x)) is infinite at x < 0 in its first factor and 0 in its second: 0, not NaN."""

    def build(builder: Builder, inputs: list[Tensor | None]) -> Tensor:
        bounds = () if bounded == "Relu" else (0,)
        return builder.op(singular, builder.op(bounded, inputs[0], *bounds))

    sample = Sample([np.array([-1.0, 4.0])], build=build)
    _, (gradient,) = run_gradients(gradient_graph(RELU, sample, "float32"), sample, "float32", {0: np.array([1.0, 2.0])})
    np.testing.assert_allclose(gradient, [0, {"Sqrt": 0.5, "Log": 0.5, "Reciprocal": -0.125}[singular]])


@pytest.mark.parametrize("order", ["x, gate", "gate, x"])
def test_a_product_with_its_sigmoid_is_a_unit_of_its_own_in_training(order: str) -> None:
    """x * sigmoid(x), as exporters write it; its gradient reads the result, which what comes behind keeps anyway, and not x."""
    model = onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["": 18]>
network (float[batch, 4] x) => (float[batch, 4] y) {{ h = Neg (x) gate = Sigmoid (h) y = Mul ({order.replace("x", "h")}) }}""")
    source = load(model)
    bind_as_exported(source.graph)
    assert [node.op_type for node in source.graph if node.domain == "burnish"] == ["Silu"]
    gradients = burnish.grad(model, "x")
    products = Counter(node.op_type for node in gradients.graph)
    assert products["Mul"] == 3
    h = next(node for node in gradients.graph if node.op_type == "Neg").outputs[0]
    assert sorted(use.node.op_type for use in h.uses()) == ["Mul", "Sigmoid"]


@pytest.mark.parametrize("form", ["gate = Sigmoid (z) y = Mul (x, gate)", "gate = Sigmoid (x) y = Mul (gate, gate)"])
def test_other_products_stay(form: str) -> None:
    model = onnx.parser.parse_model(f"""
<ir_version: 8, opset_import: ["": 18]>
network (float[batch, 4] x, float[batch, 4] z) => (float[batch, 4] y) {{ {form} }}""")
    source = load(model)
    bind_as_exported(source.graph)
    assert not [node for node in source.graph if node.domain == "burnish"]


def test_derivatives_of_the_sigmoid_linear_unit_to_the_third() -> None:
    graph = ir.Graph([], [], nodes=[], name="unit", opset_imports={"": 18})
    graph.inputs.append(ir.Value(name="x", shape=ir.Shape([9]), type=ir.TensorType(ir.DataType.DOUBLE)))
    builder = Builder(graph)
    x = builder.tensor(graph.inputs[0])
    builder.op("Mul", x, builder.op("Sigmoid", x))
    put_training_forms(graph)
    derivative = next(node for node in graph if node.op_type == "Silu").outputs[0]
    array, rng = np.linspace(-6.0, 6.0, 9), np.random.default_rng(0)
    tensor = torch.from_numpy(array).requires_grad_()
    expected = [torch.nn.functional.silu(tensor)]
    for _ in range(3):
        cotangent = rng.normal(size=9)
        found = differentiate(builder, {derivative: builder.constant(cotangent)}, [x.value])[x.value]
        assert found is not None
        derivative = found.value
        graph.outputs.append(derivative)
        expected += torch.autograd.grad((expected[-1] * torch.from_numpy(cotangent)).sum(), [tensor], create_graph=True)
    names = [value.name for value in graph.outputs]
    results = Evaluator(rewritten(lower_semantic_operators, ir.Model(graph, ir_version=10)))({"x": array})
    for name, value in zip(names, expected[1:], strict=True):
        np.testing.assert_allclose(results[name], value.detach().numpy(), rtol=1e-12, atol=1e-14, err_msg=name)

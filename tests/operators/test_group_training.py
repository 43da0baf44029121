"""The training form of group and instance normalization: its derivatives, images that begin unlike the rest, passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch.nn import functional

from burnish.autodiff import differentiate
from burnish.graph import Builder, Tensor
from burnish.operators.normalization.group import group_norm_training
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.combinations import diagonal, named
from oracles.gradient_harness import Evaluator, assert_close
from oracles.rewritten import rewritten

EPSILON = 0.25
Emit = Callable[[Tensor, Tensor, Tensor], Tensor]


def graph_of(
    shape: tuple[int | str, ...], channels: int, emit: Emit, dtype: ir.DataType = ir.DataType.DOUBLE
) -> tuple[ir.Graph, Tensor]:
    """A graph of x, scale and bias, and what is made of them."""
    graph = ir.Graph([], [], nodes=[], name="layer", opset_imports={"": 18})
    for name, extents in {"x": shape, "scale": (channels,), "bias": (channels,)}.items():
        graph.inputs.append(ir.Value(name=name, shape=ir.Shape(extents), type=ir.TensorType(dtype)))
    builder = Builder(graph)
    return graph, emit(*(builder.tensor(value) for value in graph.inputs))


def in_numpy_names(arrays: dict[str, np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(arrays[name]).requires_grad_() for name in ("x", "scale", "bias")]


@pytest.mark.slow
@diagonal(("groups", [0, 1, 3]), ("known", named([True, False], ["static", "symbolic"])), ("shape", [(2, 6, 5, 7), (2, 6, 35)]))
def test_first_to_third_derivatives(groups, known, shape):
    """Gradients of gradients by x, scale and bias, each time of products with new random cotangents, against PyTorch."""
    rng = np.random.default_rng(groups)
    arrays = {"x": rng.normal(size=shape) + 1, "scale": rng.normal(size=6), "bias": rng.normal(size=6)}
    declared = shape if known else ("n", 6, *(f"extent{axis}" for axis in range(len(shape) - 2)))
    graph, y = graph_of(declared, 6, lambda x, scale, bias: group_norm_training(x, scale, bias, groups, EPSILON))
    builder, leaves = Builder(graph), in_numpy_names(arrays)
    expected: list[torch.Tensor] = [functional.group_norm(leaves[0], groups or 6, *leaves[1:], eps=EPSILON)]
    outputs: list[Tensor | None] = [y]
    for order in (1, 2, 3):
        cotangents = [rng.normal(size=tuple(value.shape)) for value in expected]
        total = sum((value * torch.from_numpy(c)).sum() for value, c in zip(expected, cotangents, strict=True))
        incoming = {
            output.value: builder.constant(c) for output, c in zip(outputs, cotangents, strict=True) if output is not None
        }
        gradients = differentiate(builder, incoming, list(graph.inputs))
        outputs = [gradients[value] for value in graph.inputs]
        found = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
        expected = [torch.zeros_like(leaf) if value is None else value for leaf, value in zip(leaves, found, strict=True)]
        assert all(output is not None for output in outputs[:2]), f"derivative {order}"
        graph.outputs.extend(output.value for output in outputs if output is not None)
        checked = [(output.name, value) for output, value in zip(outputs, expected, strict=True) if output is not None]
        model = ir.Model(graph, ir_version=10).clone()
        results = Evaluator(rewritten(lower_semantic_operators, model))(arrays)
        for name, value in checked:
            assert_close(results[name], value.detach().numpy(), 1e-9, f"derivative {order}: {name}")


def float32_model(shape: tuple[int | str, ...], groups: int) -> ir.Model:
    """y and the gradients of x, scale and bias by a cotangent dy, lowered."""
    channels = shape[1]
    assert isinstance(channels, int)
    graph, y = graph_of(
        shape, channels, lambda x, scale, bias: group_norm_training(x, scale, bias, groups, 1e-5), ir.DataType.FLOAT
    )
    dy = ir.Value(name="dy", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    names = list(graph.inputs)
    graph.inputs.append(dy)
    builder = Builder(graph)
    gradients = differentiate(builder, {y.value: builder.tensor(dy)}, names)
    for name, tensor in zip(("y", "dx", "dscale", "dbias"), (y, *(gradients[value] for value in names)), strict=True):
        assert tensor is not None
        tensor.value.name = name
        graph.outputs.append(tensor.value)
    return rewritten(lower_semantic_operators, ir.Model(graph, ir_version=10))


def run(model: ir.Model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, arrays), strict=True))


@diagonal(("start", [0.0, 50.0, -3000.0]), ("groups", [0, 2]))
def test_images_that_begin_unlike_the_rest_keep_their_digits(start, groups):
    """The eighth that is averaged for the pilot may be a margin of one colour: the pilot is then off the mean by deviations."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(2, 4, 64, 64)) + 20).astype(np.float32)
    x[:, :, :8] = start
    arrays = {
        "x": x,
        "scale": rng.normal(size=4).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
        "dy": rng.normal(size=x.shape).astype(np.float32),
    }
    found = run(float32_model(("batch", *x.shape[1:]), groups), arrays)
    leaves = in_numpy_names({name: array.astype(np.float64) for name, array in arrays.items()})
    y = functional.group_norm(leaves[0], groups or 4, *leaves[1:], eps=1e-5)
    y.backward(torch.from_numpy(arrays["dy"].astype(np.float64)))
    exact = [y.detach(), *(leaf.grad for leaf in leaves)]
    for name, value in zip(("y", "dx", "dscale", "dbias"), exact, strict=True):
        error = np.linalg.norm(found[name] - value.numpy()) / np.linalg.norm(value.numpy())
        assert error < 1e-6, name  # a few roundings times the root of 8, by which the deviations from the pilot are larger


def test_no_samples_give_gradients_of_zero():
    """As a worker without a part of the batch has them."""
    arrays = {name: np.ones(4, np.float32) for name in ("scale", "bias")}
    arrays |= {name: np.zeros((0, 4, 64, 64), np.float32) for name in ("x", "dy")}
    found = run(float32_model(("batch", 4, 64, 64), 0), arrays)
    assert found["y"].shape == found["dx"].shape == (0, 4, 64, 64)
    assert not found["dscale"].any()
    assert not found["dbias"].any()


@pytest.mark.parametrize("groups", [0, 2])
def test_few_passes_over_the_images(groups):
    """Operators that write as much as x holds: centering and the layer; of the gradient two products, the rest and their sum."""
    model = float32_model((2, 4, 64, 64), groups)
    large = Counter(
        node.op_type
        for node in model.graph
        if node.op_type not in ("Reshape", "Identity")
        and any(output.shape is not None and math.prod(output.shape.numpy()) == 2 * 4 * 64 * 64 for output in node.outputs)
    )
    assert large == {"Sub": 1, "BatchNormalization": 2, "Mul": 2, "Add": 1}

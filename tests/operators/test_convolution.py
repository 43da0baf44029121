"""Convolution gradients beyond the tables: drawn configurations, symbolic spatial sizes, large planes, second derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burnish.autodiff import differentiate
from burnish.errors import UnsupportedOperatorError
from burnish.graph import Builder
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.convolutions import TOLERANCE, check_against_torch, convolutions, gradient_model
from oracles.gradient_harness import Evaluator, assert_close
from oracles.rewritten import rewritten
from specs.convolution import torch_convolution, torch_transposed_convolution


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions("Conv"), st.booleans(), st.booleans())
@pytest.mark.slow
def test_drawn_convolutions(drawn: tuple[list[int], list[int], dict[str, Any]], symbolic: bool, bias: bool) -> None:
    x_shape, w_shape, attributes = drawn
    names = ["batch", x_shape[1], *(f"size{axis}" if symbolic else size for axis, size in enumerate(x_shape[2:]))]
    check_against_torch("Conv", x_shape, w_shape, attributes, known=names, bias=bias)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(convolutions("ConvTranspose"), st.booleans())
def test_drawn_transposed_convolutions(drawn: tuple[list[int], list[int], dict[str, Any]], symbolic: bool) -> None:
    x_shape, w_shape, attributes = drawn
    names = ["batch", x_shape[1], *(f"size{axis}" if symbolic else size for axis, size in enumerate(x_shape[2:]))]
    check_against_torch("ConvTranspose", x_shape, w_shape, attributes, known=names, bias=True)


STRIDED_GROUPS = {
    "groups": ([2, 4, 6, 5], [2, 2, 3, 3], {"group": 2}),
    "channel_multiplier": ([2, 3, 7, 8], [6, 1, 3, 3], {"group": 3}),
    "more_outputs": ([2, 4, 5, 6], [8, 2, 3, 3], {"group": 2}),
}


@pytest.mark.parametrize("name", list(STRIDED_GROUPS))
def test_strided_groups(name: str) -> None:
    x_shape, w_shape, attributes = STRIDED_GROUPS[name]
    attributes = attributes | {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    check_against_torch("Conv", x_shape, w_shape, attributes, known=["batch", *x_shape[1:]], bias=True)


TRANSPOSED = {
    "groups": ([2, 4, 3, 3], [4, 3, 3, 3], {"group": 2, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "output_shape": ([2, 2, 3, 3], [2, 2, 3, 3], {"strides": [2, 2], "output_shape": [6, 6]}),
    "output_shape_same_upper": (
        [2, 2, 3, 3],
        [2, 2, 3, 3],
        {"strides": [2, 2], "output_shape": [6, 6], "auto_pad": "SAME_UPPER"},
    ),
    "output_shape_beyond_the_windows": ([2, 2, 3, 3], [2, 2, 3, 3], {"strides": [2, 2], "output_shape": [8, 8]}),
}


@pytest.mark.parametrize("name", list(TRANSPOSED))
def test_transposed(name: str) -> None:
    x_shape, w_shape, attributes = TRANSPOSED[name]
    check_against_torch("ConvTranspose", x_shape, w_shape, attributes, known=["batch", *x_shape[1:]], bias=True)


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [0, 1, 0, 1], [1, 0, 2, 2]])
def test_output_padding_beyond_the_stride(pads: list[int]) -> None:
    """The standard allows it for dilated kernels; ONNX Runtime's forward kernel does not, so only the gradients run."""
    rng = np.random.default_rng(2)
    attributes: dict[str, Any] = {"dilations": [3, 3], "output_padding": [1, 2], "pads": pads}
    x, w = rng.standard_normal((2, 2, 3, 3)).astype(np.float32), rng.standard_normal((2, 3, 2, 2)).astype(np.float32)
    leaves = [torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in (x, w)]
    y = torch_transposed_convolution(*leaves, **attributes)
    dy = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    expected = torch.autograd.grad(y, leaves, torch.from_numpy(dy.astype(np.float64)))
    model = gradient_model("ConvTranspose", x.shape, w, attributes)
    forward = model.graph.outputs.pop(0).producer()
    assert forward is not None
    model.graph.remove(forward, safe=True)
    results = Evaluator(model)({"x": x, "dy": dy})
    for name, gradient in zip(("x", "w"), expected, strict=True):
        assert_close(results[f"grad:{name}"], gradient.numpy(), TOLERANCE, f"gradient of {name}")


SYMBOLIC_SIZES = {
    "pointwise": ([2, 3, 4, 5], [4, 3, 1, 1], {}),
    "pointwise_strided": ([2, 3, 6, 5], [4, 3, 1, 1], {"strides": [2, 2]}),
    "same": ([2, 3, 5, 4], [4, 3, 3, 3], {"pads": [1, 1, 1, 1]}),
    "same_auto_pad": ([2, 3, 5, 4], [4, 3, 3, 4], {"auto_pad": "SAME_LOWER"}),
    "strided_with_leftover": ([2, 3, 8, 6], [4, 3, 3, 3], {"strides": [2, 3], "pads": [1, 0, 1, 0]}),
    "depthwise": ([2, 3, 5, 6], [3, 1, 3, 3], {"group": 3, "pads": [1, 1, 1, 1]}),
    "depthwise_strided": ([2, 3, 6, 6], [3, 1, 3, 3], {"group": 3, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "groups_dilated": ([2, 4, 7, 8], [6, 2, 2, 3], {"group": 2, "dilations": [2, 2]}),
}


@pytest.mark.parametrize("name", list(SYMBOLIC_SIZES))
def test_spatial_sizes_may_be_symbolic(name: str) -> None:
    x_shape, w_shape, attributes = SYMBOLIC_SIZES[name]
    check_against_torch("Conv", x_shape, w_shape, attributes, known=["batch", x_shape[1], "height", "width"])


SYMBOLIC_CHANNELS = {
    "dense": ([2, 3, 6, 5], [4, 3, 3, 2], {"pads": [1, 0, 1, 1]}),
    "pointwise": ([2, 3, 4, 4], [5, 3, 1, 1], {}),
    "strided_with_leftover": ([2, 3, 8, 6], [4, 3, 3, 3], {"strides": [2, 3], "pads": [1, 0, 1, 0]}),
    "dilated": ([2, 3, 9], [4, 3, 3], {"dilations": [2], "strides": [2]}),
    "groups": ([2, 4, 7, 8], [6, 2, 2, 3], {"group": 2, "dilations": [2, 2]}),
    "depthwise": ([2, 3, 5, 6], [6, 1, 3, 3], {"group": 3, "pads": [1, 1, 1, 1]}),
    "volume_of_groups": ([2, 4, 4, 5, 3], [6, 2, 2, 3, 2], {"group": 2, "strides": [1, 2, 1]}),
}


@pytest.mark.parametrize(
    ("name", "symbolic"),
    [
        (name, symbolic)
        for name, (_, _, attributes) in SYMBOLIC_CHANNELS.items()
        for symbolic in ("outputs", "inputs", "both")
        if symbolic != "both" or "group" not in attributes
    ],
)
def test_channels_may_be_symbolic(name: str, symbolic: str) -> None:
    x_shape, w_shape, attributes = SYMBOLIC_CHANNELS[name]
    w_known = ["outputs" if symbolic != "inputs" else w_shape[0], "inputs" if symbolic != "outputs" else w_shape[1], *w_shape[2:]]
    sizes = [f"size_{axis}" for axis in range(len(x_shape) - 2)]
    open_sizes = ["batch", x_shape[1] if symbolic == "outputs" else "channels", *sizes]
    for x_known in (x_shape, open_sizes):
        check_against_torch("Conv", x_shape, w_shape, attributes, known=x_known, w_known=w_known)


def test_groups_need_one_number_of_channels() -> None:
    with pytest.raises(UnsupportedOperatorError, match="both numbers of channels of the weight 'w' are symbolic"):
        check_against_torch("Conv", [2, 4, 5], [6, 2, 3], {"group": 2}, w_known=["outputs", "inputs", 3])


def test_one_graph_serves_every_batch() -> None:
    rng = np.random.default_rng(3)
    for w_shape, group in (([4, 3, 3, 3], 1), ([3, 1, 3, 3], 3), ([5, 3, 1, 1], 1)):
        w = rng.standard_normal(w_shape).astype(np.float32)
        attributes = {"group": group, "strides": [2, 2], "pads": [w_shape[2] // 2] * 4}
        evaluate = Evaluator(gradient_model("Conv", ["batch", 3, 9, 8], w, attributes))
        for batch in (1, 2, 5):
            x = rng.standard_normal((batch, 3, 9, 8)).astype(np.float32)
            dy = rng.standard_normal((batch, w_shape[0], 5, 4)).astype(np.float32)
            leaf = torch.from_numpy(w.astype(np.float64)).requires_grad_()
            y = torch_convolution(torch.from_numpy(x.astype(np.float64)), leaf, **attributes)
            (expected,) = torch.autograd.grad(y, leaf, torch.from_numpy(dy.astype(np.float64)))
            assert_close(evaluate({"x": x, "dy": dy})["grad:w"], expected.numpy(), TOLERANCE, f"batch {batch}")


@pytest.mark.slow
def test_large_sums_keep_their_accuracy() -> None:
    """The error against float64 is at most twice PyTorch's own, or a few units in the last place."""
    rng = np.random.default_rng(11)
    for x_shape, w_shape, group in (([8, 16, 28, 28], [16, 16, 3, 3], 1), ([8, 32, 28, 28], [32, 1, 3, 3], 32)):
        w = rng.standard_normal(w_shape).astype(np.float32)
        x = rng.standard_normal(x_shape).astype(np.float32)
        dy = rng.standard_normal((x_shape[0], w_shape[0], 28, 28)).astype(np.float32)
        attributes = {"group": group, "pads": [1, 1, 1, 1]}
        results = Evaluator(gradient_model("Conv", x_shape, w, attributes))({"x": x, "dy": dy})
        gradients = {}
        for dtype in (torch.float32, torch.float64):
            leaves = [torch.from_numpy(array).to(dtype).requires_grad_() for array in (x, w)]
            y = torch_convolution(*leaves, **attributes)
            gradients[dtype] = [g.double().numpy() for g in torch.autograd.grad(y, leaves, torch.from_numpy(dy).to(dtype))]
        for name, single, double in zip(("x", "w"), gradients[torch.float32], gradients[torch.float64], strict=True):
            scale = float(np.linalg.norm(double))
            error = float(np.linalg.norm(results[f"grad:{name}"] - double)) / scale
            assert error <= max(2 * float(np.linalg.norm(single - double)) / scale, 1e-6), f"gradient of {name}: {error:.1e}"


@pytest.mark.parametrize("group", [1, 2])
def test_gradients_of_the_gradients(group: int) -> None:
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((2, 4, 6, 5)).astype(np.float32), rng.standard_normal((6, 4 // group, 3, 3)).astype(np.float32)
    attributes = {"group": group, "strides": [2, 1], "pads": [1, 0, 1, 1]}
    model = gradient_model("Conv", x.shape, w, attributes, lowered=False)
    graph = model.graph
    builder = Builder(graph)
    values = [graph.inputs[0], graph.initializers["w"], graph.inputs[1]]
    flowing = {}
    for output in graph.outputs[1:]:
        cotangent = ir.Value(name=f"v:{output.name}", type=output.type, shape=output.shape)
        graph.inputs.append(cotangent)
        flowing[output] = builder.tensor(cotangent)
    for value, gradient in differentiate(builder, flowing, values).items():
        assert gradient is not None
        gradient.value.name = f"second:{value.name}"
        graph.outputs.append(gradient.value)
    leaves = [torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in (x, w)]
    y = torch_convolution(*leaves, **attributes)
    dy = torch.from_numpy(rng.standard_normal(tuple(y.shape)).astype(np.float32).astype(np.float64)).requires_grad_()
    first = torch.autograd.grad(y, leaves, dy, create_graph=True)
    cotangents = [torch.from_numpy(rng.standard_normal(tuple(g.shape)).astype(np.float32).astype(np.float64)) for g in first]
    expected = torch.autograd.grad(first, [*leaves, dy], cotangents)
    feeds = {"x": x, "dy": dy.detach().numpy(), "v:grad:x": cotangents[0].numpy(), "v:grad:w": cotangents[1].numpy()}
    evaluator = Evaluator(rewritten(lower_semantic_operators, model))
    results = evaluator({name: array.astype(np.float32) for name, array in feeds.items()})
    for name, gradient in zip(("x", "w", "dy"), expected, strict=True):
        assert_close(results[f"second:{name}"], gradient.numpy(), TOLERANCE, f"second gradient of {name}")

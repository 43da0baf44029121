"""Convolutions as products of matrices: against float64 beside PyTorch's convolutions, and where they come into graphs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.convolution import products as pointwise
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.convolution.fusion import use_products
from burnish.kernels.thresholds import Pointwise
from burnish.models import residual_network
from oracles.combinations import diagonal

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")

SHAPES = [  # images, channels, kernels, height, width, extents, strides, padding: whole blocks and tails of all extents
    (2, 64, 64, 14, 14, (1, 1), (1, 1), (0, 0)),
    (3, 17, 33, 9, 11, (3, 3), (2, 2), (1, 1)),
    (1, 300, 600, 7, 7, (1, 1), (1, 1), (0, 0)),
    (2, 256, 128, 28, 27, (1, 1), (2, 2), (0, 0)),
    (5, 16, 70, 13, 10, (3, 2), (2, 1), (0, 1)),
    (1, 520, 30, 5, 5, (3, 3), (1, 1), (2, 2)),
    (65, 16, 16, 1, 1, (1, 1), (1, 1), (0, 0)),
    (1, 272, 257, 3, 4, (1, 3), (1, 3), (0, 1)),
]


def operands(shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and dy."""
    images, channels, count, height, width, extents, strides, padding = shape
    generator = torch.Generator().manual_seed(sum(shape[:5]))
    sizes = [
        (extent + 2 * pad - own) // step + 1
        for extent, pad, own, step in zip((height, width), padding, extents, strides, strict=True)
    ]
    tensors = (
        torch.randn(images, channels, height, width, generator=generator),
        torch.randn(count, channels, *extents, generator=generator),
        torch.randn(images, count, *sizes, generator=generator),
    )
    return tuple(tensor.contiguous(memory_format=torch.channels_last) for tensor in tensors)


def gradients(x, weight, dy, strides, padding) -> tuple[torch.Tensor, torch.Tensor]:
    ones, zeros, wanted = [1, 1], [0, 0], [True, True, False]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, strides, padding, ones, False, zeros, 1, wanted)[:2]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:5])))
def test_errors_of_the_weight_gradient_are_not_above_those_of_convolution(shape, threads):
    x, weight, dy = operands(shape)
    *window, strides, padding = shape[5:]
    found = torch.ops.burnish.convolution_weight_gradient(dy, x, *window, strides, padding)
    exact = gradients(x.double(), weight.double(), dy.double(), strides, padding)[1]
    beside = gradients(x, weight, dy, strides, padding)[1]
    assert found.shape == weight.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert error(found, exact) < 1.5 * error(beside, exact) + 1e-7
    again = torch.ops.burnish.convolution_weight_gradient(dy, x, *window, strides, padding)
    assert torch.equal(found, again)


@needs_kernels
def test_any_layout_gives_the_same_bits():
    x, _, dy = operands(SHAPES[1])
    window = SHAPES[1][5:]
    expected = torch.ops.burnish.convolution_weight_gradient(dy, x, *window)
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 1] for tensor in (dy, x)]
    for given in ([dy.contiguous(), x.contiguous()], strided):
        assert torch.equal(torch.ops.burnish.convolution_weight_gradient(*given, *window), expected)


@needs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_weights_that_it_meets(poison):
    x, weight, dy = operands(SHAPES[0])
    x[1, 5, 3, 4] = poison
    dy[0, 7, 0, 0] = poison
    found = torch.ops.burnish.convolution_weight_gradient(dy, x, *SHAPES[0][5:])
    expected = gradients(x, weight, dy, *SHAPES[0][6:])[1]
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert not found[7].isfinite().any()
    assert not found[:, 5].isfinite().any()
    assert found.isfinite().any()


@needs_kernels
def test_a_batch_of_nothing_has_a_gradient_of_zeros():
    found = torch.ops.burnish.convolution_weight_gradient(
        torch.empty(0, 32, 4, 4), torch.empty(0, 16, 4, 4), [1, 1], [1, 1], [0, 0]
    )
    assert torch.equal(found, torch.zeros(32, 16, 1, 1))


@needs_kernels
def test_operands_that_do_not_fit_are_refused():
    x, _, dy = operands(SHAPES[0])
    taken = torch.ops.burnish.convolution_weight_gradient
    with pytest.raises(RuntimeError, match="float32 images"):
        taken(dy.double(), x.double(), [1, 1], [1, 1], [0, 0])
    with pytest.raises(RuntimeError, match="gradient of their convolution"):
        taken(dy, x, [3, 3], [1, 1], [0, 0])
    with pytest.raises(RuntimeError, match="of two axes"):
        taken(dy, x, [1, 1], [0, 1], [0, 0])


@needs_kernels
@diagonal(
    (("channels", "count", "side"), [(16, 17, 5), (512, 640, 9)]),
    ("strides", [[1, 1], [2, 1], [2, 2]]),
    ("way", ["convolution", "linear", "product"]),
)
def test_convolutions_of_one_pixel(channels, count, side, strides, way, monkeypatch, threads):
    monkeypatch.setattr(Pointwise, "MOST_PIXELS", 0 if way == "convolution" else Pointwise.MOST_PIXELS)
    monkeypatch.setattr(pointwise, "_has_fast_pixels", lambda *_: way == "product")
    shape = (3, channels, count, side, side + 1, (1, 1), strides, (0, 0))
    x, weight, dy = operands(shape)
    bias = torch.randn(count, generator=torch.Generator().manual_seed(0))
    y = pointwise.convolution(x, weight, bias, strides)
    dx = pointwise.input_gradient(dy, weight, x, strides)
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), strides)
    exact_dx = gradients(x.double(), weight.double(), dy.double(), strides, [0, 0])[0]
    for found, expected in ((y, exact), (dx, exact_dx)):
        assert found.shape == expected.shape
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert error(found, expected) < 1e-6


def test_a_bias_with_strides():
    x, weight, _ = operands((3, 16, 32, 5, 5, (1, 1), [1, 1], (0, 0)))
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for bias in (numbers[:1].expand(32), numbers[::2]):
        found = pointwise.convolution(x, weight, bias, [1, 1])
        assert torch.equal(found, pointwise.convolution(x, weight, bias.contiguous(), [1, 1]))


def test_an_empty_batch_of_one_pixel_kernels():
    x, weight = torch.empty(0, 16, 4, 4), torch.ones(32, 16, 1, 1)
    assert pointwise.convolution(x, weight, None, [1, 1]).shape == (0, 32, 4, 4)
    assert pointwise.input_gradient(torch.empty(0, 32, 4, 4), weight, x, [1, 1]).shape == x.shape


def taken(op_type: str, attributes: dict, dtype=ir.DataType.FLOAT, weight=(64, 64, 1, 1)) -> str:
    """What a convolution, or a gradient of one, becomes."""
    x = ir.val("x", dtype, ["batch", weight[1] * attributes.get("group", 1), 9, 9])
    w = ir.val("w", dtype, list(weight))
    dy = ir.val("dy", dtype, ["batch", weight[0], None, None])
    operands = {"Conv": [x, w], "ConvInputGrad": [dy, w, x], "ConvWeightGrad": [dy, x, w]}[op_type]
    node = ir.node(op_type, operands, attributes, domain="" if op_type == "Conv" else BURNISH_DOMAIN)
    node.outputs[0].dtype = dtype
    graph = ir.Graph([x, w, dy], [node.outputs[0]], nodes=[node], opset_imports={"": 21, BURNISH_DOMAIN: 1})
    use_products(graph)
    (left,) = graph
    return left.op_type


@pytest.mark.parametrize("op_type", ["Conv", "ConvInputGrad", "ConvWeightGrad"])
def test_which_convolutions_are_taken(op_type):
    product = "ConvWeightGradProducts" if op_type == "ConvWeightGrad" else f"Pointwise{op_type}"
    of_many = product if op_type == "ConvWeightGrad" else op_type
    assert taken(op_type, {}) == product
    assert taken(op_type, {"strides": [2, 2], "pads": [0, 0, 0, 0], "dilations": [1, 1]}) == product
    assert taken(op_type, {"pads": [1, 1, 1, 1]}) == of_many
    assert taken(op_type, {"strides": [2, 2], "pads": [1, 0, 1, 0]}, weight=(64, 65, 3, 2)) == of_many
    for attributes in ({"group": 2}, {"dilations": [1, 2]}, {"auto_pad": "SAME_UPPER"}, {"pads": [0, 0, 1, 0]}):
        assert taken(op_type, attributes) == op_type
    assert taken(op_type, {}, ir.DataType.BFLOAT16) == op_type
    for weight in ((64, 15, 1, 1), (8, 64, 1, 1), (64, 64, 5, 5)):
        assert taken(op_type, {}, weight=weight) == op_type
    few = op_type if op_type == "ConvWeightGrad" else product
    assert taken(op_type, {}, weight=(64, 63, 1, 1)) == taken(op_type, {}, weight=(63, 64, 1, 1)) == few


@needs_kernels
@pytest.mark.slow
def test_a_program_trains_alike_with_and_without():
    program = burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9))
    generator = np.random.default_rng(0)
    sessions = [
        burnish.Session(program, engine, threads=2) for engine in (TorchEngine(winograd=False), TorchEngine(compile="none"))
    ]
    for size in (6, 3):
        batch = {"x": generator.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, size)}
        losses = [session.step(batch)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    states = [session.state() for session in sessions]
    for name, array in states[1].items():
        if name.startswith(("param/", "stat/")):
            np.testing.assert_allclose(states[0][name], array, rtol=2e-3, atol=2e-4, err_msg=name)

"""Both gradients of a convolution of one pixel in one pass: against float64 beside PyTorch's, and where they come into graphs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.convolution import products as pointwise
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.convolution.fusion import use_products
from burnish.kernels.thresholds import ConvolutionProducts, Pointwise
from oracles.kernel_graphs import kernel_graphs
from oracles.small_networks import batch_of, mobile

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the engine's kernels")

SHAPES = [  # images, kernels, channels, height, width: whole blocks and tails of all extents
    (2, 64, 64, 14, 14),
    (3, 17, 33, 9, 11),
    (1, 96, 16, 16, 8),
    (5, 24, 144, 7, 7),
    (2, 1, 1, 3, 3),
    (1, 300, 130, 1, 5),
    (130, 16, 40, 1, 1),
]


def operands(shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dy, x and the weight."""
    images, count, channels, height, width = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(images, count, height, width), (images, channels, height, width), (count, channels, 1, 1)]
    dy, x, weight = (torch.randn(size, generator=generator).contiguous(memory_format=torch.channels_last) for size in sizes)
    return dy, x, weight


def of_pytorch(dy, x, weight) -> tuple[torch.Tensor, torch.Tensor]:
    ones, zeros = [1, 1], [0, 0]
    return torch.ops.aten.convolution_backward(dy, x, weight, None, ones, zeros, ones, False, zeros, 1, [True, True, False])[:2]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_errors_are_not_above_those_of_convolution(shape, threads):
    given = operands(shape)
    found = torch.ops.burnish.pointwise_gradient(*given)
    exact = of_pytorch(*(tensor.double() for tensor in given))
    for gradient, right, beside in zip(found, exact, of_pytorch(*given), strict=True):
        assert gradient.shape == right.shape
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        assert error(gradient, right) < 1.5 * error(beside, right) + 1e-7
    assert all(map(torch.equal, found, torch.ops.burnish.pointwise_gradient(*given)))


@needs_kernels
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=["odd", "wide"])
def test_any_layout_gives_the_same_bits(shape):
    given = operands(shape)
    expected = torch.ops.burnish.pointwise_gradient(*given)
    plain = [tensor.clone(memory_format=torch.contiguous_format) for tensor in given]
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 1] for tensor in given]
    for other in (plain, strided):
        assert all(map(torch.equal, torch.ops.burnish.pointwise_gradient(*other), expected))
    broadcast = [given[0][:, :1].expand_as(given[0]), given[1][:, :, :1].expand_as(given[1]), given[2]]
    copied = [tensor.clone(memory_format=torch.contiguous_format) for tensor in broadcast]
    assert all(map(torch.equal, torch.ops.burnish.pointwise_gradient(*broadcast), torch.ops.burnish.pointwise_gradient(*copied)))


@needs_kernels
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_what_it_meets(poison):
    dy, x, weight = operands(SHAPES[1])
    x[1, 5, 3, 4] = poison
    dy[0, 7, 0, 0] = poison
    for found, expected in zip(torch.ops.burnish.pointwise_gradient(dy, x, weight), of_pytorch(dy, x, weight), strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())
        assert found.isfinite().any()
        assert not found.isfinite().all()


@needs_kernels
def test_a_batch_of_nothing_has_a_gradient_of_zeros():
    dx, dw = torch.ops.burnish.pointwise_gradient(torch.empty(0, 32, 4, 4), torch.empty(0, 16, 4, 4), torch.ones(32, 16, 1, 1))
    assert dx.shape == (0, 16, 4, 4)
    assert torch.equal(dw, torch.zeros(32, 16, 1, 1))


@needs_kernels
def test_operands_that_do_not_fit_are_refused():
    dy, x, weight = operands(SHAPES[0])
    taken = torch.ops.burnish.pointwise_gradient
    with pytest.raises(RuntimeError, match="float32 images"):
        taken(dy.double(), x.double(), weight.double())
    with pytest.raises(RuntimeError, match="images and kernels"):
        taken(dy, x, weight[:, :, 0, 0])
    for wrong in ((dy[:1], x, weight), (dy[:, :, 1:], x, weight), (dy, x[:, 1:], weight), (dy[:, 1:], x, weight)):
        with pytest.raises(RuntimeError, match="gradient of their 1x1 convolution"):
            taken(*wrong)
    with pytest.raises(RuntimeError, match="gradient of their 1x1 convolution"):
        taken(dy, x, torch.ones(64, 64, 3, 3))


@needs_kernels
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize(("count", "channels", "side"), [(64, 64, 15), (20, 80, 15), (16, 16, 15), (1024, 300, 15), (64, 64, 5)])
def test_gradients_whichever_way_they_are_computed(count, channels, side, built, monkeypatch, threads):
    """Together; apart where there are many weights, few channels or few pixels; by PyTorch where there are no kernels."""
    given = operands((2, count, channels, side, side))
    asked, found_kernel = [], kernels.find_operator
    monkeypatch.setattr(kernels, "find_operator", lambda name: asked.append(name) or (found_kernel(name) if built else None))
    exact = of_pytorch(*(tensor.double() for tensor in given))
    for found, expected in zip(pointwise.gradients(*given), exact, strict=True):
        assert found.shape == expected.shape
        assert error(found, expected) < 1e-6
    together = side == 15 and (count, channels) in ((64, 64), (20, 80))
    assert ("pointwise_gradient" in asked) == together


def layer(weight=(32, 16, 1, 1), dtype=ir.DataType.FLOAT, kinds=("ConvInputGrad", "ConvWeightGrad"), **attributes) -> list[str]:
    """What the gradients of a convolution become."""
    x, w = ir.val("x", dtype, ["batch", weight[1], 9, 9]), ir.val("w", dtype, list(weight))
    dy = ir.val("dy", dtype, ["batch", weight[0], None, None])
    places = {"ConvInputGrad": [dy, w, x], "ConvWeightGrad": [dy, x, w]}
    nodes = [ir.node(kind, places[kind], attributes, domain=BURNISH_DOMAIN) for kind in kinds]
    for node in nodes:
        node.outputs[0].dtype = dtype
    results = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x, w, dy], results, nodes=nodes, opset_imports={"": 21, BURNISH_DOMAIN: 1})
    use_products(graph)
    return sorted(node.op_type for node in graph)


def test_which_gradients_are_joined():
    apart = ["ConvInputGrad", "ConvWeightGrad"]
    for kinds in (apart, apart[::-1]):
        assert layer(kinds=kinds) == ["PointwiseConvGrad"]
    assert layer(strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], group=1) == ["PointwiseConvGrad"]
    assert layer(kinds=["ConvWeightGrad"]) == ["ConvWeightGrad"]
    assert layer(kinds=["ConvInputGrad"]) == ["PointwiseConvInputGrad"]
    assert layer(strides=[2, 2]) == ["ConvWeightGrad", "PointwiseConvInputGrad"]
    assert layer(dtype=ir.DataType.BFLOAT16) == apart
    for weight in ((15, 16, 1, 1), (16, 15, 1, 1), (16, 16, 3, 3)):
        assert layer(weight=weight) == apart
    for attributes in ({"pads": [1, 1, 1, 1]}, {"auto_pad": "SAME_UPPER"}):
        assert layer(**attributes) == apart


def test_layers_that_share_kernels_and_a_gradient_are_told_apart():
    """conv(a) + conv(b) with the same kernels, one of them with strides: dy and w of both are the same values."""
    kind = ir.DataType.FLOAT
    dy, w = ir.val("dy", kind, ["batch", 32, 5, 5]), ir.val("w", kind, [32, 16, 1, 1])
    a, b = ir.val("a", kind, ["batch", 16, 5, 5]), ir.val("b", kind, ["batch", 16, 9, 9])
    nodes = [
        ir.node("ConvWeightGrad", [dy, b, w], {"strides": [2, 2]}, domain=BURNISH_DOMAIN),
        ir.node("ConvInputGrad", [dy, w, a], domain=BURNISH_DOMAIN),
        ir.node("ConvWeightGrad", [dy, a, w], domain=BURNISH_DOMAIN),
    ]
    for node in nodes:
        node.outputs[0].dtype = kind
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([dy, w, a, b], outputs, nodes=nodes, opset_imports={"": 21, BURNISH_DOMAIN: 1})
    use_products(graph)
    (joint,) = (node for node in graph if node.op_type == "PointwiseConvGrad")
    assert list(joint.inputs) == [dy, a, w]
    assert [node.op_type for node in graph if node is not joint] == ["ConvWeightGrad"]


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("recompute", [None, "layers"])
def test_a_network_trains_alike_with_and_without(recompute, monkeypatch):
    monkeypatch.setattr(Pointwise, "LEAST_OF_WIDER", 1)
    monkeypatch.setattr(Pointwise, "LEAST_PIXELS", 0)
    monkeypatch.setattr(ConvolutionProducts, "LEAST_CHANNELS_OF_BOTH", 8)
    model = mobile()
    program = burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.01, momentum=0.9), recompute=recompute)
    sessions = [burnish.Session(program, engine, threads=2) for engine in (TorchEngine(), TorchEngine(compile="none"))]
    for seed in range(2):
        losses = [session.step(batch_of(model, seed))["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    states = [session.state() for session in sessions]
    for name, array in states[1].items():
        if name.startswith(("param/", "stat/")):
            np.testing.assert_allclose(states[0][name], array, rtol=2e-3, atol=2e-4, err_msg=name)
    graph = fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True).graph
    assert sum(node.op_type == "PointwiseConvGrad" for node in graph) == 2

"""Depthwise convolution by the engine's own kernels, against float64 and against the graphs without them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.convolution.fusion import fuse_depthwise
from oracles.combinations import diagonal
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")
PADS = [(1, 1, 1, 1), (0, 0, 0, 0), (2, 2, 2, 2), (0, 1, 1, 2), (3, 0, 0, 4)]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def images(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, pads: tuple[int, ...]):
    """The convolution in float64, and the float64 tensors that its gradients are of."""
    wide, kernels_of_channels = x.double().requires_grad_(), weight.double().requires_grad_()
    top, left, bottom, right = pads
    padded = functional.pad(wide, (left, right, top, bottom))
    y = functional.conv2d(padded, kernels_of_channels, None if bias is None else bias.double(), stride, groups=x.shape[1])
    return y, wide, kernels_of_channels


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference, norm = (found.double() - expected).norm().item(), expected.norm().item()
    return difference / norm if norm else difference


def kernel_for(name: str, extent: int, dtype: torch.dtype):
    """The kernel for windows of this extent and elements of this type."""
    suffix = ("_5x5" if extent == 5 else "") + ("_bfloat16" if dtype == torch.bfloat16 else "")
    return getattr(torch.ops.burnish, name + suffix)


@needs_kernels
@diagonal(("dtype", [torch.float32, torch.bfloat16]), ("kernel", [3, 5]), ("stride", [1, 2]), ("pads", PADS), test=2)
def test_convolution_and_its_gradients(dtype, kernel, stride, pads, threads):
    tolerance = TOLERANCES[dtype]
    convolution, gradients = (
        kernel_for(name, kernel, dtype) for name in ("depthwise_convolution", "depthwise_convolution_gradient")
    )
    for channels, height, width in [(16, 1, 1), (17, 7, 7), (40, 5, 14), (32, 4, 27)]:
        if height + pads[0] + pads[2] < kernel or width + pads[1] + pads[3] < kernel:
            continue
        x = images(3, channels, height, width, dtype=dtype)
        weight, bias = images(channels, 1, kernel, kernel, dtype=dtype, seed=1), torch.linspace(-1, 1, channels).to(dtype)
        y, wide, weights = exact(x, weight, bias, stride, pads)
        found = convolution(x, weight, bias, stride, pads)
        assert found.shape == y.shape
        assert found.is_contiguous(memory_format=torch.channels_last)
        assert relative(found, y.detach()) < tolerance
        dy = images(*y.shape, dtype=dtype, seed=2)
        expected = torch.autograd.grad(y, (wide, weights), dy.double())
        both = gradients(dy, x, weight, stride, pads, True, True)
        for gradient, wanted in zip(both, expected, strict=True):
            assert gradient.shape == wanted.shape
            assert relative(gradient, wanted) < tolerance
        dx, nothing = gradients(dy, x, weight, stride, pads, True, False)
        assert torch.equal(dx, both[0])
        assert nothing.numel() == 0
        nothing, dw = gradients(dy, x, weight, stride, pads, False, True)
        assert torch.equal(dw, both[1])
        assert nothing.numel() == 0


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("stride", [1, 2])
def test_images_that_are_written_past_the_caches(stride, threads):
    x, weight = images(1, 16, 363, 364), images(16, 1, 3, 3, seed=1)
    assert x.nbytes > 8 << 20
    y, wide, weights = exact(x, weight, None, stride, (1, 1, 1, 1))
    assert relative(torch.ops.burnish.depthwise_convolution(x, weight, None, stride, [1] * 4), y.detach()) < 1e-6
    dy = images(*y.shape, seed=2)
    expected = torch.autograd.grad(y, (wide, weights), dy.double())
    found = torch.ops.burnish.depthwise_convolution_gradient(dy, x, weight, stride, [1] * 4, True, True)
    for gradient, wanted in zip(found, expected, strict=True):
        assert relative(gradient, wanted) < 1e-6
    again = torch.ops.burnish.depthwise_convolution_gradient(dy, x, weight, stride, [1] * 4, True, True)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@needs_kernels
def test_other_layouts_and_views():
    x, weight = torch.randn(2, 24, 11, 13), torch.randn(24, 1, 3, 3)
    view = torch.randn(2, 24, 13, 11).transpose(2, 3)
    for given in (x, view, torch.randn(2, 48, 11, 13)[:, ::2]):
        y, wide, weights = exact(given, weight, None, 1, (1, 1, 1, 1))
        assert relative(torch.ops.burnish.depthwise_convolution(given, weight, None, 1, [1] * 4), y.detach()) < 1e-6
        dy = torch.randn(2, 24, 13, 11).transpose(2, 3)
        expected = torch.autograd.grad(y, (wide, weights), dy.double())
        found = torch.ops.burnish.depthwise_convolution_gradient(dy, given, weight, 1, [1] * 4, True, True)
        for gradient, wanted in zip(found, expected, strict=True):
            assert relative(gradient, wanted) < 1e-6


@needs_kernels
@pytest.mark.parametrize("stride", [1, 2])
def test_what_is_not_finite_spreads_as_far_as_its_window_and_no_further(stride):
    x, weight = images(2, 16, 9, 9), images(16, 1, 3, 3, seed=1)
    x[0, 3, 0, 0], x[1, 5, 8, 8] = float("nan"), float("inf")
    y, wide, weights = exact(x, weight, None, stride, (1, 1, 1, 1))
    found = torch.ops.burnish.depthwise_convolution(x, weight, None, stride, [1] * 4)
    torch.testing.assert_close(found.double(), y.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    dy = images(*y.shape, seed=2)
    dy[0, 7, 0, 0] = float("inf")
    expected = torch.autograd.grad(y, (wide, weights), dy.double())
    dx, dw = torch.ops.burnish.depthwise_convolution_gradient(dy, x, weight, stride, [1] * 4, True, True)
    torch.testing.assert_close(dx.double(), expected[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    # A pixel of the padding adds nothing to dw: what is infinite there stays beyond it.
    assert torch.isfinite(dw[[channel for channel in range(16) if channel not in (3, 5, 7)]]).all()
    assert torch.isfinite(dw[7, 0, 0]).all()
    assert torch.isinf(dw[7, 0, 1:, 1:]).all()


@pytest.mark.slow
@needs_kernels
def test_sums_of_many_pixels_keep_their_digits():
    x, dy = images(4, 16, 120, 120) + 3, images(4, 16, 120, 120, seed=2) + 1
    weight = images(16, 1, 3, 3, seed=1)
    y, _, weights = exact(x, weight, None, 1, (1, 1, 1, 1))
    (expected,) = torch.autograd.grad(y, weights, dy.double())
    _, found = torch.ops.burnish.depthwise_convolution_gradient(dy, x, weight, 1, [1] * 4, False, True)
    assert relative(found, expected) < 2e-7


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.randn(16, 1, 5, 5)}, "one kernel of 3x3"),
        ({"weight": torch.randn(32, 1, 3, 3)}, "one kernel of 3x3"),
        ({"weight": torch.randn(16, 1, 3, 3).double()}, "of one type"),
        ({"x": torch.randn(2, 16, 5, 5).double()}, "images in float32 expected"),
        ({"stride": 3}, "a stride of 1 or 2"),
        ({"pads": [0, 0, -1, 0]}, "four pads of zero or more"),
        ({"x": torch.randn(2, 16, 2, 2), "pads": [0, 0, 0, 0]}, "larger than the padded image"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(change, message):
    given = {"x": torch.randn(2, 16, 5, 5), "weight": torch.randn(16, 1, 3, 3), "bias": None, "stride": 1, "pads": [1] * 4}
    with pytest.raises(RuntimeError, match=message):
        torch.ops.burnish.depthwise_convolution(*(given | change).values())


@needs_kernels
def test_kernels_for_other_windows_and_elements_are_refused():
    x, weight = torch.randn(2, 16, 5, 5), torch.randn(16, 1, 3, 3)
    with pytest.raises(RuntimeError, match="one kernel of 5x5"):
        torch.ops.burnish.depthwise_convolution_5x5(x, weight, None, 1, [1] * 4)
    with pytest.raises(RuntimeError, match="images in bfloat16 expected"):
        torch.ops.burnish.depthwise_convolution_bfloat16(x, weight, None, 1, [1] * 4)


@needs_kernels
def test_the_gradient_of_another_shape_is_refused():
    x, weight = torch.randn(2, 16, 5, 5), torch.randn(16, 1, 3, 3)
    with pytest.raises(RuntimeError, match="the gradient of its output expected"):
        torch.ops.burnish.depthwise_convolution_gradient(torch.randn(2, 16, 4, 5), x, weight, 1, [1] * 4, True, True)


def network(attributes: str, channels: int = 32, kernel: str = "3, 3", multiplier: int = 1) -> onnx.ModelProto:
    """A convolution of ``attributes`` behind a depthwise one of 5x5, whose input needs no gradient."""
    outputs = channels * multiplier
    text = f"""
<ir_version: 10, opset_import: ["": 18]>
network (float[batch, {channels}, 9, 11] x) => (float[batch, features] y)
<float[{channels}, 1, 5, 5] first = {{0}}, float[{outputs}, 1, {kernel}] second = {{0}}, float[{outputs}] b = {{0}}> {{
    t = Conv <group = {channels}, pads = [2, 2, 2, 2]> (x, first)
    z = Conv <group = {channels}, {attributes}> (t, second, b)
    y = Flatten (z)
}}"""
    generator = np.random.default_rng(0)
    for shape in (f"{channels}, 1, 5, 5", f"{outputs}, 1, {kernel}", f"{outputs}"):
        count = np.prod([int(extent) for extent in shape.split(",")])
        values = ", ".join(map(str, generator.normal(size=count).round(3) / 5))
        text = text.replace("{0}", "{" + values + "}", 1)
    return onnx.parser.parse_model(text)


def step_graph(source: onnx.ModelProto) -> ir.Graph:
    program = burnish.compile(source, loss="mse", optimizer="sgd")
    graph = kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"].graph
    fuse_depthwise(graph)
    return graph


@pytest.mark.slow
def test_both_gradients_of_a_convolution_are_one_node():
    graph = step_graph(network("strides = [2, 2], pads = [1, 0, 1, 2]"))
    assert sorted(node.op_type for node in graph if "Conv" in node.op_type) == ["DepthwiseConv"] * 2 + ["DepthwiseConvGrad"] * 2
    wanted = {
        (node.attributes["stride"].value, *node.attributes["pads"].value): (
            node.attributes["input"].value,
            node.attributes["weight"].value,
        )
        for node in graph
        if node.op_type == "DepthwiseConvGrad"
    }
    assert wanted == {(1, 2, 2, 2, 2): (0, 1), (2, 1, 0, 1, 2): (1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attributes", "changed"),
    [
        ("dilations = [2, 2]", {}),
        ("strides = [1, 2]", {}),
        ("strides = [3, 3]", {}),
        ("pads = [1, 1, 1, 1]", {"multiplier": 2}),
        ("pads = [1, 1, 1, 1]", {"channels": 8}),
        ("pads = [0, 1, 0, 1]", {"kernel": "1, 3"}),
        ("pads = [3, 3, 3, 3]", {"kernel": "7, 7"}),
    ],
)
def test_other_convolutions_stay_with_aten(attributes, changed):
    source = network(attributes, **changed)
    assert "Conv" in [node.op_type for node in step_graph(source)]
    trained_alike(burnish.compile(source, loss="mse", optimizer="sgd"))


def trained_alike(program: burnish.Program, tolerance: float = 1e-5) -> None:
    """Three steps with the kernels and without give the same losses and parameters."""
    generator = np.random.default_rng(0)
    sessions = [burnish.Session(program, TorchEngine(compile=kind), threads=1) for kind in ("regions", "none")]
    x = generator.normal(size=(3, *[extent for extent in program.signature["step"].inputs[0].shape[1:]])).astype(np.float32)
    targets = generator.normal(size=sessions[0].predict({"x": x})["y"].shape).astype(np.float32)
    for _ in range(3):
        one, other = (session.step({"x": x, "targets": targets})["loss"] for session in sessions)
        assert one == pytest.approx(other, rel=tolerance)
    expected = sessions[1].state()
    for name, array in sessions[0].state().items():
        np.testing.assert_allclose(array, expected[name], rtol=tolerance * 10, atol=tolerance, err_msg=name)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    "attributes", ["strides = [2, 2], pads = [1, 0, 1, 2]", "pads = [1, 1, 1, 1]", 'auto_pad = "SAME_UPPER"']
)
@pytest.mark.parametrize("channels", [24, 32])
def test_programs_train_alike_with_the_kernels_and_without(attributes, channels):
    trained_alike(burnish.compile(network(attributes, channels), loss="mse", optimizer="sgd"))


@pytest.mark.slow
@needs_kernels
def test_in_bfloat16_programs_train_alike():
    program = burnish.compile(network("pads = [1, 1, 1, 1]"), loss="mse", optimizer="sgd", precision="bfloat16")
    graph = fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True).graph
    assert [node.inputs[0].dtype for node in graph if node.op_type == "DepthwiseConvGrad"] == [ir.DataType.BFLOAT16] * 2
    trained_alike(program, tolerance=2e-3)

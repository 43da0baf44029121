"""Normalization of rows in kernels of the engine, against PyTorch's in float64, and what fusion takes into them."""

from __future__ import annotations

from collections import Counter

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
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")


def worst(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error against the root mean square of what is exact."""
    return ((found.double() - exact).abs().max() / exact.square().mean().sqrt()).item()


@needs_kernels
@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((6, 9, 768), -1), ((301, 33), -1), ((5, 7, 6, 10), -2), ((3, 4097), -1), ((12,), -1)]
)
def test_layer_normalization_keeps_its_digits(shape, axis, affine, mean):
    generator = torch.Generator().manual_seed(len(shape) + int(mean))
    x = torch.randn(shape, generator=generator) + mean
    dy = torch.randn(shape, generator=generator)
    scale, bias = torch.rand(shape[axis:], generator=generator) + 0.5, torch.randn(shape[axis:], generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in (x, scale, bias)]
    parameters = exact[1:] if affine else [None, None]
    expected = functional.layer_norm(exact[0], shape[axis:], *parameters, eps=1e-5)
    (expected * dy.double()).sum().backward()
    y, row_mean, shift, inverse = torch.ops.burnish.standardize(
        x, scale if affine else None, bias if affine else None, axis, 1e-5, 0.0, True
    )
    assert worst(y, expected.detach()) < 5e-7
    axes = list(range(len(shape) + axis, len(shape)))
    torch.testing.assert_close(row_mean.double(), exact[0].detach().mean(axes, keepdim=True), rtol=1e-7, atol=1e-7)
    deviation = (exact[0].detach().var(axes, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(inverse.double(), 1 / deviation, rtol=1e-6, atol=0)
    dx, dscale, dbias = torch.ops.burnish.standardize_gradient(
        dy, x, row_mean, shift, inverse, scale if affine else None, axis, 0.0, True, affine
    )
    assert worst(dx, exact[0].grad) < 1e-6
    if affine:
        normalized = functional.layer_norm(exact[0].detach(), shape[axis:], eps=1e-5)
        leading = list(range(len(shape) + axis))
        for found, tensor, terms in ((dscale, exact[1], dy.double() * normalized), (dbias, exact[2], dy.double())):
            limit = terms.abs().sum(leading) if leading else terms.abs()
            assert ((found.double() - tensor.grad).abs() / limit).max() < 3e-7
    # From the normalized rows in place of x, as where something else reads them.
    rows, *_ = torch.ops.burnish.standardize(x, None, None, axis, 1e-5, 0.0, True)
    flow = dy * scale if affine else dy
    again, *_ = torch.ops.burnish.standardize_gradient(flow, rows, None, None, inverse, None, axis, 0.0, True, False)
    assert worst(again, exact[0].grad) < 1e-6


@needs_kernels
@pytest.mark.parametrize("columns", [7, 100, 768])
def test_root_mean_square_normalization_keeps_its_digits(columns):
    generator = torch.Generator().manual_seed(columns)
    x, dy = torch.randn(65, columns, generator=generator) + 0.3, torch.randn(65, columns, generator=generator)
    scale = torch.rand(columns, generator=generator) + 0.5
    exact = [tensor.double().requires_grad_() for tensor in (x, scale)]
    expected = functional.rms_norm(exact[0], (columns,), exact[1], eps=1e-6)
    (expected * dy.double()).sum().backward()
    y, mean, shift, inverse = torch.ops.burnish.standardize(x, scale, None, -1, 1e-6, 0.0, False)
    assert worst(y, expected.detach()) < 5e-7
    dx, dscale, _ = torch.ops.burnish.standardize_gradient(dy, x, mean, shift, inverse, scale, -1, 0.0, False, True)
    assert worst(dx, exact[0].grad) < 1e-6
    assert worst(dscale, exact[1].grad) < 1e-6


@needs_kernels
@pytest.mark.parametrize("offset", [0.0, 0.1])
def test_an_offset_of_the_deviation_and_constant_rows(offset):
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    x[4] = 3.7
    dy = torch.randn(9, 40, generator=torch.Generator().manual_seed(2))
    exact = x.double().requires_grad_()
    centered = exact - exact.mean(-1, keepdim=True)
    varied = [row for row in range(9) if row != 4]
    deviation = centered[varied].square().mean(-1, keepdim=True).sqrt()
    expected = centered[varied] / (deviation + offset)
    (expected * dy.double()[varied]).sum().backward()
    y, mean, shift, inverse = torch.ops.burnish.standardize(x, None, None, -1, 0.0, offset, True)
    assert worst(y[varied], expected.detach()) < 5e-7
    assert (y[4] == 0).all()
    assert inverse[4].item() == (0.0 if offset == 0 else pytest.approx(1 / offset))
    dx, *_ = torch.ops.burnish.standardize_gradient(dy, x, mean, shift, inverse, None, -1, offset, True, False)
    assert worst(dx[varied], exact.grad[varied]) < 1e-6
    assert torch.isfinite(dx).all()


@needs_kernels
def test_rows_of_any_layout_and_the_same_bits_again():
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(48, 300, generator=generator).T for _ in range(2))
    scale = torch.rand(48, generator=generator)
    results = []
    for source, flow in ((x, dy), (x.contiguous(), dy.contiguous()), (x, dy)):
        y, *statistics = torch.ops.burnish.standardize(source, scale, None, -1, 1e-5, 0.0, True)
        results.append((y, *torch.ops.burnish.standardize_gradient(flow, source, *statistics, scale, -1, 0.0, True, True)))
    for one, *others in zip(*results, strict=True):
        for other in others:
            assert torch.equal(one, other)


BLOCK = """
<ir_version: 10, opset_import: ["": 18]>
block (float[batch, 16, 32] x) => (float[batch, 16, 32] y)
<float[32] s1, float[32] b1, float[32] s2, float[32] b2, float[32, 64] w, float[64, 32] v, float[64] c, float[32] c1> {
    a = Add (x, c1)
    n = LayerNormalization <axis = -1, epsilon = 1e-5> (a, s1, b1)
    h = MatMul (n, w)
    hc = Add (h, c)
    half = Constant <value_float = 0.70710677> ()
    one = Constant <value_float = 1.0> ()
    t = Mul (hc, half)
    e = Erf (t)
    u = Add (e, one)
    g = Mul (hc, u)
    p = MatMul (g, v)
    r = Add (n, p)
    y = LayerNormalization <axis = -1, epsilon = 1e-5> (r, s2, b2)
}"""


def block() -> onnx.ModelProto:
    model = onnx.parser.parse_model(BLOCK)
    generator = np.random.default_rng(0)
    for name, shape in {
        "s1": (32,),
        "b1": (32,),
        "s2": (32,),
        "b2": (32,),
        "w": (32, 64),
        "v": (64, 32),
        "c": (64,),
        "c1": (32,),
    }.items():
        values = generator.normal(size=shape) * 0.2 + (1 if name[0] == "s" else 0)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), name))
    return model


def operators(program: burnish.Program, graph: str = "step", kernel: bool = True) -> Counter[str]:
    known = translated_operators(BURNISH_DOMAIN) | (FUSED if kernel else frozenset())
    model: ir.Model = fuse(kernel_graphs(program, known)[graph], kernels=kernel)
    return Counter(node.op_type for node in model.graph if node.op_type != "Constant")


@needs_kernels
def test_layers_are_fused_with_their_scale_and_bias():
    model = block()
    trainable = [value.name for value in model.graph.initializer]  # what is added before the first layer, too
    program = burnish.compile(model, loss="mse", optimizer="sgd", trainable=trainable)
    found = operators(program)
    assert found["FusedStandardize"] == found["FusedStandardizeGrad"] == 2
    assert not {"Standardize", "StandardizeGrad", "LayerNormalization"} & set(found)
    assert 2 * found.total() < operators(program, kernel=False).total()
    model = fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True)
    layers = [node for node in model.graph if node.op_type == "FusedStandardize"]
    assert all(node.inputs[1] is not None and node.inputs[2] is not None for node in layers)
    assert all(node.attributes["parameters"].as_int() == 1 for node in model.graph if node.op_type == "FusedStandardizeGrad")


@needs_kernels
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_block_trains_alike_with_and_without_kernels(optimizer):
    program = burnish.compile(block(), loss="mse", optimizer=optimizer)
    # Without an element whose gradient is nearly nothing beside its terms: Adam divides its rounding error by that.
    generator = np.random.default_rng(2)
    sessions = [burnish.Session(program, TorchEngine(compile=kind), threads=1) for kind in ("regions", "none")]
    for size in (4, 4, 1):
        x, targets = (generator.normal(size=(size, 16, 32)).astype(np.float32) for _ in range(2))
        losses = [session.step({"x": x, "targets": targets}, lr=1e-2)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    one, other = (session.state() for session in sessions)
    for name, array in one.items():
        if name.startswith("param/"):
            np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-5, err_msg=name)

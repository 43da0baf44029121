"""Convolutions of one pixel, some of which run as products of matrices, against float64: small maps in bfloat16, few channels."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from burnish.engines.torch import operators as _operators  # noqa: F401  # registers the translations
from burnish.engines.torch.bindings.precision import widened
from burnish.engines.torch.translate.translation import run, translate
from burnish.graph import BURNISH_DOMAIN, Builder

BATCH, INPUTS, OUTPUTS = 3, 10, 7


def graph_of(side: int, **attributes) -> ir.Model:
    """The convolution of x with w, and its gradients for dy, in bfloat16; the batch is open."""
    out = (side - 1) // attributes.get("strides", [1, 1])[0] + 1
    shapes = {"x": ["batch", INPUTS, side, side], "w": [OUTPUTS, INPUTS, 1, 1], "dy": ["batch", OUTPUTS, out, out]}
    values = {
        name: ir.Value(name=name, type=ir.TensorType(ir.DataType.BFLOAT16), shape=ir.Shape(shape))
        for name, shape in shapes.items()
    }
    graph = ir.Graph(list(values.values()), [], nodes=[], opset_imports={"": 22, BURNISH_DOMAIN: 1}, name="convolution")
    builder = Builder(graph)
    x, w, dy = (builder.tensor(value) for value in values.values())
    results = {
        "y": builder.op("Conv", x, w, like=dy, kernel_shape=[1, 1], **attributes),
        "dx": builder.op("ConvInputGrad", dy, w, x, domain=BURNISH_DOMAIN, like=x, kernel_shape=[1, 1], **attributes),
        "dw": builder.op("ConvWeightGrad", dy, x, w, domain=BURNISH_DOMAIN, like=w, kernel_shape=[1, 1], **attributes),
    }
    for name, result in results.items():
        result.value.name = name
        graph.outputs.append(result.value)
    return ir.Model(graph, ir_version=10)


def calls(module: torch.fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function" and "conv" in str(node.target)]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("side", "strides", "convolutions"), [(7, 1, 0), (1, 1, 0), (10, 1, 2), (15, 1, 3), (7, 2, 2)])
def test_products_compute_what_convolutions_do(side, strides, convolutions, layout):
    model = graph_of(side, strides=[strides, strides])
    module = translate(model, torch.device("cpu"))
    assert len(calls(module)) == convolutions
    if convolutions:  # PyTorch's own round between terms where the processor has no vectors for them, and are not run there
        model = widened(model, torch.device("cpu"))
        module = translate(model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(side)
    shapes = {
        value.name: [BATCH if not isinstance(extent, int) else extent for extent in value.shape] for value in model.graph.inputs
    }
    inputs = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    found = run(module, model, {name: tensor.contiguous(memory_format=layout) for name, tensor in inputs.items()})
    x, w = (inputs[name].double().requires_grad_() for name in ("x", "w"))
    y = torch.nn.functional.conv2d(x, w, stride=strides)
    (y * inputs["dy"].double()).sum().backward()
    for name, exact in {"y": y.detach(), "dx": x.grad, "dw": w.grad}.items():
        assert exact is not None
        assert found[name].dtype == torch.bfloat16
        assert found[name].shape == exact.shape
        torch.testing.assert_close(found[name].double(), exact, rtol=2**-8, atol=2**-8 * exact.abs().mean().item())


def test_what_the_products_give_has_its_channels_last():
    model = graph_of(7)
    images = [
        torch.ones(2, extent, 7, 7).bfloat16().contiguous(memory_format=torch.channels_last) for extent in (INPUTS, OUTPUTS)
    ]
    found = run(
        translate(model, torch.device("cpu")),
        model,
        {"x": images[0], "w": torch.ones(OUTPUTS, INPUTS, 1, 1).bfloat16(), "dy": images[1]},
    )
    assert all(found[name].is_contiguous(memory_format=torch.channels_last) for name in ("y", "dx"))


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 6, 15])
def test_kernels_that_skip_pixels_of_few_channels_get_their_gradient_from_a_product(channels, rank, layout):
    """oneDNN's kernel for AVX2 writes beyond the end of this gradient, which ends the process some time later."""
    extents, strides = [9, 8, 5][:rank], [2, 3, 1][:rank]
    outs = [(extent - 1) // stride + 1 for extent, stride in zip(extents, strides, strict=True)]
    shapes = {"dy": ["batch", 8, *outs], "x": ["batch", channels, *extents], "w": [8, channels, *[1] * rank]}
    values = [ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape)) for name, shape in shapes.items()]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 22, BURNISH_DOMAIN: 1}, name="gradient")
    builder = Builder(graph)
    dy, x, w = (builder.tensor(value) for value in values)
    attributes = {"kernel_shape": [1] * rank, "strides": strides}
    graph.outputs.append(builder.op("ConvWeightGrad", dy, x, w, domain=BURNISH_DOMAIN, like=w, **attributes).value)
    model = ir.Model(graph, ir_version=10)
    module = translate(model, torch.device("cpu"))
    assert not calls(module)
    inputs = {name: torch.randn([BATCH, *shape[1:]] if name != "w" else shape) for name, shape in shapes.items()}
    if layout == "channels_last":
        inputs = {name: tensor.movedim(1, -1).contiguous().movedim(-1, 1) for name, tensor in inputs.items()}
    (found,) = run(module, model, inputs).values()
    weight = inputs["w"].double().requires_grad_()
    convolve = [torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d][rank - 1]
    (convolve(inputs["x"].double(), weight, stride=strides) * inputs["dy"].double()).sum().backward()
    torch.testing.assert_close(found.double(), weight.grad, rtol=1e-5, atol=1e-5)

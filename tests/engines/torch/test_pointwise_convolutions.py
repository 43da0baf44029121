"""Convolutions of one pixel in bfloat16, which run as products of matrices where maps are small, against float64."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from burnish.engines.torch import operators as _operators  # noqa: F401  # registers the translations
from burnish.engines.torch.translation import run, translate
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
@pytest.mark.parametrize(("side", "strides", "convolutions"), [(7, 1, 0), (1, 1, 0), (10, 1, 2), (15, 1, 3), (7, 2, 3)])
def test_products_compute_what_convolutions_do(side, strides, convolutions, layout):
    model = graph_of(side, strides=[strides, strides])
    module = translate(model, torch.device("cpu"))
    assert len(calls(module)) == convolutions
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

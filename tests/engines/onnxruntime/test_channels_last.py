"""Images with their channels last on ONNX Runtime: what graphs become, and the kernels of convolutions beside float64."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from burnish.engines.kernels.compiling import find_compiler
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

CONVOLUTIONS = {
    # name: (images, kernels, strides, pads, dilations, group)
    "one pixel": ((2, 24, 9, 7), (40, 24, 1, 1), 1, (0, 0, 0, 0), 1, 1),
    "one pixel, both gradients at once": ((2, 72, 16, 16), (24, 72, 1, 1), 1, (0, 0, 0, 0), 1, 1),
    "one pixel, more results than weights": ((2, 16, 20, 20), (17, 16, 1, 1), 1, (0, 0, 0, 0), 1, 1),
    "one pixel with strides": ((2, 17, 9, 8), (19, 17, 1, 1), 2, (0, 0, 0, 0), 1, 1),
    "filtered": ((2, 20, 13, 11), (18, 20, 3, 3), 1, (1, 1, 1, 1), 1, 1),
    "filtered, uneven pads": ((3, 16, 9, 12), (24, 16, 3, 3), 1, (0, 2, 1, 1), 1, 1),
    "few pixels": ((1, 33, 3, 3), (37, 33, 3, 3), 1, (1, 1, 1, 1), 1, 1),
    "first layer": ((2, 3, 21, 17), (16, 3, 7, 7), 2, (3, 3, 3, 3), 1, 1),
    "strides": ((2, 18, 11, 8), (20, 18, 3, 3), 2, (1, 1, 1, 1), 1, 1),
    "dilation": ((2, 9, 12, 10), (6, 9, 3, 2), 1, (2, 1, 2, 0), 2, 1),
    "depthwise": ((2, 24, 11, 9), (24, 1, 3, 3), 1, (1, 1, 1, 1), 1, 24),
    "depthwise with strides": ((3, 19, 12, 9), (19, 1, 5, 5), 2, (2, 1, 1, 2), 1, 19),
    "no images": ((0, 16, 5, 5), (16, 16, 3, 3), 1, (1, 1, 1, 1), 1, 1),
}


def dims(*extents: int | str) -> str:
    return ", ".join(f'"{extent}"' if isinstance(extent, str) else str(extent) for extent in extents)


def text_of(images, weight, stride, pads, dilation, group) -> str:
    """A convolution and its gradients, as the standard's operators and burnish's own."""
    top, left, bottom, right = pads
    rows, columns = (
        (size + before + after - dilation * (extent - 1) - 1) // stride + 1
        for size, before, after, extent in zip(images[2:], (top, left), (bottom, right), weight[2:], strict=True)
    )
    window = (
        f"kernel_shape = [{weight[2]}, {weight[3]}], strides = [{stride}, {stride}], pads = [{', '.join(map(str, pads))}], "
        f"dilations = [{dilation}, {dilation}], group = {group}"
    )
    x, w, y = dims("N", *images[1:]), dims(*weight), dims("N", weight[0], rows, columns)
    return f"""
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float[{x}] x, float[{w}] w, float[{weight[0]}] b, float[{y}] dy) => (float[{y}] y, float[{x}] dx, float[{w}] dw)
{{
    y = Conv<{window}>(x, w, b)
    dx = burnish.ConvInputGrad<{window}>(dy, w, x)
    dw = burnish.ConvWeightGrad<{window}>(dy, x, w)
}}
"""


def operands_of(images, weight, stride, pads, dilation, group):
    random = np.random.default_rng(0)
    x, w, b = (random.normal(size=shape) for shape in (images, weight, weight[:1]))
    y, *_ = exact(x, w, b, None, stride, pads, dilation, group)
    return {"x": x, "w": w, "b": b, "dy": random.normal(size=y.shape)}


def exact(x, w, b, dy, stride, pads, dilation, group):
    """The convolution and its gradients in float64."""
    x, w, b = (torch.from_numpy(array).requires_grad_() for array in (x, w, b))
    top, left, bottom, right = pads
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, w, b, stride, 0, dilation, group)
    gradients = () if dy is None else torch.autograd.grad(y, (x, w), torch.from_numpy(dy))
    return [tensor.detach().numpy() for tensor in (y, *gradients)]


@functools.cache
def loaded(name: str, threads: int):
    model = onnx.parser.parse_model(text_of(*CONVOLUTIONS[name]))
    return OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), threads)


def called(model: ir.Model) -> Counter[str]:
    """How many nodes of each operator a graph has once it calls kernels."""
    copy = model.clone()
    kernels.call_kernels(copy)
    return Counter(node.op_type for node in copy.graph)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients_beside_float64(name, threads):
    case = CONVOLUTIONS[name]
    operands = operands_of(*case)
    expected = dict(zip(("y", "dx", "dw"), exact(*operands.values(), *case[2:]), strict=True))
    feeds = {key: array.astype(np.float32) for key, array in operands.items()}
    first, second = (loaded(name, threads)(feeds) for _ in range(2))
    for key, array in expected.items():
        size = np.abs(array).max(initial=1e-6)
        np.testing.assert_allclose(first[key], array, rtol=0, atol=2e-6 * size, err_msg=key)
        np.testing.assert_array_equal(second[key], first[key], err_msg=key)


def test_both_gradients_are_one_node():
    model = ir.from_proto(onnx.parser.parse_model(text_of(*CONVOLUTIONS["strides"])))
    assert called(model)["ChannelsLastConv"] == called(model)["ChannelsLastConvGrad"] == 1


@pytest.mark.parametrize(
    ("name", "wanted"), [("one pixel", "dx"), ("filtered", "dw"), ("depthwise", "dx"), ("depthwise", "dw"), ("strides", "dx")]
)
def test_one_gradient_alone(name, wanted):
    case = CONVOLUTIONS[name]
    model = onnx.parser.parse_model(text_of(*case))
    del model.graph.output[: 2 if wanted == "dw" else 1]
    if wanted == "dx":
        del model.graph.output[1]
    operands = operands_of(*case)
    expected = exact(*operands.values(), *case[2:])[1 if wanted == "dx" else 2]
    feeds = {key: array.astype(np.float32) for key, array in operands.items()}
    run = OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), 2)
    np.testing.assert_allclose(run(feeds)[wanted], expected, rtol=0, atol=2e-6 * np.abs(expected).max())

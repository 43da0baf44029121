"""Depthwise convolution by the engine's own kernels, both of its gradients in one pass over dy.

They take one square kernel of 3x3 or 5x5 per channel, without dilation, a stride of 1 or 2, at least 16 channels, in float32 or
bfloat16, where memory is the limit. MobileNetV2's layers, 3x3 in float32, are faster so than by oneDNN; 5x5 and bfloat16 were not
timed. All else stays with ATen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, replace_node
from burnish.kernels.convolution import DEPTHWISE_CONV, DEPTHWISE_CONV_GRAD
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD

LEAST_CHANNELS = 16
KERNELS = (3, 5)
STRIDES = (1, 2)
DTYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def fuse_depthwise(graph: ir.Graph) -> None:
    """Replace depthwise convolutions by ``burnish.DepthwiseConv`` and ``burnish.DepthwiseConvGrad``, in place.

    ``DepthwiseConv(x, w, b) -> y`` and ``DepthwiseConvGrad(dy, x, w) -> dx, dw``, with ``stride`` and ``pads`` (top, left,
    bottom, right); of the gradients those are computed that ``input`` and ``weight`` ask for.
    """
    gradients: dict[tuple[Any, ...], _Gradients] = {}
    for node in list(graph):
        if node.op_type == "Conv" and node.domain == "":
            _fuse_forward(graph, node)
        elif CONV_INPUT_GRAD.is_of(node) or CONV_WEIGHT_GRAD.is_of(node):
            operands = _operands(node)
            window = _window(node, *operands[1:])
            if window is None:
                continue
            found = gradients.setdefault((*operands, window), _Gradients(window))
            if CONV_INPUT_GRAD.is_of(node):
                found.of_input = found.of_input or node
            else:
                found.of_weight = found.of_weight or node
    for found in gradients.values():
        found.fuse(graph)
    if gradients:
        graph.sort()


@dataclass(frozen=True)
class _Window:
    stride: int
    pads: tuple[int, ...]


@dataclass
class _Gradients:
    """The gradients of one convolution that a graph computes."""

    window: _Window
    of_input: ir.Node | None = None
    of_weight: ir.Node | None = None

    def fuse(self, graph: ir.Graph) -> None:
        first = self.of_input or self.of_weight
        assert first is not None
        builder = Builder(graph, before=first)
        # As they are now: dy may have come from a gradient that was replaced.
        tensors = [builder.tensor(value) for value in _operands(first) if value is not None]
        nodes = (self.of_input, self.of_weight)
        results = DEPTHWISE_CONV_GRAD.emit(
            *tensors,
            stride=self.window.stride,
            pads=list(self.window.pads),
            input=int(self.of_input is not None),
            weight=int(self.of_weight is not None),
        )
        for node, result in zip(nodes, results, strict=True):
            if node is not None:
                replace_node(node, result)


def _operands(node: ir.Node) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None]:
    """dy, x and the weight of a ConvInputGrad or a ConvWeightGrad."""
    dy, second, third = node.inputs
    return (dy, third, second) if CONV_INPUT_GRAD.is_of(node) else (dy, second, third)


def _fuse_forward(graph: ir.Graph, node: ir.Node) -> None:
    x, weight, *bias = node.inputs
    window = _window(node, x, weight)
    if window is None:
        return
    builder = Builder(graph, before=node)
    operands = [None if value is None else builder.tensor(value) for value in (x, weight, *bias)]
    y = DEPTHWISE_CONV(*operands, stride=window.stride, pads=list(window.pads))
    replace_node(node, y)


def _window(node: ir.Node, x: ir.Value | None, weight: ir.Value | None) -> _Window | None:
    """The window of a convolution that the kernels take, None for another."""
    if x is None or weight is None or weight.shape is None or len(weight.shape) != 4:
        return None
    channels, multiplier, height, width = weight.shape.dims
    if not (isinstance(channels, int) and channels >= LEAST_CHANNELS and multiplier == 1):
        return None
    strides, dilations = (tuple(attribute_value(node, name, (1, 1))) for name in ("strides", "dilations"))
    pads = tuple(attribute_value(node, "pads", (0, 0, 0, 0)))
    kept = (
        attribute_value(node, "group", 1) == channels
        and attribute_value(node, "auto_pad", "NOTSET") == "NOTSET"
        and height == width
        and height in KERNELS
        and strides[0] == strides[1]
        and strides[0] in STRIDES
        and dilations == (1, 1)
        and min(pads) >= 0
        and x.dtype in DTYPES
        and weight.dtype == x.dtype
    )
    return _Window(strides[0], pads) if kept else None

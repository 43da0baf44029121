"""Convolutions that are products of matrices: those of one pixel, and the gradients of kernels.

With the channels last, a convolution of 1x1 multiplies the pixels by the kernels, and the gradient of any kernels is one product
for each of their pixels. The gradients of a convolution of 1x1 are both products with that of its results, which is read once for
both. Of a convolution of 1x1, the batch decides which is faster, and so it is chosen when a step runs.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.convolution.kernel_calls import (
    CONV_WEIGHT_GRAD_PRODUCTS,
    POINTWISE_CONV,
    POINTWISE_CONV_GRAD,
    POINTWISE_CONV_INPUT_GRAD,
)
from burnish.engines.torch.families.convolution.kernel_place import kernel_place
from burnish.engines.torch.families.thresholds import ConvolutionProducts
from burnish.graph import Builder, attribute_value, replace_node
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD

POINTWISE = {"Conv": POINTWISE_CONV, CONV_INPUT_GRAD.name: POINTWISE_CONV_INPUT_GRAD}

LEAST_CHANNELS = {
    "Conv": ConvolutionProducts.LEAST_CHANNELS,
    CONV_INPUT_GRAD.name: ConvolutionProducts.LEAST_CHANNELS,
    CONV_WEIGHT_GRAD.name: ConvolutionProducts.LEAST_CHANNELS_OF_GRADIENT,
}


def use_products(graph: ir.Graph) -> None:
    """Replace ``Conv`` and ``ConvInputGrad`` by ``PointwiseConv`` and ``PointwiseConvInputGrad``, ``ConvWeightGrad`` by
    ``ConvWeightGradProducts``, and both gradients of a layer by ``PointwiseConvGrad``, in place.

    They are taken in float32, in one group, without dilation, with the same padding on both sides of an axis and enough channels
    on either side; the first two with kernels of 1x1 and no padding, the third with kernels up to 3x3, the last with kernels of
    1x1, no padding and a stride of 1. The graph's order is to be restored after.
    """
    _join_gradients(graph)
    for node in list(graph):
        window = _window(node, LEAST_CHANNELS)
        if window is None:
            continue
        extents, strides, padding = window
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in node.inputs]
        if CONV_WEIGHT_GRAD.is_of(node):
            # Of the third operand the shape is read, which follows from the others and the extents.
            result = CONV_WEIGHT_GRAD_PRODUCTS(*operands[:2], extents=extents, strides=strides, padding=padding)
        elif extents == [1, 1] and padding == [0, 0]:
            result = POINTWISE[node.op_type](*operands, strides=strides)
        else:
            continue
        replace_node(node, result)


def _join_gradients(graph: ir.Graph) -> None:
    """``ConvInputGrad(dy, w, x)`` and ``ConvWeightGrad(dy, x, w)`` to ``PointwiseConvGrad(dy, x, w) -> dx, dw``.

    Of the former's x the shape is read, which follows from dy and w: where x is computed again, the latter reads another value.
    """
    least = dict.fromkeys(LEAST_CHANNELS, ConvolutionProducts.LEAST_CHANNELS_OF_BOTH)
    of_input: dict[tuple[ir.Value | None, ir.Value | None], ir.Node] = {}
    of_weight = []
    for node in graph:
        is_gradient = CONV_INPUT_GRAD.is_of(node) or CONV_WEIGHT_GRAD.is_of(node)
        if is_gradient and _window(node, least) == ([1, 1], [1, 1], [0, 0]):
            if CONV_INPUT_GRAD.is_of(node):
                of_input[node.inputs[0], node.inputs[1]] = node
            else:
                of_weight.append(node)
    for node in of_weight:
        other = of_input.pop((node.inputs[0], node.inputs[2]), None)
        if other is None:
            continue
        builder = Builder(graph, before=node)
        operands = [builder.tensor(value) for value in node.inputs if value is not None]
        results = POINTWISE_CONV_GRAD.emit(*operands)
        for result, replaced in zip(results, (other, node), strict=True):
            result.value.type = replaced.outputs[0].type
            replace_node(replaced, result)


def _window(node: ir.Node, least: dict[str, int]) -> tuple[list[int], list[int], list[int]] | None:
    """Extents of the kernels, strides and padding; None for what no product is made of."""
    place = kernel_place(node)
    weight = None if place is None else node.inputs[place]
    if weight is None or node.outputs[0].dtype != ir.DataType.FLOAT or weight.shape is None or len(weight.shape) != 4:
        return None
    known = [extent for extent in weight.shape if isinstance(extent, int)]
    if len(known) != 4 or min(known[:2]) < least[node.op_type]:
        return None
    extents = known[2:]
    if max(extents) > 3 or attribute_value(node, "group", 1) != 1 or attribute_value(node, "auto_pad", "NOTSET") != "NOTSET":
        return None
    pads = list(attribute_value(node, "pads", [0] * 4))
    if pads[:2] != pads[2:] or min(pads) < 0 or any(step != 1 for step in attribute_value(node, "dilations", ())):
        return None
    return extents, list(attribute_value(node, "strides", [1, 1])), pads[:2]

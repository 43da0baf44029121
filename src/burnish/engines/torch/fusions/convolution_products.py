"""Convolutions that are products of matrices: those of one pixel, and the gradients of kernels.

With the channels last, a convolution of 1x1 multiplies the pixels by the kernels, and the gradient of any kernels is one product
for each of their pixels. Of a convolution of 1x1, the batch decides which is faster, and so it is chosen when a step runs.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node

LEAST_CHANNELS = {"Conv": 16, "ConvInputGrad": 16, "ConvWeightGrad": 64}
"""Of inputs and outputs: with fewer, a product leaves most of a vector empty. A gradient of kernels with few adds up over large
maps, where oneDNN is as fast or faster."""

_WEIGHT = {("", "Conv"): 1, (BURNISH_DOMAIN, "ConvInputGrad"): 1, (BURNISH_DOMAIN, "ConvWeightGrad"): 2}
"""Where an operator has the convolution's kernels."""


def use_products(graph: ir.Graph) -> None:
    """Replace ``Conv`` and ``ConvInputGrad`` by ``PointwiseConv`` and ``PointwiseConvInputGrad``, ``ConvWeightGrad`` by
    ``ConvWeightGradProducts``, in place.

    They are taken in float32, in one group, without dilation, with the same padding on both sides of an axis and enough channels
    on either side; the first two with kernels of 1x1 and no padding, the last with kernels up to 3x3.
    """
    for node in list(graph):
        window = _window(node)
        if window is None:
            continue
        extents, strides, padding = window
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in node.inputs]
        if node.op_type == "ConvWeightGrad":
            # Of the third operand the shape is read, which follows from the others and the extents.
            result = builder.op(
                "ConvWeightGradProducts",
                *operands[:2],
                domain=BURNISH_DOMAIN,
                extents=extents,
                strides=strides,
                padding=padding,
            )
        elif extents == [1, 1] and padding == [0, 0]:
            result = builder.op(f"Pointwise{node.op_type}", *operands, domain=BURNISH_DOMAIN, strides=strides)
        else:
            continue
        replace_node(node, result)


def _window(node: ir.Node) -> tuple[list[int], list[int], list[int]] | None:
    """Extents of the kernels, strides and padding; None for what no product is made of."""
    place = _WEIGHT.get((node.domain, node.op_type))
    weight = None if place is None else node.inputs[place]
    if weight is None or node.outputs[0].dtype != ir.DataType.FLOAT or weight.shape is None or len(weight.shape) != 4:
        return None
    known = [extent for extent in weight.shape if isinstance(extent, int)]
    if len(known) != 4 or min(known[:2]) < LEAST_CHANNELS[node.op_type]:
        return None
    extents = known[2:]
    if max(extents) > 3 or attribute_value(node, "group", 1) != 1 or attribute_value(node, "auto_pad", "NOTSET") != "NOTSET":
        return None
    pads = list(attribute_value(node, "pads", [0] * 4))
    if pads[:2] != pads[2:] or min(pads) < 0 or any(step != 1 for step in attribute_value(node, "dilations", ())):
        return None
    return extents, list(attribute_value(node, "strides", [1, 1])), pads[:2]

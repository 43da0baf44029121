"""Convolutions of 3x3 and their gradients, to the kernels that compute them by Winograd's minimal filtering.

What the kernels take is found here, from what a graph declares; which shapes are large enough to win by it is known when a step
runs, and left to the kernels.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.convolution.kernel_calls import (
    WINOGRAD_CONV,
    WINOGRAD_CONV_INPUT_GRAD,
    WINOGRAD_CONV_WEIGHT_GRAD,
)
from burnish.engines.torch.families.convolution.kernel_place import kernel_place
from burnish.graph import Builder, attribute_value, replace_node
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD
from burnish.quantization.graph import is_exact

WINOGRAD = {
    "Conv": WINOGRAD_CONV,
    CONV_INPUT_GRAD.name: WINOGRAD_CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD.name: WINOGRAD_CONV_WEIGHT_GRAD,
}


def use_winograd(graph: ir.Graph) -> None:
    """Replace ``Conv``, ``ConvInputGrad`` and ``ConvWeightGrad`` by ``WinogradConv``, ``WinogradConvInputGrad``, ..., in place.

    They are taken in float32, with kernels of 3x3, strides and dilations of one, one group, and padding of 0 to 2 that is the
    same on both sides of an axis.
    """
    for node in list(graph):
        padding = _padding(node)
        if padding is None or is_exact(node):
            continue
        # Of a gradient's third operand the shape is read, which here follows from the others.
        read = node.inputs if node.op_type == "Conv" else node.inputs[:2]
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in read]
        replace_node(node, WINOGRAD[node.op_type](*operands, padding=padding))


def _padding(node: ir.Node) -> list[int] | None:
    """The padding of the height and of the width; None for what the kernels do not take."""
    weight = kernel_place(node)
    if weight is None or node.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    kernels = node.inputs[weight]
    extents = attribute_value(node, "kernel_shape", None)
    if extents is None and kernels is not None and kernels.shape is not None:
        extents = kernels.shape[2:]
    if extents is None or list(extents) != [3, 3] or attribute_value(node, "group", 1) != 1:
        return None
    if any(step != 1 for name in ("strides", "dilations") for step in attribute_value(node, name, ())):
        return None
    automatic = attribute_value(node, "auto_pad", "NOTSET")
    if automatic != "NOTSET":
        return [0, 0] if automatic == "VALID" else [1, 1]
    pads = list(attribute_value(node, "pads", [0] * 4))
    return pads[:2] if pads[:2] == pads[2:] and all(0 <= pad <= 2 for pad in pads) else None

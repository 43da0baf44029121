"""Gradients of convolutions in bfloat16 that the engine has ways of its own for, which are chosen when a step runs."""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.convolution.kernel_place import kernel_place
from burnish.engines.torch.families.convolution.translation import CONV_INPUT_GRAD_NARROW, CONV_WEIGHT_GRAD_NARROW
from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node
from burnish.operators.convolution import CONV_INPUT_GRAD


def use_narrow_gradients(graph: ir.Graph) -> None:
    """Replace ``ConvWeightGrad`` by ``ConvWeightGradNarrow``, and ``ConvInputGrad`` of kernels of one pixel with strides and no
    padding by ``ConvInputGradNarrow``, in place.

    They are taken in bfloat16, of images, in one group, without dilation, with kernels of known extents and the same padding on
    both sides of an axis. The graph's order is to be restored after.
    """
    for node in list(graph):
        window = _window(node)
        if window is None:
            continue
        extents, strides, pads = window
        if CONV_INPUT_GRAD.is_of(node) and (extents != [1, 1] or any(pads) or strides == [1, 1]):
            continue
        builder = Builder(graph, before=node)
        operands = [builder.tensor(value) for value in node.inputs if value is not None]
        narrow = CONV_INPUT_GRAD_NARROW if CONV_INPUT_GRAD.is_of(node) else CONV_WEIGHT_GRAD_NARROW
        replace_node(node, narrow(*operands, kernel_shape=extents, strides=strides, pads=pads))


def _window(node: ir.Node) -> tuple[list[int], list[int], list[int]] | None:
    """Extents of the kernels, strides and pads; None for what is not taken."""
    place = kernel_place(node) if node.domain == BURNISH_DOMAIN else None
    if place is None or node.outputs[0].dtype != ir.DataType.BFLOAT16:
        return None
    if any(value is None or value.dtype != ir.DataType.BFLOAT16 for value in node.inputs[:2]):  # of a third the shape is read
        return None
    weight = node.inputs[place]
    if weight is None or weight.shape is None or len(weight.shape) != 4:
        return None
    extents = [extent for extent in weight.shape[2:] if isinstance(extent, int)]
    pads = list(attribute_value(node, "pads", [0] * 4))
    if len(extents) != 2 or pads[:2] != pads[2:] or min(pads) < 0 or attribute_value(node, "group", 1) != 1:
        return None
    if attribute_value(node, "auto_pad", "NOTSET") != "NOTSET" or any(
        step != 1 for step in attribute_value(node, "dilations", ())
    ):
        return None
    return extents, list(attribute_value(node, "strides", [1, 1])), pads

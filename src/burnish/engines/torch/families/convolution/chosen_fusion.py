"""Convolutions for which no rule says which of PyTorch's ways is quick, to calls that choose when a step runs.

For the layers of image networks the ways were compared, and the rules found are in the other fusions here. Of what lies
outside, such as signals, volumes, long or dilated kernels, groups and transposed convolutions, one way may be a hundred times
slower than another.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.convolution.kernel_place import kernel_place
from burnish.engines.torch.families.convolution.translation import (
    CHOSEN_CONV,
    CHOSEN_CONV_INPUT_GRAD,
    CHOSEN_CONV_TRANSPOSE,
    CHOSEN_CONV_WEIGHT_GRAD,
)
from burnish.engines.torch.families.thresholds import ChosenConvolutions
from burnish.graph import attribute_value
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD

CHOSEN = {
    "Conv": CHOSEN_CONV,
    "ConvTranspose": CHOSEN_CONV_TRANSPOSE,
    CONV_INPUT_GRAD.name: CHOSEN_CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD.name: CHOSEN_CONV_WEIGHT_GRAD,
}


def choose_convolutions(graph: ir.Graph, measured: bool) -> None:
    """Rename ``Conv``, ``ConvTranspose`` and the gradients to ``ChosenConv``, ... in the domain ``burnish``, in place.

    They keep operands and attributes. They are taken in float32, with padding of zero or more, outside of what was compared:
    square kernels up to 7x7 of images, in one group and without dilation.

    Args:
        graph: a graph of which the other fusions of convolutions have taken what is theirs.
        measured: whether the calls measure the ways; else they take the usual one.
    """
    for node in graph:
        if _is_taken(node):
            node.domain, node.op_type = CHOSEN[node.op_type].key
            node.attributes["measured"] = ir.AttrInt64("measured", int(measured))


def _is_taken(node: ir.Node) -> bool:
    place = 1 if _is_transposed(node) else kernel_place(node)
    weight = None if place is None else node.inputs[place]
    if weight is None or weight.shape is None or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    kernel = [extent for extent in weight.shape[2:] if isinstance(extent, int)]
    rank = len(weight.shape) - 2
    if len(kernel) != rank or not 1 <= rank <= 3 or any(pad < 0 for pad in attribute_value(node, "pads", ())):
        return False
    # Of one pixel and with a stride, the gradient of the kernels has a way of its own, for the sake of oneDNN's faults.
    if max(kernel) == 1 and any(step > 1 for step in attribute_value(node, "strides", ())):
        return False
    compared = (
        rank == 2
        and not _is_transposed(node)
        and kernel[0] == kernel[1] <= ChosenConvolutions.LARGEST_COMPARED
        and attribute_value(node, "group", 1) == 1
        and all(step == 1 for step in attribute_value(node, "dilations", ()))
    )
    return not compared


def _is_transposed(node: ir.Node) -> bool:
    return node.op_type == "ConvTranspose" and node.domain == ""

"""Replace convolutions and their gradients: by run-time choice, products, Winograd's filtering, or depthwise kernels.

For the layers of image networks, the ways were compared, and the resulting rules are here. For other convolutions, such as
signals, volumes, long or dilated kernels, groups and transposed convolutions, one way may be a hundred times slower than another,
so the way is measured.

With channels last, a 1x1 convolution multiplies the pixels by the kernels, and both its gradients are products with that of its
results, which is read once for both. The gradient of any kernels is one product for each of their pixels. The batch decides which
way is faster for a 1x1 convolution, so it is chosen at run time.

Winograd's minimal filtering (3x3) is selected by the declared shapes; the kernels check at run time that these are large enough.

Depthwise kernels compute both gradients in one pass over dy. They support one square kernel of 3x3 or 5x5 per channel, without
dilation, a stride of 1 or 2, and at least 16 channels, in float32 or bfloat16. Memory is the limit there. They are faster than
oneDNN for MobileNetV2's layers, 3x3 in float32; 5x5 and bfloat16 were not timed. All others use ATen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node
from burnish.kernels.convolution import (
    CHOSEN_CONV,
    CHOSEN_CONV_INPUT_GRAD,
    CHOSEN_CONV_TRANSPOSE,
    CHOSEN_CONV_WEIGHT_GRAD,
    CONV_INPUT_GRAD_NARROW,
    CONV_WEIGHT_GRAD_NARROW,
    CONV_WEIGHT_GRAD_PRODUCTS,
    DEPTHWISE_CONV,
    DEPTHWISE_CONV_GRAD,
    POINTWISE_CONV,
    POINTWISE_CONV_GRAD,
    POINTWISE_CONV_INPUT_GRAD,
    WINOGRAD_CONV,
    WINOGRAD_CONV_INPUT_GRAD,
    WINOGRAD_CONV_WEIGHT_GRAD,
)
from burnish.kernels.thresholds import ChosenConvolutions, ConvolutionProducts
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD
from burnish.quantization.graph import is_exact


def kernel_place(node: ir.Node) -> int | None:
    """Return the position of the kernels among the operands of a convolution or its gradient; None for other nodes."""
    if node.op_type == "Conv" and node.domain == "":
        return 1
    gradient = next((operator for operator in (CONV_INPUT_GRAD, CONV_WEIGHT_GRAD) if operator.is_of(node)), None)
    return None if gradient is None else gradient.inputs.index("w")


CHOSEN = {
    "Conv": CHOSEN_CONV,
    "ConvTranspose": CHOSEN_CONV_TRANSPOSE,
    CONV_INPUT_GRAD.name: CHOSEN_CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD.name: CHOSEN_CONV_WEIGHT_GRAD,
}


def choose_convolutions(graph: ir.Graph, measured: bool) -> bool:
    """Rename ``Conv``, ``ConvTranspose`` and the gradients to ``ChosenConv``, ... in the domain ``burnish``, in place.

    They keep operands and attributes. This applies to float32 with nonnegative padding, except for the compared forms: square
    image kernels up to 7x7, in one group and without dilation.

    Args:
        graph: a graph after the other fusions of convolutions.
        measured: True if the calls measure the ways; otherwise they take the usual one.
    """
    changed = False
    for node in graph:
        if _is_taken(node):
            node.domain, node.op_type = CHOSEN[node.op_type].key
            node.attributes["measured"] = ir.AttrInt64("measured", int(measured))
            changed = True
    return changed


def _is_taken(node: ir.Node) -> bool:
    place = 1 if _is_transposed(node) else kernel_place(node)
    weight = None if place is None else node.inputs[place]
    if weight is None or weight.shape is None or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    kernel = [extent for extent in weight.shape[2:] if isinstance(extent, int)]
    rank = len(weight.shape) - 2
    if len(kernel) != rank or not 1 <= rank <= 3 or any(pad < 0 for pad in attribute_value(node, "pads", ())):
        return False
    # The weight gradient of a strided 1x1 convolution has its own way, because of faults of oneDNN.
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


def use_narrow_gradients(graph: ir.Graph) -> bool:
    """Replace ``ConvWeightGrad`` by ``ConvWeightGradNarrow``, and ``ConvInputGrad`` by ``ConvInputGradNarrow``, in place.

    This applies to bfloat16 images, in one group, without dilation, with kernels of known extents and symmetric padding; for the
    input gradient, only to strided 1x1 kernels without padding. Sort the graph afterwards.
    """
    changed = False
    for node in list(graph):
        window = _narrow_window(node)
        if window is None:
            continue
        extents, strides, pads = window
        if CONV_INPUT_GRAD.is_of(node) and (extents != [1, 1] or any(pads) or strides == [1, 1]):
            continue
        builder = Builder(graph, before=node)
        operands = [builder.tensor(value) for value in node.inputs if value is not None]
        narrow = CONV_INPUT_GRAD_NARROW if CONV_INPUT_GRAD.is_of(node) else CONV_WEIGHT_GRAD_NARROW
        replace_node(node, narrow(*operands, kernel_shape=extents, strides=strides, pads=pads))
        changed = True
    return changed


def _narrow_window(node: ir.Node) -> tuple[list[int], list[int], list[int]] | None:
    place = kernel_place(node) if node.domain == BURNISH_DOMAIN else None
    if place is None or node.outputs[0].dtype != ir.DataType.BFLOAT16:
        return None
    if any(
        value is None or value.dtype != ir.DataType.BFLOAT16 for value in node.inputs[:2]
    ):  # only the shape of a third operand is read
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


POINTWISE = {"Conv": POINTWISE_CONV, CONV_INPUT_GRAD.name: POINTWISE_CONV_INPUT_GRAD}

LEAST_CHANNELS = {
    "Conv": ConvolutionProducts.LEAST_CHANNELS,
    CONV_INPUT_GRAD.name: ConvolutionProducts.LEAST_CHANNELS,
    CONV_WEIGHT_GRAD.name: ConvolutionProducts.LEAST_CHANNELS_OF_GRADIENT,
}


def use_products(graph: ir.Graph) -> bool:
    """Replace convolutions and their gradients by products, in place.

    ``Conv`` and ``ConvInputGrad`` become ``PointwiseConv`` and ``PointwiseConvInputGrad``, with 1x1 kernels and no padding;
    ``ConvWeightGrad`` becomes ``ConvWeightGradProducts``, with kernels up to 3x3; both gradients of a layer become
    ``PointwiseConvGrad``, with 1x1 kernels, no padding and a stride of 1. All are float32, in one group, without dilation, with
    symmetric padding and enough channels on either side. Sort the graph afterwards.
    """
    changed = _join_gradients(graph)
    for node in list(graph):
        window = _window(node, LEAST_CHANNELS)
        if window is None:
            continue
        extents, strides, padding = window
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in node.inputs]
        if CONV_WEIGHT_GRAD.is_of(node):
            # Only the shape of the third operand is read, which follows from the others and the extents.
            result = CONV_WEIGHT_GRAD_PRODUCTS(*operands[:2], extents=extents, strides=strides, padding=padding)
        elif extents == [1, 1] and padding == [0, 0]:
            result = POINTWISE[node.op_type](*operands, strides=strides)
        else:
            continue
        replace_node(node, result)
        changed = True
    return changed


def _join_gradients(graph: ir.Graph) -> bool:
    """Join ``ConvInputGrad(dy, w, x)`` and ``ConvWeightGrad(dy, x, w)`` into ``PointwiseConvGrad(dy, x, w) -> dx, dw``.

    Only the shape of the former's x is read, which follows from dy and w; with recomputation of x, the latter reads another
    value.
    """
    changed = False
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
            changed = True
    return changed


def _window(node: ir.Node, least: dict[str, int]) -> tuple[list[int], list[int], list[int]] | None:
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


WINOGRAD = {
    "Conv": WINOGRAD_CONV,
    CONV_INPUT_GRAD.name: WINOGRAD_CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD.name: WINOGRAD_CONV_WEIGHT_GRAD,
}


def use_winograd(graph: ir.Graph) -> bool:
    """Replace ``Conv``, ``ConvInputGrad`` and ``ConvWeightGrad`` by ``WinogradConv``, ``WinogradConvInputGrad``, ..., in place.

    This applies to float32, with 3x3 kernels, strides and dilations of one, one group, and symmetric padding of 0 to 2.
    """
    changed = False
    for node in list(graph):
        padding = _padding(node)
        if padding is None or is_exact(node):
            continue
        # Only the shape of a gradient's third operand is read, which follows from the others here.
        read = node.inputs if node.op_type == "Conv" else node.inputs[:2]
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in read]
        replace_node(node, WINOGRAD[node.op_type](*operands, padding=padding))
        changed = True
    return changed


def _padding(node: ir.Node) -> list[int] | None:
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


LEAST_DEPTHWISE_CHANNELS = 16
KERNELS = (3, 5)
STRIDES = (1, 2)
DTYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def fuse_depthwise(graph: ir.Graph) -> bool:
    """Replace depthwise convolutions by ``burnish.DepthwiseConv`` and ``burnish.DepthwiseConvGrad``, in place.

    ``DepthwiseConv(x, w, b) -> y`` and ``DepthwiseConvGrad(dy, x, w) -> dx, dw``, with ``stride`` and ``pads`` (top, left,
    bottom, right); ``input`` and ``weight`` select the gradients to compute.
    """
    changed = False
    gradients: dict[tuple[Any, ...], _Gradients] = {}
    for node in list(graph):
        if node.op_type == "Conv" and node.domain == "":
            changed |= _fuse_forward(graph, node)
        elif CONV_INPUT_GRAD.is_of(node) or CONV_WEIGHT_GRAD.is_of(node):
            operands = _operands(node)
            window = _depthwise_window(node, *operands[1:])
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
    return changed or bool(gradients)


@dataclass(frozen=True)
class _Window:
    stride: int
    pads: tuple[int, ...]


@dataclass
class _Gradients:
    window: _Window
    of_input: ir.Node | None = None
    of_weight: ir.Node | None = None

    def fuse(self, graph: ir.Graph) -> None:
        first = self.of_input or self.of_weight
        assert first is not None
        builder = Builder(graph, before=first)
        # As they are now: dy may come from a gradient that was replaced.
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
    """Return dy, x and the weight of a ConvInputGrad or a ConvWeightGrad."""
    dy, second, third = node.inputs
    return (dy, third, second) if CONV_INPUT_GRAD.is_of(node) else (dy, second, third)


def _fuse_forward(graph: ir.Graph, node: ir.Node) -> bool:
    x, weight, *bias = node.inputs
    window = _depthwise_window(node, x, weight)
    if window is None:
        return False
    builder = Builder(graph, before=node)
    operands = [None if value is None else builder.tensor(value) for value in (x, weight, *bias)]
    y = DEPTHWISE_CONV(*operands, stride=window.stride, pads=list(window.pads))
    replace_node(node, y)
    return True


def _depthwise_window(node: ir.Node, x: ir.Value | None, weight: ir.Value | None) -> _Window | None:
    if x is None or weight is None or weight.shape is None or len(weight.shape) != 4:
        return None
    channels, multiplier, height, width = weight.shape.dims
    if not (isinstance(channels, int) and channels >= LEAST_DEPTHWISE_CHANNELS and multiplier == 1):
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

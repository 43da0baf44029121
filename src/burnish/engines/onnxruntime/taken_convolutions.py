"""Which convolutions and pools of a graph there are kernels for, whose images have their channels last."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.graph import attribute_value, same_padding, split_padding, static_shape
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD

LEAST_CHANNELS = 16
"""Of a depthwise convolution: as many as fill the widest vector."""

LEAST_WIDTH = 16
"""Channels read and made by a convolution that gains by a kernel, which goes along them."""

LEAST_TAKEN = 0.75
"""The share of what a graph's convolutions multiply whose kernels must gain: around one without, images are turned and turned
back."""


@dataclass
class Gradients:
    """The gradients of one convolution that a graph computes: one of them, or both.

    Attributes:
        window: what nodes of the kernels say of it.
        of_input, of_weight: the nodes.
    """

    window: dict[str, Any]
    of_input: ir.Node | None = None
    of_weight: ir.Node | None = None

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """Those that there are."""
        return tuple(node for node in (self.of_input, self.of_weight) if node is not None)

    @property
    def operands(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The gradient of its result, its images and its kernels, as they are now."""
        return operands_of(self.nodes[0])


def takes_most(graph: ir.Graph) -> bool:
    """Whether a graph computes gradients of convolutions, and gains by kernels for most of what its convolutions multiply.

    A stem with few channels gains nothing by them, and has them where the rest does. All of LeNet's convolutions are narrow: its
    step at batch 64 would take 19 ms in place of 8.
    """
    convolutions = [node for node in graph if _is_convolution(node)]
    if all(node.op_type == "Conv" for node in convolutions):
        return False
    taken = sum(_multiplications(node) for node in convolutions if window_of(node) is not None and _is_wide(node))
    return taken >= LEAST_TAKEN * sum(map(_multiplications, convolutions))


def gradients_of(graph: ir.Graph) -> dict[ir.Node, Gradients]:
    """The gradients of convolutions that there are kernels for, by their nodes."""
    by_use: dict[Hashable, Gradients] = {}
    taken = {}
    for node in graph:
        window = window_of(node) if node.op_type != "Conv" and _is_convolution(node) else None
        if window is None:
            continue
        of_input = CONV_INPUT_GRAD.is_of(node)
        # Two convolutions may read the same images and kernels, in other windows.
        gradients = by_use.setdefault((operands_of(node), *window.items()), Gradients(window))
        if (gradients.of_input if of_input else gradients.of_weight) is not None:
            gradients = Gradients(window)  # the same once more
        if of_input:
            gradients.of_input = node
        else:
            gradients.of_weight = node
        taken[node] = gradients
    return taken


def operands_of(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """dy, x and the kernels of a ConvInputGrad or a ConvWeightGrad."""
    dy, second, third = node.inputs
    assert dy is not None
    assert second is not None
    assert third is not None
    return (dy, third, second) if CONV_INPUT_GRAD.is_of(node) else (dy, second, third)


def window_of(node: ir.Node) -> dict[str, Any] | None:
    """What a node of the kernels says of the windows of a convolution, or of a gradient of one; None where there is no kernel.

    Kernels are for float32 images of static channels, in one group with any window, or depthwise with one of 3x3 or 5x5, a stride
    of 1 or 2 and no dilation; nothing is cut off by negative pads.
    """
    if not _is_convolution(node):
        return None
    kernels = _kernels(node)
    shape = None if kernels is None else static_shape(kernels)
    if shape is None or len(shape) != 4 or kernels is None or kernels.dtype != ir.DataType.FLOAT:
        return None
    windows = _windows(node, shape[2:])
    if windows is None or min(windows["pads"]) < 0:
        return None
    group = attribute_value(node, "group", 1)
    height, width = windows["kernel_shape"]
    is_depthwise = (
        shape[0] == group >= LEAST_CHANNELS
        and shape[1] == 1
        and height == width
        and height in (3, 5)
        and windows["strides"] in ((1, 1), (2, 2))
        and windows["dilations"] == (1, 1)
    )
    if group != 1 and not is_depthwise:
        return None
    return {**windows, "group": group}


def pool_window(node: ir.Node) -> dict[str, Any] | None:
    """The same of a MaxPool of images."""
    if node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.FLOAT or attribute_value(node, "ceil_mode", 0):
        return None
    windows = _windows(node, ())
    if windows is None or len(windows["kernel_shape"]) != 2 or windows.pop("dilations") != (1, 1):
        return None
    # A window with nothing of the image in it has no largest element.
    sizes = 2 * windows["kernel_shape"]
    return windows if all(0 <= pad < size for pad, size in zip(windows["pads"], sizes, strict=True)) else None


def _is_convolution(node: ir.Node) -> bool:
    return (node.op_type == "Conv" and node.domain == "") or CONV_INPUT_GRAD.is_of(node) or CONV_WEIGHT_GRAD.is_of(node)


def _kernels(node: ir.Node) -> ir.Value | None:
    """The kernels of a convolution, which its gradients read, too."""
    if node.op_type == "Conv":
        return node.inputs[1]
    operator = CONV_INPUT_GRAD if CONV_INPUT_GRAD.is_of(node) else CONV_WEIGHT_GRAD
    return node.inputs[operator.inputs.index("w")]


def _multiplications(node: ir.Node) -> int:
    """Of a convolution or a gradient of one, for one image; extents that are not known count as one."""
    kernels = _kernels(node)
    results = node.outputs[0] if node.op_type == "Conv" else node.inputs[0]
    count = 1
    for value, first in ((kernels, 0), (results, 2)):
        extents = () if value is None or value.shape is None else value.shape.dims[first:]
        count *= math.prod(extent for extent in extents if isinstance(extent, int))
    return count


def _is_wide(node: ir.Node) -> bool:
    """Whether a convolution reads and makes enough channels to gain by a kernel."""
    kernels = _kernels(node)
    shape = None if kernels is None else static_shape(kernels)
    return shape is not None and min(shape[0], shape[1] * attribute_value(node, "group", 1)) >= LEAST_WIDTH


def _windows(node: ir.Node, kernel_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """The attributes of a node with windows, with nothing left to a default; None where sizes that are not known decide them.

    Args:
        node: a convolution, a gradient of one, or a pool.
        kernel_shape: where the node leaves it to its weight.
    """
    kernel_shape = tuple(attribute_value(node, "kernel_shape", kernel_shape))
    rank = len(kernel_shape)
    strides, dilations = (tuple(attribute_value(node, name, (1,) * rank)) for name in ("strides", "dilations"))
    pads = tuple(attribute_value(node, "pads", (0,) * 2 * rank))
    automatic = attribute_value(node, "auto_pad", "NOTSET")
    if automatic == "VALID":
        pads = (0,) * 2 * rank
    elif automatic != "NOTSET":
        totals = _same_paddings(node.inputs[0], kernel_shape, strides, dilations)
        if totals is None:
            return None
        begins, ends = split_padding(totals, more_at_end=automatic == "SAME_UPPER")
        pads = (*begins, *ends)
    return {"kernel_shape": kernel_shape, "strides": strides, "dilations": dilations, "pads": pads}


def _same_paddings(
    data: ir.Value | None, kernel_shape: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> list[int] | None:
    """The padding along each axis, in total; None where a size decides it that is not known."""
    if data is None or data.shape is None:
        return None
    sizes = [size if isinstance(size, int) else None for size in data.shape.dims[2:]]
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel_shape, dilations, strict=True)]
    totals = [same_padding(*axis) for axis in zip(sizes, spans, strides, strict=True)]
    known = [total for total in totals if total is not None]
    return known if len(known) == len(totals) else None

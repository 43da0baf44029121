"""Store images with channels last, [N, H, W, C], for the kernels of convolutions: a pass over a training graph.

If a value has a twin with channels last, the nodes that support it read the twin: convolutions, batch normalization, pooling,
elementwise arithmetic, sums over axes. A ``Transpose`` is inserted only for nodes that need the other order. Kernels of
convolutions keep their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from burnish.graph import (
    Builder,
    Tensor,
    attribute_value,
    constant_array,
    remove_node,
    replace_value,
    same_padding,
    split_padding,
    static_shape,
)
from burnish.graph.uses import copy_of
from burnish.kernels.convolution import (
    CHANNELS_LAST_CONV,
    CHANNELS_LAST_CONV_GRAD,
    CHANNELS_LAST_MAX_POOL,
    CHANNELS_LAST_MAX_POOL_GRAD,
)
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.normalization import (
    FUSED_BATCH_NORM,
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_BATCH_NORM_MOMENTS,
)
from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD
from burnish.operators.pooling import MAX_POOL_GRAD
from burnish.operators.registry import elementwise

TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
"""Permutations of axes; ``TO_FIRST`` also maps an axis of [N, C, H, W] to its position in [N, H, W, C]."""

REDUCTIONS = frozenset("ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare".split())
GLOBAL_POOLS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}


def use_channels_last(graph: ir.Graph, threads: int) -> bool:
    """Make a training graph store its images with channels last, in place, if most of its convolutions have kernels.

    Args:
        graph: a topologically sorted graph; batch normalization is fused.
        threads: number of parts that kernels of convolutions split their sums into.
    """
    if not takes_most(graph):
        return False
    layout = _Layout(graph, threads)
    for node in list(graph):
        if node.graph is graph:  # both gradients of a convolution are replaced together
            layout.visit(node)
    return True


@dataclass(frozen=True)
class _BatchNorm:
    """A kernel of batch normalization, or of a part of it.

    Attributes:
        images, results: positions of the operands and outputs that are images.
        x: position of the layer's own operand.
    """

    operator: EngineOperator
    images: tuple[int, ...]
    results: tuple[int, ...]
    x: int


BATCH_NORMS = (
    _BatchNorm(FUSED_BATCH_NORM, (0, 3), (0,), 0),
    _BatchNorm(FUSED_BATCH_NORM_GRAD, (0, 1, 5, 6), (0, 3), 1),
    _BatchNorm(FUSED_BATCH_NORM_MOMENTS, (0,), (), 0),
    _BatchNorm(FUSED_BATCH_NORM_APPLY, (0, 5), (0,), 0),
    _BatchNorm(FUSED_BATCH_NORM_GRAD_SUMS, (0, 1, 4, 7), (1,), 1),
    _BatchNorm(FUSED_BATCH_NORM_GRAD_APPLY, (0, 1, 7), (0,), 1),
)


class _Layout:
    def __init__(self, graph: ir.Graph, threads: int):
        self.graph = graph
        self.threads = threads
        self.twins: dict[ir.Value, ir.Value] = {}
        self.gradients = gradients_of(graph)
        self.pools: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def visit(self, node: ir.Node) -> None:
        """Make a node read and return images with channels last, if it can and that is useful."""
        if node.domain == "":
            rewrite = self._standard(node)
            if rewrite is not None:
                rewrite(node)
        elif CONV_INPUT_GRAD.is_of(node) or CONV_WEIGHT_GRAD.is_of(node):
            if node in self.gradients:
                self._convolution_gradient(node, self.gradients[node])
        elif MAX_POOL_GRAD.is_of(node):
            self._max_pool_gradient(node)
        elif (batch_norm := next((each for each in BATCH_NORMS if each.operator.is_of(node)), None)) is not None:
            self._batch_norm(node, batch_norm)

    def _standard(self, node: ir.Node) -> Callable[[ir.Node], None] | None:
        op_type = node.op_type
        if op_type in ("Cast", "Clip") or elementwise(node) is not None:
            return self._elementwise
        if op_type in REDUCTIONS:
            return self._reduction
        if op_type in GLOBAL_POOLS:
            return self._global_pool
        rewrites = {
            "Conv": self._convolution,
            "MaxPool": self._max_pool,
            "Shape": self._shape,
            "Expand": self._expansion,
            "Concat": self._concatenation,
            "Slice": self._slice,
            "Split": self._split,
        }
        return rewrites.get(op_type)

    def _last(self, value: ir.Value, builder: Builder) -> Tensor:
        """Return the twin of an image, or of a value that is broadcast to images, made by a Transpose if necessary."""
        if value not in self.twins:
            order = TO_LAST if _rank(value) == 4 else (1, 2, 0)
            twin = builder.op("Transpose", builder.tensor(value), perm=order, dtype=value.dtype)
            twin.value.shape = _permuted(value.shape, order)
            self.twins[value] = twin.value
        return builder.tensor(self.twins[value])

    def _give(self, output: ir.Value, twin: Tensor) -> None:
        """Replace an output of a node by a twin, with a Transpose for readers that need the other order."""
        twin.value.type, twin.value.shape = output.type, _permuted(output.shape, TO_LAST)
        first = twin.builder.op("Transpose", twin, perm=TO_FIRST, dtype=output.dtype)
        first.value.shape = output.shape
        self.twins[first.value] = twin.value
        replace_value(output, first.value)

    def _has_twin(self, value: ir.Value | None) -> bool:
        return value is not None and value in self.twins

    def _convolution(self, node: ir.Node) -> None:
        window = window_of(node)
        x, w = node.inputs[:2]
        if window is None or x is None or w is None:
            return
        builder = Builder(self.graph, before=node)
        operands = [self._last(x, builder), *(builder.tensor(value) for value in node.inputs[1:] if value is not None)]
        self._give(node.outputs[0], CHANNELS_LAST_CONV(*operands, **window, threads=self.threads))
        remove_node(node)

    def _convolution_gradient(self, node: ir.Node, gradients: Gradients) -> None:
        present = gradients.nodes
        dy, x, w = gradients.operands
        builder = Builder(self.graph, before=node)
        outputs = builder.op(
            CHANNELS_LAST_CONV_GRAD.name,
            self._last(dy, builder),
            self._last(x, builder),
            builder.tensor(w),
            domain=CHANNELS_LAST_CONV_GRAD.key[0],
            outputs=len(present),
            **gradients.window,
            threads=self.threads,
            input=int(gradients.of_input is not None),
            weight=int(gradients.of_weight is not None),
        )
        results = list(outputs) if isinstance(outputs, tuple) else [outputs]
        if gradients.of_input is not None:
            self._give(gradients.of_input.outputs[0], results.pop(0))
        if gradients.of_weight is not None:
            (result,), output = results, gradients.of_weight.outputs[0]
            result.value.type, result.value.shape = output.type, output.shape
            replace_value(output, result.value)
        for taken in present:
            remove_node(taken)

    def _batch_norm(self, node: ir.Node, form: _BatchNorm) -> None:
        x = node.inputs[form.x]
        if not self._has_twin(x) or x is None or _rank(x) != 4 or x.dtype != ir.DataType.FLOAT:
            return
        builder = Builder(self.graph, before=node)
        operands = [
            None if value is None else self._last(value, builder) if place in form.images else builder.tensor(value)
            for place, value in enumerate(node.inputs)
        ]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        results = form.operator.emit(*operands, **attributes, channels_last=1)
        for place, (output, result) in enumerate(zip(node.outputs, results, strict=True)):
            if place in form.results:
                self._give(output, result)
            else:
                result.value.type, result.value.shape = output.type, output.shape
                replace_value(output, result.value)
        remove_node(node)

    def _elementwise(self, node: ir.Node) -> None:
        if not any(map(self._has_twin, node.inputs)) or _rank(node.outputs[0]) != 4:
            return
        if not all(value is None or _rank(value) in (3, 4) or _is_number(value) for value in node.inputs):
            return
        builder = Builder(self.graph, before=node)
        operands = [value if value is None or _is_number(value) else self._last(value, builder).value for value in node.inputs]
        self._give_copy(node, operands)

    def _copy(self, node: ir.Node, operands: Sequence[ir.Value | None], **attributes: int) -> tuple[Tensor, ...]:
        copied = copy_of(node, operands)
        for name, value in attributes.items():
            copied.attributes[name] = ir.AttrInt64(name, value)
        copied.metadata_props.update(node.metadata_props)
        self.graph.insert_before(node, copied)
        builder = Builder(self.graph, before=node)
        return tuple(builder.tensor(output) for output in copied.outputs)

    def _give_copy(self, node: ir.Node, operands: Sequence[ir.Value | None], **attributes: int) -> None:
        for output, twin in zip(node.outputs, self._copy(node, operands, **attributes), strict=True):
            self._give(output, twin)
        remove_node(node)

    def _reduction(self, node: ir.Node) -> None:
        data, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
        places = None if axes is None else constant_array(axes)
        if not self._has_twin(data) or data is None or _rank(data) != 4 or places is None:
            return
        reduced = sorted(int(place) % 4 for place in places)
        keeps = bool(attribute_value(node, "keepdims", 1))
        if not reduced or (not keeps and 1 not in reduced and not {2, 3} <= set(reduced)):
            return  # the remaining axes would change their order
        builder = Builder(self.graph, before=node)
        moved = builder.integers(sorted(TO_LAST.index(place) for place in reduced))
        (result,) = self._copy(node, [self.twins[data], moved.value])
        if keeps:
            self._give(node.outputs[0], result)
        else:
            replace_value(node.outputs[0], result.value)
        remove_node(node)

    def _global_pool(self, node: ir.Node) -> None:
        data = node.inputs[0]
        if data is None or not self._has_twin(data) or _rank(data) != 4:
            return
        builder = Builder(self.graph, before=node)
        axes = builder.integers([1, 2])
        pooled = builder.op(GLOBAL_POOLS[node.op_type], builder.tensor(self.twins[data]), axes, keepdims=1)
        self._give(node.outputs[0], pooled)
        remove_node(node)

    def _max_pool(self, node: ir.Node) -> None:
        x = node.inputs[0]
        indices = node.outputs[1] if len(node.outputs) > 1 else None
        readers = [] if indices is None else [reader for reader, _ in indices.uses()]
        window = pool_window(node)
        if window is None or x is None or not self._has_twin(x) or not all(map(MAX_POOL_GRAD.is_of, readers)):
            return
        if indices is not None and indices.is_graph_output():
            return
        builder = Builder(self.graph, before=node)
        image = self._last(x, builder)
        result = CHANNELS_LAST_MAX_POOL(image, **window)
        self._give(node.outputs[0], result)
        if indices is None or not readers:
            remove_node(node)
        else:  # removed when the gradients no longer read its indices
            self.pools[indices] = image.value, result.value

    def _max_pool_gradient(self, node: ir.Node) -> None:
        dy, indices = node.inputs[:2]
        if dy is None or indices is None or indices not in self.pools:
            return
        image, result = self.pools[indices]
        pool = indices.producer()
        assert pool is not None
        window = pool_window(pool)
        assert window is not None
        builder = Builder(self.graph, before=node)
        operands = self._last(dy, builder), builder.tensor(image), builder.tensor(result)
        self._give(node.outputs[0], CHANNELS_LAST_MAX_POOL_GRAD(*operands, **window))
        remove_node(node)

    def _shape(self, node: ir.Node) -> None:
        data = node.inputs[0]
        if data is None or not self._has_twin(data) or _rank(data) != 4:
            return
        start, end = attribute_value(node, "start", 0), attribute_value(node, "end", 4)
        builder = Builder(self.graph, before=node)
        extents = builder.op("Shape", builder.tensor(self.twins[data]))
        places = builder.integers(TO_FIRST[start:end])
        replace_value(node.outputs[0], builder.op("Gather", extents, places, like=builder.tensor(node.outputs[0])).value)
        remove_node(node)

    def _expansion(self, node: ir.Node) -> None:
        """For an image of one pixel: changing its layout costs nothing."""
        data, extents = node.inputs[:2]
        if data is None or extents is None or _rank(data) != 4 or data.shape is None or data.shape.dims[2:] != (1, 1):
            return
        if extents.shape is None or extents.shape.dims != (4,):
            return
        builder = Builder(self.graph, before=node)
        turned = builder.op("Gather", builder.tensor(extents), builder.integers(TO_LAST))
        self._give(node.outputs[0], builder.op("Expand", self._last(data, builder), turned))
        remove_node(node)

    def _concatenation(self, node: ir.Node) -> None:
        images = [value for value in node.inputs if value is not None]
        if not any(map(self._has_twin, images)) or any(_rank(value) != 4 for value in images):
            return
        builder = Builder(self.graph, before=node)
        operands = [self._last(value, builder).value for value in images]
        self._give_copy(node, operands, axis=TO_LAST.index(attribute_value(node, "axis", 1) % 4))

    def _slice(self, node: ir.Node) -> None:
        data, starts, ends, axes, *steps = node.inputs if len(node.inputs) > 3 else (*node.inputs[:3], None)
        places = None if axes is None else constant_array(axes)
        if data is None or not self._has_twin(data) or _rank(data) != 4 or places is None:
            return
        moved = Builder(self.graph, before=node).integers([TO_LAST.index(int(place) % 4) for place in places])
        self._give_copy(node, [self.twins[data], starts, ends, moved.value, *steps])

    def _split(self, node: ir.Node) -> None:
        data, *sizes = node.inputs
        if data is not None and self._has_twin(data) and _rank(data) == 4:
            self._give_copy(node, [self.twins[data], *sizes], axis=TO_LAST.index(attribute_value(node, "axis", 0) % 4))


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _is_number(value: ir.Value) -> bool:
    return value.shape is not None and (len(value.shape) == 0 or value.shape.dims == (1,))


def _permuted(shape: ir.Shape | None, order: Sequence[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape.dims[axis] for axis in order])


LEAST_CHANNELS = 16
"""The least number of channels of a depthwise convolution: it fills the widest vector."""

LEAST_WIDTH = 16
"""The number of input and output channels from which a kernel, which runs along channels, is worth it for a convolution."""

LEAST_TAKEN = 0.75
"""The share of a graph's multiplications in convolutions that must benefit from kernels: around one without, images are
transposed back and forth.
"""


@dataclass
class Gradients:
    """One or both gradients of a convolution in a graph.

    Attributes:
        window: attributes for nodes of the kernels.
        of_input, of_weight: the nodes.
    """

    window: dict[str, Any]
    of_input: ir.Node | None = None
    of_weight: ir.Node | None = None

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(node for node in (self.of_input, self.of_weight) if node is not None)

    @property
    def operands(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The gradient of its result, its images and its kernels, as they are now."""
        return operands_of(self.nodes[0])


def takes_most(graph: ir.Graph) -> bool:
    """True if a graph computes gradients of convolutions, and kernels benefit most multiplications in its convolutions.

    A stem with few channels does not benefit, but uses them if the others do. All of LeNet's convolutions are narrow: its step at
    batch 64 would take 19 ms instead of 8.
    """
    convolutions = [node for node in graph if _is_convolution(node)]
    if all(node.op_type == "Conv" for node in convolutions):
        return False
    taken = sum(_multiplications(node) for node in convolutions if window_of(node) is not None and _is_wide(node))
    return taken >= LEAST_TAKEN * sum(map(_multiplications, convolutions))


def gradients_of(graph: ir.Graph) -> dict[ir.Node, Gradients]:
    """Return the gradients of convolutions with kernels, by their nodes."""
    by_use: dict[Hashable, Gradients] = {}
    taken = {}
    for node in graph:
        window = window_of(node) if node.op_type != "Conv" and _is_convolution(node) else None
        if window is None:
            continue
        of_input = CONV_INPUT_GRAD.is_of(node)
        # Two convolutions may read the same images and kernels with other windows.
        gradients = by_use.setdefault((operands_of(node), *window.items()), Gradients(window))
        if (gradients.of_input if of_input else gradients.of_weight) is not None:
            gradients = Gradients(window)  # a duplicate
        if of_input:
            gradients.of_input = node
        else:
            gradients.of_weight = node
        taken[node] = gradients
    return taken


def operands_of(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return dy, x and the kernels of a ConvInputGrad or a ConvWeightGrad."""
    dy, second, third = node.inputs
    assert dy is not None
    assert second is not None
    assert third is not None
    return (dy, third, second) if CONV_INPUT_GRAD.is_of(node) else (dy, second, third)


def window_of(node: ir.Node) -> dict[str, Any] | None:
    """Return the window attributes of a convolution, or a gradient of one, for nodes of the kernels; None without a kernel.

    Kernels support float32 images of static channels, in one group with any window, or depthwise with a window of 3x3 or 5x5, a
    stride of 1 or 2 and no dilation; no negative pads.
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
    """Return the same for a MaxPool of images."""
    if node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.FLOAT or attribute_value(node, "ceil_mode", 0):
        return None
    windows = _windows(node, ())
    if windows is None or len(windows["kernel_shape"]) != 2 or windows.pop("dilations") != (1, 1):
        return None
    # A window without any element of the image has no maximum.
    sizes = 2 * windows["kernel_shape"]
    return windows if all(0 <= pad < size for pad, size in zip(windows["pads"], sizes, strict=True)) else None


def _is_convolution(node: ir.Node) -> bool:
    return (node.op_type == "Conv" and node.domain == "") or CONV_INPUT_GRAD.is_of(node) or CONV_WEIGHT_GRAD.is_of(node)


def _kernels(node: ir.Node) -> ir.Value | None:
    if node.op_type == "Conv":
        return node.inputs[1]
    operator = CONV_INPUT_GRAD if CONV_INPUT_GRAD.is_of(node) else CONV_WEIGHT_GRAD
    return node.inputs[operator.inputs.index("w")]


def _multiplications(node: ir.Node) -> int:
    """Return the number of multiplications of a convolution or its gradient, for one image; unknown extents count as one."""
    kernels = _kernels(node)
    results = node.outputs[0] if node.op_type == "Conv" else node.inputs[0]
    count = 1
    for value, first in ((kernels, 0), (results, 2)):
        extents = () if value is None or value.shape is None else value.shape.dims[first:]
        count *= math.prod(extent for extent in extents if isinstance(extent, int))
    return count


def _is_wide(node: ir.Node) -> bool:
    kernels = _kernels(node)
    shape = None if kernels is None else static_shape(kernels)
    return shape is not None and min(shape[0], shape[1] * attribute_value(node, "group", 1)) >= LEAST_WIDTH


def _windows(node: ir.Node, kernel_shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """Return the attributes of a node with windows, including defaults; None if they depend on unknown sizes.

    ``kernel_shape`` is used if the node has no such attribute.
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
    """Return the total padding along each axis; None if it depends on an unknown size."""
    if data is None or data.shape is None:
        return None
    sizes = [size if isinstance(size, int) else None for size in data.shape.dims[2:]]
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel_shape, dilations, strict=True)]
    totals = [same_padding(*axis) for axis in zip(sizes, spans, strides, strict=True)]
    known = [total for total in totals if total is not None]
    return known if len(known) == len(totals) else None

"""``Pad`` and ``Resize`` with values for all axes, since ONNX Runtime may mishandle nodes that list some axes.

ONNX Runtime 1.32's transpose optimizer (``Pad``: level ``basic`` and above, ``Resize``: ``extended``) moves transpositions across
them and permutes amounts, scales and sizes, but ignores ``axes``. With fewer values than axes it reads beyond their end, which
fails at run time. With all axes in another order the values silently go to the wrong ones.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, static_shape
from burnish.graph.names import separate_names


def complete_axes(model: ir.Model) -> bool:
    """Give every ``Pad`` and ``Resize`` with ``axes`` values for all axes in order, in place, including subgraphs.

    Constant values become a constant; computed ones are gathered. If the axes of a ``Pad`` are computed or its rank is unknown,
    its amounts are scattered at run time. A ``Resize`` of unknown rank, or that keeps the aspect ratio of its listed axes, stays.
    """
    changed = False
    incomplete = [node for node in model.graph.all_nodes() if names_axes(node)]
    for node in incomplete:
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        graph.opset_imports.setdefault("", model.opset_imports[""])
        changed |= _complete(node, graph)
    if changed:
        separate_names(model.graph)
    return changed


def names_axes(node: ir.Node) -> bool:
    """True for a ``Pad`` or ``Resize`` that lists axes."""
    if node.domain != "":
        return False
    if node.op_type == "Pad":
        return len(node.inputs) > 3 and node.inputs[3] is not None
    return node.op_type == "Resize" and "axes" in node.attributes


def _complete(node: ir.Node, graph: ir.Graph) -> bool:
    builder = Builder(graph, before=node)
    operands = [None if item is None else builder.tensor(item) for item in node.inputs]
    if node.op_type == "Pad":
        return _complete_pad(node, operands)
    return _complete_resize(node, operands)


def _complete_pad(node: ir.Node, operands: list[Tensor | None]) -> bool:
    x, amounts, value, axes = operands
    assert x is not None
    assert amounts is not None
    assert axes is not None
    if x.rank is None or axes.array is None:
        complete = _scattered(amounts, axes, x)
    else:
        positive = [int(axis) % x.rank for axis in axes.array.reshape(-1)]
        complete = _picked(amounts, positive, x.rank, x.builder.integers([0] * (2 * x.rank)))
    node.replace_input_with(1, complete.value)
    node.replace_input_with(3, None)
    node.resize_inputs(2 if value is None else 3)
    return True


def _complete_resize(node: ir.Node, operands: list[Tensor | None]) -> bool:
    x, roi, scales, sizes = operands + [None] * (4 - len(operands))
    assert x is not None
    if x.rank is None or attribute_value(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        return False
    builder, rank = x.builder, x.rank
    axes = [int(axis) % rank for axis in node.attributes["axes"].as_ints()]
    if sizes is not None and sizes.dimension(0) != 0:
        shape = static_shape(x.value)
        extents = builder.op("Shape", x) if shape is None else builder.integers(shape)
        node.replace_input_with(3, _picked(sizes, axes, rank, extents).value)
    elif scales is not None:
        ones = builder.constant(np.ones(rank, scales.dtype.numpy()))
        node.replace_input_with(2, _picked(scales, axes, rank, ones).value)
    if roi is not None and roi.dimension(0) != 0:
        whole = builder.constant(np.repeat(np.array([0, 1], roi.dtype.numpy()), rank))
        node.replace_input_with(1, _picked(roi, axes, rank, whole).value)
    node.attributes.pop("axes")
    return True


def _picked(numbers: Tensor, axes: list[int], rank: int, others: Tensor) -> Tensor:
    """Return values for all axes.

    Args:
        numbers: values for the listed axes, in their order; with two per axis, all first ones come before all second ones.
        axes: the listed axes; not negative.
        rank: number of axes.
        others: values for unlisted axes, of shape [rank], or [2 rank] with two per axis.
    """
    builder, rows = numbers.builder, (others.dimension(0) or rank) // rank
    behind = rows * len(axes)
    places = list(range(behind, behind + rows * rank))
    for row in range(rows):
        for place, axis in enumerate(axes):
            places[row * rank + axis] = row * len(axes) + place
    if numbers.array is not None and others.array is not None:
        return builder.constant(np.concatenate([numbers.array.reshape(-1), others.array])[places])
    return builder.op("Gather", builder.op("Concat", numbers, others, axis=0), builder.integers(places), axis=0)


def _scattered(amounts: Tensor, axes: Tensor, x: Tensor) -> Tensor:
    """Return amounts for all axes, with zeros for unlisted ones, if the axes or the rank are known only at run time."""
    builder = amounts.builder
    axes = builder.cast(axes, ir.DataType.INT64)
    rank = builder.integers([x.rank]) if x.rank is not None else builder.op("Shape", builder.op("Shape", x))
    axes = builder.op("Mod", axes, rank)
    zeros = builder.op("ConstantOfShape", rank * 2, value=ir.tensor(np.zeros(1, np.int64)), dtype=ir.DataType.INT64)
    return builder.op("ScatterElements", zeros, builder.op("Concat", axes, axes + rank, axis=0), amounts, axis=0)

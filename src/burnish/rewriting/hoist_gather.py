"""Selection before computation: computes only the rows that are read, such as the first token of a classifier.

A Gather with constant indices moves before the operators that treat rows alike: normalization over other axes, elementwise
arithmetic, products with a weight, the queries of attention. It stops at values that have other readers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from math import prod

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_node, same_dimension
from burnish.graph.uses import is_used
from burnish.operators.registry import Elementwise, elementwise

Edges = dict[int, int]
"""Operand index -> axis along which only the selected indices are needed."""

PRODUCTS = frozenset({"MatMul", "Gemm"})


def hoist_gather(model: ir.Model) -> bool:
    """Move row selections before the computation of these rows, in place, if that saves a product.

    Args:
        model: a canonical model with shapes, not yet bound to a mode.
    """
    changed = False
    places = _places(model.graph)
    for node in reversed(list(model.graph)):
        if node.op_type == "Gather" and node.domain == "" and node.graph is model.graph and _move(model.graph, node, places):
            places = _places(model.graph)
            changed = True
    return changed


def _places(graph: ir.Graph) -> dict[ir.Node, int]:
    return {node: place for place, node in enumerate(graph)}


def _move(graph: ir.Graph, selection: ir.Node, places: dict[ir.Node, int]) -> bool:
    source, index_operand = selection.inputs[:2]
    indices = None if index_operand is None else constant_array(index_operand)
    if source is None or source.shape is None or indices is None or indices.ndim > 1:
        return False
    axis = int(attribute_value(selection, "axis", 0)) % len(source.shape)
    extent, count = source.shape[axis], max(indices.size, 1)
    if isinstance(extent, int) and extent <= count:
        return False
    edges: dict[tuple[ir.Node, int], int] = {(selection, 0): axis}
    region: dict[ir.Node, int] = {}
    for node in _producers(selection, edges, places):
        needed = _needed(node, edges)
        operands = None if needed is None else _operands(node, needed)
        if needed is None or operands is None:
            continue
        region[node] = needed
        edges |= {(node, index): position for index, position in operands.items()}
    if not any(node.op_type in PRODUCTS for node in region):
        return False
    _rewrite(graph, selection, region, edges, indices.reshape(-1), places)
    return True


def _producers(selection: ir.Node, edges: dict[tuple[ir.Node, int], int], places: dict[ir.Node, int]) -> Iterator[ir.Node]:
    """Yield the producers of the operands in ``edges``, each after all its readers; the caller may add edges meanwhile."""
    waiting: list[tuple[int, ir.Node]] = []
    seen: set[ir.Node] = set()
    reader = selection
    while True:
        for index, value in enumerate(reader.inputs):
            producer = None if value is None or (reader, index) not in edges else value.producer()
            if producer is not None and producer in places and producer not in seen:
                seen.add(producer)
                heapq.heappush(waiting, (-places[producer], producer))
        if not waiting:
            return
        reader = heapq.heappop(waiting)[1]
        yield reader


def _needed(node: ir.Node, edges: dict[tuple[ir.Node, int], int]) -> int | None:
    if not node.outputs or any(map(is_used, node.outputs[1:])):
        return None
    output = node.outputs[0]
    axes = {edges.get((usage.node, usage.idx)) for usage in output.uses()}
    if output.is_graph_output() or len(axes) != 1 or output.shape is None:
        return None
    return axes.pop()


def _rewrite(
    graph: ir.Graph,
    selection: ir.Node,
    region: dict[ir.Node, int],
    edges: dict[tuple[ir.Node, int], int],
    indices: np.ndarray,
    places: dict[ir.Node, int],
) -> None:
    selected: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in sorted((*region, selection), key=places.__getitem__):
        for index, value in enumerate(node.inputs):
            axis = edges.get((node, index))
            if value is None or axis is None or value.producer() in region:
                continue
            if (value, axis) not in selected:
                builder = Builder(graph, before=node)
                gathered = builder.op("Gather", builder.tensor(value), builder.integers(indices.tolist()), axis=axis)
                gathered.value.type, gathered.value.shape = value.type, _with_extent(value, axis, indices.size)
                selected[value, axis] = gathered.value
            node.replace_input_with(index, selected[value, axis])
        if node is selection:
            continue
        output, axis = node.outputs[0], region[node]
        if node.op_type == "Reshape":
            assert output.shape is not None
            builder = Builder(graph, before=node)
            behind = [int(extent) for extent in output.shape.dims[axis + 1 :] if isinstance(extent, int)]
            node.replace_input_with(1, builder.integers([*[0] * axis, indices.size, *behind]).value)
        output.shape = _with_extent(output, axis, indices.size)
    result, index_operand = selection.inputs[:2]
    assert result is not None
    assert index_operand is not None
    builder = Builder(graph, before=selection)
    rows = builder.tensor(result)
    is_one = index_operand.shape is not None and len(index_operand.shape) == 0
    replace_node(
        selection,
        builder.op("Squeeze", rows, builder.integers([edges[selection, 0]])) if is_one else builder.op("Identity", rows),
    )


def _with_extent(value: ir.Value, axis: int, extent: int) -> ir.Shape:
    assert value.shape is not None
    dims = list(value.shape.dims)
    return ir.Shape([*dims[:axis], extent, *dims[axis + 1 :]])


def _operands(node: ir.Node, axis: int) -> Edges | None:
    """Return the operands needed for selected indices of a node's result along an axis; None if that may be everything."""
    if node.domain != "":
        return None
    if elementwise(node) is Elementwise.UNARY or node.op_type in ("Cast", "Clip", "Dropout"):
        return {0: axis}
    if elementwise(node) is Elementwise.BROADCAST:
        return _broadcast_operands(node, axis)
    rule = _RULES.get(node.op_type)
    return None if rule is None else rule(node, axis)


def _broadcast_operands(node: ir.Node, axis: int) -> Edges | None:
    shape = node.outputs[0].shape
    assert shape is not None
    edges: Edges = {}
    for index, value in enumerate(node.inputs):
        if value is None or value.shape is None:
            return None
        position = axis - len(shape) + len(value.shape)
        if position < 0 or value.shape[position] == 1:
            continue
        if not same_dimension(value.shape[position], shape[axis]):
            return None
        edges[index] = position
    return edges or None


def _matmul_operands(node: ir.Node, axis: int) -> Edges | None:
    """Select rows of the left operand; batch axes of the right operand stay whole."""
    left, right = (None if value is None or value.shape is None else len(value.shape) for value in node.inputs[:2])
    shape = node.outputs[0].shape
    assert shape is not None
    if left != len(shape) or right is None or right < 2:
        return None
    if axis == len(shape) - 2 or (right == 2 and axis < len(shape) - 2):
        return {0: axis}
    return None


def _gemm_operands(node: ir.Node, axis: int) -> Edges | None:
    addend = node.inputs[2] if len(node.inputs) > 2 else None
    if axis != 0 or attribute_value(node, "transA", 0):
        return None
    if addend is None or (addend.shape is not None and len(addend.shape) < 2):
        return {0: 0}
    return {0: 0} if addend.shape is not None and addend.shape[0] == 1 else None


def _row_operands(default: int) -> Callable[[ir.Node, int], Edges | None]:
    def operands(node: ir.Node, axis: int) -> Edges | None:
        shape = node.outputs[0].shape
        assert shape is not None
        first = int(attribute_value(node, "axis", default)) % len(shape)
        return {0: axis} if axis < first else None

    return operands


def _softmax_operands(node: ir.Node, axis: int) -> Edges | None:
    shape = node.outputs[0].shape
    assert shape is not None
    return {0: axis} if int(attribute_value(node, "axis", -1)) % len(shape) != axis else None


def _transpose_operands(node: ir.Node, axis: int) -> Edges | None:
    shape = node.outputs[0].shape
    assert shape is not None
    permutation = attribute_value(node, "perm", None) or range(len(shape))[::-1]
    return {0: int(permutation[axis])}


def _reshape_operands(node: ir.Node, axis: int) -> Edges | None:
    """The axis and all axes before it must be unchanged, and the other extents known."""
    source, output = node.inputs[0], node.outputs[0].shape
    if (
        source is None
        or source.shape is None
        or output is None
        or len(source.shape) <= axis
        or attribute_value(node, "allowzero", 0)
    ):
        return None
    if not all(same_dimension(source.shape[position], output[position]) for position in range(axis + 1)):
        return None
    unknown = [extent for extent in (*source.shape.dims[axis + 1 :], *output.dims[axis + 1 :]) if not isinstance(extent, int)]
    behind = [extent for extent in output.dims[axis + 1 :] if isinstance(extent, int)]
    return None if unknown or prod(behind) == 0 else {0: axis}


_RULES: dict[str, Callable[[ir.Node, int], Edges | None]] = {
    "Gemm": _gemm_operands,
    "LayerNormalization": _row_operands(-1),
    "LogSoftmax": _softmax_operands,
    "MatMul": _matmul_operands,
    "RMSNormalization": _row_operands(-1),
    "Reshape": _reshape_operands,
    "Softmax": _softmax_operands,
    "Transpose": _transpose_operands,
}

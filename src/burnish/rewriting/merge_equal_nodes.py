"""Merging of equal nodes: casts of a value to one dtype, and computations of a few numbers."""

from __future__ import annotations

from collections.abc import Collection, Hashable

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, remove_node, replace_value, static_shape
from burnish.graph.uses import remove_unread_nodes
from burnish.rewriting.fold_constants import fold_constants


def merge_casts(model: ir.Model) -> bool:
    """Share the first cast of a value to each dtype between all readers, in place, and remove the others."""
    changed = False
    first: dict[tuple[ir.Value | None, int, int], ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "Cast" or node.domain != "" or set(node.attributes) - {"to", "saturate"}:
            continue
        key = (node.inputs[0], node.attributes["to"].as_int(), attribute_value(node, "saturate", 1))
        earlier = first.setdefault(key, node.outputs[0])
        if earlier is not node.outputs[0] and not node.outputs[0].is_graph_output():
            replace_value(node.outputs[0], earlier)
            remove_node(node)
            changed = True
    return changed


INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
COUNTING = frozenset(
    "Add Cast Concat Div Gather Max Min Mul ReduceProd ReduceSum Reshape Shape Size Slice Squeeze Sub Unsqueeze".split()
)
MOST_ELEMENTS = 8
"""Largest merged integer tensor, in elements, enough for a shape; other numbers are only merged as scalars."""


def merge_scalars(model: ir.Model) -> bool:
    """Share equal small values and replace known extents by constants, in place, in the main graph only."""
    graph = model.graph
    names = {extent.value for value in graph.inputs for extent in value.shape or () if isinstance(extent, ir.SymbolicDim)}
    first: dict[Hashable, ir.Value] = {}
    has_folded = changed = False
    for node in list(graph):
        if node.domain != "" or len(node.outputs) != 1 or node.outputs[0].is_graph_output():
            continue
        extents = _extents(node, names)
        if extents is not None and all(isinstance(extent, int) for extent in extents[0]):
            numbers = np.array(extents[0], np.int64).reshape(extents[1])
            replace_value(node.outputs[0], Builder(graph, before=node).constant(numbers).value)
            remove_node(node)
            has_folded = True
            continue
        key = ("extents", *extents) if extents is not None else _key(node)
        if key is not None and first.setdefault(key, node.outputs[0]) is not node.outputs[0]:
            replace_value(node.outputs[0], first[key])
            remove_node(node)
            changed = True
    if has_folded:
        fold_constants(model)
    return remove_unread_nodes(graph) or changed or has_folded


def _extents(node: ir.Node, names: Collection[str | None]) -> tuple[tuple[int | str | None, ...], tuple[int, ...]] | None:
    """Return the extents that a node computes, integers or known names, and their shape; None for other nodes."""
    if node.op_type == "Shape":
        source, picked = node.inputs[0], None
    elif node.op_type == "Gather" and attribute_value(node, "axis", 0) == 0:
        shape = None if node.inputs[0] is None else node.inputs[0].producer()
        picked = constant_array(node.inputs[1])
        if shape is None or shape.op_type != "Shape" or shape.domain != "" or shape.attributes or picked is None:
            return None
        source = shape.inputs[0]
    else:
        return None
    if source is None or source.shape is None:
        return None
    dimensions = [extent if isinstance(extent, int) else extent.value for extent in source.shape.dims]
    if picked is None:
        dimensions = dimensions[attribute_value(node, "start", 0) : attribute_value(node, "end", None)]
        picked = np.arange(len(dimensions))
    if any(not -len(dimensions) <= index < len(dimensions) for index in picked.flat):
        return None
    extents = tuple(dimensions[index] for index in picked.flat)
    is_known = all(isinstance(extent, int) or (extent is not None and extent in names) for extent in extents)
    return (extents, picked.shape) if is_known else None


def _key(node: ir.Node) -> Hashable | None:
    output = node.outputs[0]
    shape = static_shape(output)
    if shape is None or int(np.prod(shape)) > MOST_ELEMENTS or (shape and output.dtype not in INTEGERS):
        return None
    if node.op_type == "Constant":
        array = constant_array(output) if output.dtype != ir.DataType.STRING else None
        return None if array is None else (node.op_type, output.dtype, shape, array.tobytes())
    if node.op_type not in COUNTING:
        return None
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    return node.op_type, output.dtype, shape, attributes, tuple(node.inputs)

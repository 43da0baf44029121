"""The extents of ranges that count along an axis, such as the places that a causal mask compares.

The standard's inference gives a Range an extent where its limit is a number, and none where it is the extent of an open axis.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from burnish.graph import attribute_value, constant_array
from burnish.graph.uses import producer_of
from burnish.importer.shapes import infer_shapes

_PASSES_ON = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators that leave the one element of a length what it is."""


def settle_range_shapes(model: ir.Model) -> None:
    """Give, in place, each Range from 0 by 1 the dimension that it counts along, and infer the shapes of what reads it.

    Args:
        model: its other shapes have been inferred, and its open dimensions have names. One with a Loop is left alone.
    """
    counted: dict[ir.Value, Any] = {}
    for node in model.graph.all_nodes():
        if node.op_type == "Loop" and node.domain == "":
            return
        if node.op_type == "Range" and node.domain == "" and _counts_up(node):
            dimension = _counted_dimension(node.inputs[1])
            output = node.outputs[0]
            if dimension is not None and (output.shape is None or not _is_known(output.shape[0])):
                counted[output] = dimension
    for output, dimension in counted.items():
        output.shape = ir.Shape([dimension])
    if counted:
        infer_shapes(model, known={output.name or "" for output in counted})


def _counts_up(node: ir.Node) -> bool:
    start, step = (constant_array(node.inputs[index]) for index in (0, 2))
    return start is not None and step is not None and start.size == step.size == 1 and start.item() == 0 and step.item() == 1


def _is_known(dimension: Any) -> bool:
    return isinstance(dimension, int) or (dimension.value is not None and not dimension.value.startswith("unk__"))


def _counted_dimension(length: ir.Value | None) -> Any:
    """The dimension whose extent a value of one element is, where that is open and has a name; else None."""
    while length is not None and (passing := producer_of(length, *_PASSES_ON)) is not None:
        length = passing.inputs[0]
    picked = producer_of(length, "Gather", "Slice")
    place = 0
    if picked is not None:
        operands = [constant_array(value) for value in picked.inputs[1:]]
        if not operands or any(array is None or array.size != 1 for array in operands):
            return None
        numbers = [int(array.item()) for array in operands if array is not None]
        if picked.op_type == "Slice" and numbers[1] != numbers[0] + 1:
            return None
        place, length = numbers[0], picked.inputs[0]
    maker = producer_of(length, "Shape")
    if maker is None or maker.inputs[0] is None or maker.inputs[0].shape is None:
        return None
    dimensions = maker.inputs[0].shape.dims[attribute_value(maker, "start", 0) : attribute_value(maker, "end", None)]
    if not -len(dimensions) <= place < len(dimensions) or (picked is None and len(dimensions) != 1):
        return None
    dimension = dimensions[place]
    return dimension if isinstance(dimension, ir.SymbolicDim) and _is_known(dimension) else None

"""Replace slices of a tensor that are concatenated in another order by one ``Gather`` of blocks.

PyTorch's exporter reorders the gates of recurrent layers like this, and their gradients are reordered too. ONNX Runtime copies
every slice and the concatenation on one thread, but gathers once, on all threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_value, static_shape
from burnish.graph.uses import producer_of, remove_unread

LEAST_BLOCK = 1 << 12
"""Smallest block in elements; for smaller ones the two added reshapes take longer than the copies."""


@dataclass(frozen=True)
class _Part:
    whole: ir.Value
    start: int
    end: int


def gather_reordered_blocks(model: ir.Model) -> bool:
    """Replace concatenations of slices of one tensor along the first axis, in place, in the main graph only.

    Shapes must be static, and the slice bounds multiples of a number of rows with at least ``LEAST_BLOCK`` elements.
    """
    changed = False
    for node in list(model.graph):
        if node.domain != "" or node.op_type != "Concat" or attribute_value(node, "axis", None) != 0 or len(node.inputs) < 2:
            continue
        parts = [part for value in node.inputs if (part := _part(value)) is not None]
        if len(parts) < len(node.inputs) or len({part.whole for part in parts}) > 1 or _is_in_order(parts):
            continue
        whole, result = parts[0].whole, node.outputs[0]
        extents = static_shape(whole)
        assert extents is not None
        rows = math.gcd(extents[0], *(place for part in parts for place in (part.start, part.end)))
        block = rows * math.prod(extents[1:])
        if block < LEAST_BLOCK:
            continue
        places = [place for part in parts for place in range(part.start // rows, part.end // rows)]
        builder = Builder(model.graph, before=node)
        blocks = builder.op("Reshape", builder.tensor(whole), builder.integers([extents[0] // rows, block]))
        gathered = builder.op("Gather", blocks, builder.integers(places), axis=0)
        shape = builder.integers([len(places) * rows, *extents[1:]])
        replace_value(result, builder.op("Reshape", gathered, shape, like=builder.tensor(result)).value)
        remove_unread(model.graph, node)
        changed = True
    return changed


def _part(value: ir.Value | None) -> _Part | None:
    node = producer_of(value, "Slice", "Split")
    whole = None if node is None else node.inputs[0]
    if node is None or value is None or whole is None:
        return None
    extents, own = static_shape(whole), static_shape(value)
    if not extents or not own:
        return None
    start = _start_of_slice(node, extents[0]) if node.op_type == "Slice" else _start_of_output(node, value)
    return None if start is None else _Part(whole, start, start + own[0])


def _start_of_slice(node: ir.Node, count: int) -> int | None:
    """Return the first row of a ``Slice`` with step 1 along the first axis; None for any other."""
    starts, _, axes, steps = (*node.inputs[1:], None, None)[:4]
    start, axis, step = (constant_array(operand) for operand in (starts, axes, steps))
    of_rows = start is not None and start.size == 1 and axis is not None and axis.tolist() == [0]
    if start is None or not of_rows or not (steps is None or (step is not None and step.tolist() == [1])):
        return None
    begin = int(start[0])
    return min(max(begin + count if begin < 0 else begin, 0), count)


def _start_of_output(node: ir.Node, value: ir.Value) -> int | None:
    if attribute_value(node, "axis", 0) != 0:
        return None
    start = 0
    for output in node.outputs:
        if output is value:
            return start
        if output.shape is None or not isinstance(output.shape[0], int):
            return None
        start += output.shape[0]
    return None


def _is_in_order(parts: list[_Part]) -> bool:
    """True if the parts are in their original order: other passes turn such a concatenation into a single slice."""
    return all(first.end == second.start for first, second in pairwise(parts))

"""Search for the linear layers whose joined, cut or reshaped results make up a value."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import attribute_value, constant_array

PASSING = frozenset(
    {
        "Reshape",
        "Transpose",
        "Concat",
        "Squeeze",
        "Unsqueeze",
        "Identity",
        "Cast",
        "Flatten",
        "Slice",
        "Split",
        "Gather",
        "Dropout",
    }
)
"""Operators that only move elements."""
LINEAR = ("Conv", "Gemm", "MatMul")
SAME_AXES = ("Identity", "Cast", "Dropout")


@dataclass(frozen=True)
class Part:
    """A range along an axis of a value.

    Attributes:
        axis: the axis.
        begin, end: first index, and the index after the last.
    """

    axis: int
    begin: int
    end: int


def linear_sources(value: ir.Value, part: Part | None = None) -> list[ir.Node] | None:
    """Return the linear layers that make up a value, in the order of its elements.

    Args:
        value: value in a canonical model.
        part: the part of it to trace; None for all.

    Returns:
        ``Conv``, ``Gemm`` and ``MatMul`` nodes with their own weights, each once; None if other operators are involved or only a
            part of a layer's result is used.
    """
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type in LINEAR:
        has_weight = len(node.inputs) > 1 and node.inputs[1] is not None and node.inputs[1].is_initializer()
        return [node] if has_weight and part is None else None
    if node.op_type == "Add":
        terms = [operand for operand in node.inputs if operand is not None and not operand.is_initializer()]
        read = linear_sources(terms[0], part) if len(terms) == 1 else None
        return read if read is not None and len(read) == 1 and read[0].op_type == "MatMul" else None
    sources: dict[ir.Node, None] = {}
    read_of = _operands(node, value, part)
    for operand, own in read_of or ():
        found = linear_sources(operand, own)
        if found is None:
            return None
        sources |= dict.fromkeys(found)
    return list(sources) if read_of else None


def is_moved(value: ir.Value) -> bool:
    """True if a value holds only results of linear layers, or parts of them."""
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type not in PASSING:
        return linear_sources(value) is not None
    operands = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return all(operand is not None and is_moved(operand) for operand in operands)


def _operands(node: ir.Node, value: ir.Value, part: Part | None) -> list[tuple[ir.Value, Part | None]] | None:
    if node.op_type == "Concat":
        return _joined(node, part)
    source = node.inputs[0] if node.inputs else None
    if source is None or node.op_type not in PASSING:
        return None
    if node.op_type in ("Split", "Slice"):
        cut = _cut(node, value, source)
        if cut is None or (part is not None and part.axis != cut.axis):
            return None
        if part is not None:
            cut = Part(cut.axis, cut.begin + part.begin, cut.begin + part.end)
        return [(source, _unless_whole(source, cut))]
    if part is None or node.op_type in SAME_AXES:
        return [(source, part)]
    if node.op_type == "Transpose":
        perm = attribute_value(node, "perm", None)
        return None if perm is None else [(source, Part(perm[part.axis], part.begin, part.end))]
    is_kept = node.op_type == "Reshape" and part.axis == 1 and _extent(source, 1) == _extent(value, 1) is not None
    return [(source, part)] if is_kept else None


def _joined(node: ir.Node, part: Part | None) -> list[tuple[ir.Value, Part | None]] | None:
    operands = [operand for operand in node.inputs if operand is not None]
    if part is None:
        return [(operand, None) for operand in operands]
    rank = max((len(operand.shape) for operand in operands if operand.shape is not None), default=0)
    if not rank or attribute_value(node, "axis", 0) % rank != part.axis:
        return [(operand, part) for operand in operands]
    chosen, begin = [], 0
    for operand in operands:
        extent = _extent(operand, part.axis)
        if extent is None:
            return None
        first, last = max(part.begin, begin), min(part.end, begin + extent)
        if first < last:
            own = Part(part.axis, first - begin, last - begin)
            chosen.append((operand, _unless_whole(operand, own)))
        begin += extent
    return chosen


def _cut(node: ir.Node, value: ir.Value, source: ir.Value) -> Part | None:
    if source.shape is None:
        return None
    rank = len(source.shape)
    if node.op_type == "Split":
        axis = attribute_value(node, "axis", 0) % rank
        sizes = [_extent(output, axis) for output in node.outputs]
        index = value.index() or 0
        known = [size for size in sizes[: index + 1] if size is not None]
        return Part(axis, sum(known[:-1]), sum(known)) if len(known) == index + 1 else None
    read = [constant_array(operand) if operand is not None else None for operand in node.inputs[1:]]
    starts, ends, axes, steps = (*read, None, None, None)[:4]
    if starts is None or ends is None or axes is None or len(axes) != 1 or (steps is not None and int(steps[0]) != 1):
        return None
    axis = int(axes[0]) % rank
    extent = _extent(source, axis)
    if extent is None:
        return None
    begin, end = (min(max(number + extent if number < 0 else number, 0), extent) for number in (int(starts[0]), int(ends[0])))
    return Part(axis, begin, end)


def _unless_whole(value: ir.Value, part: Part) -> Part | None:
    return None if part.begin == 0 and part.end == _extent(value, part.axis) else part


def _extent(value: ir.Value, axis: int) -> int | None:
    extent = None if value.shape is None or axis >= len(value.shape) else value.shape[axis]
    return extent if isinstance(extent, int) else None

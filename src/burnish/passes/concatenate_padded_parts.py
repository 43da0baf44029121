"""A sum of tensors that are padded with zeros, each to a place of its own, becomes one concatenation.

The gradient of slices that a tensor is put together of anew is such a sum: PyTorch's exporter brings the gates of a recurrent
layer into the standard's order in this way. Every padded part, and every sum, is as large as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_value
from burnish.graph.uses import is_read_once, producer_of, remove_unread


@dataclass(frozen=True)
class _Part:
    """A tensor, the axis that it is padded along, where it stands there, and the extent of the whole."""

    value: ir.Value
    axis: int
    start: int
    end: int
    whole: int


def concatenate_padded_parts(model: ir.Model) -> ir.Model:
    """Replace sums whose terms tile the whole along one axis, in place; in the main graph alone.

    Results stay as they are, but for the sign of a zero: -0 in a part remains one.

    Returns:
        The same model, for the same inputs and outputs.
    """
    for node in reversed(list(model.graph)):
        parts = _parts_of(node.outputs[0]) if node.op_type == "Add" and node.domain == "" else None
        if parts is None or not _tile(parts):
            continue
        whole = node.outputs[0]
        builder = Builder(model.graph, before=node)
        ordered = [builder.tensor(part.value) for part in sorted(parts, key=lambda part: part.start)]
        joined = builder.op("Concat", *ordered, axis=parts[0].axis, like=builder.tensor(whole)).value
        replace_value(whole, joined)
        remove_unread(model.graph, node)
    return model


def _parts_of(value: ir.Value) -> list[_Part] | None:
    """The padded parts that a value is the sum of; None where anything else is in it."""
    node = producer_of(value, "Add", "Pad")
    if node is None:
        return None
    if node.op_type == "Pad":
        part = _padded_part(node)
        return None if part is None else [part]
    parts: list[_Part] = []
    for operand in node.inputs:
        terms = _parts_of(operand) if operand is not None and is_read_once(operand) else None
        if terms is None:
            return None
        parts += terms
    return parts


def _padded_part(pad: ir.Node) -> _Part | None:
    """What a ``Pad`` pads with zeros along one axis, of a static extent; None for any other."""
    value, pads, filling, axes = (*pad.inputs, None, None)[:4]
    widths = constant_array(pads)
    if attribute_value(pad, "mode", "constant") != "constant" or axes is not None or not _is_zero(filling):
        return None
    if value is None or value.shape is None or widths is None or (widths < 0).any():
        return None
    begin, end = np.split(widths, 2)
    padded = np.flatnonzero(begin + end)
    if len(padded) != 1:
        return None
    axis = int(padded[0])
    extent = value.shape.dims[axis]
    if not isinstance(extent, int):
        return None
    start = int(begin[axis])
    return _Part(value, axis, start, start + extent, start + extent + int(end[axis]))


def _is_zero(filling: ir.Value | None) -> bool:
    array = constant_array(filling)
    return filling is None or (array is not None and not array.any())


def _tile(parts: list[_Part]) -> bool:
    """Whether parts stand side by side along one axis, without gaps, and fill the whole."""
    ordered = sorted(parts, key=lambda part: part.start)
    one_whole = len({(part.axis, part.whole) for part in parts}) == 1
    meets = all(first.end == second.start for first, second in pairwise(ordered))
    return one_whole and meets and ordered[0].start == 0 and ordered[-1].end == ordered[-1].whole

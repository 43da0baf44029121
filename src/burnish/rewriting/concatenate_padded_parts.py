"""Replace a sum of zero-padded, disjoint tensors by one concatenation.

Such sums are gradients of slices that are concatenated in a new order, for example when PyTorch's exporter reorders the gates of
a recurrent layer. Every padded part, and every sum, is as large as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_value
from burnish.graph.uses import is_read_once, remove_unread


@dataclass(frozen=True)
class _Part:
    value: ir.Value
    start: int
    end: int


@dataclass(frozen=True)
class _Sum:
    """A sum of padded parts.

    Attributes:
        place: common to all parts: the axis, the extent of the whole along it, and the other extents.
        parts: distinct parts.
        extent: total extent of the parts.
    """

    place: tuple[int, int, tuple[int | str | None, ...]]
    parts: tuple[_Part, ...]
    extent: int


def concatenate_padded_parts(model: ir.Model) -> bool:
    """Replace sums whose terms tile the whole along one axis, in place, in the main graph only.

    Results are equal except for the sign of zeros: -0 in a part stays -0.
    """
    changed = False
    sums = _sums(model.graph)
    # Backwards, so that a whole sum is replaced before the sums within it.
    for node in reversed(list(model.graph)):
        added = sums.get(node.outputs[0]) if node.op_type == "Add" and node.graph is not None else None
        if added is None or not _tiles(added):
            continue
        whole = node.outputs[0]
        builder = Builder(model.graph, before=node)
        ordered = [builder.tensor(part.value) for part in sorted(added.parts, key=lambda part: part.start)]
        joined = builder.op("Concat", *ordered, axis=added.place[0], like=builder.tensor(whole)).value
        replace_value(whole, joined)
        remove_unread(model.graph, node)
        changed = True
    return changed


def _sums(graph: ir.Graph) -> dict[ir.Value, _Sum]:
    """Return the padded parts, and the sums of only such parts that are not longer than the whole."""
    sums: dict[ir.Value, _Sum] = {}
    for node in graph:
        if node.domain != "" or node.op_type not in ("Add", "Pad"):
            continue
        if node.op_type == "Pad":
            added = _padded_part(node)
        else:
            terms = [sums[value] for value in node.inputs if value in sums and is_read_once(value)]
            added = _together(*terms) if len(terms) == 2 else None
        if added is not None:
            sums[node.outputs[0]] = added
    return sums


def _together(first: _Sum, second: _Sum) -> _Sum | None:
    extent = first.extent + second.extent
    if first.place != second.place or extent > first.place[1]:
        return None
    return _Sum(first.place, first.parts + second.parts, extent)


def _padded_part(pad: ir.Node) -> _Sum | None:
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
    others = [extent if isinstance(extent, int) else extent.value for extent in value.shape.dims]
    extent = others.pop(axis)
    if not isinstance(extent, int) or None in others:
        return None
    start = int(begin[axis])
    return _Sum((axis, start + extent + int(end[axis]), tuple(others)), (_Part(value, start, start + extent),), extent)


def _is_zero(filling: ir.Value | None) -> bool:
    array = constant_array(filling)
    return filling is None or (array is not None and not array.any())


def _tiles(added: _Sum) -> bool:
    whole = added.place[1]
    if added.extent != whole:
        return False
    ordered = sorted(added.parts, key=lambda part: part.start)
    meets = all(first.end == second.start for first, second in pairwise(ordered))
    return meets and ordered[0].start == 0 and ordered[-1].end == whole

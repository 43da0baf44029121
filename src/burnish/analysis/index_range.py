"""Which values an integer input may hold: those that are rows of what it selects from."""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import describe_node

REARRANGES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result holds every element of their first input."""


def index_range(value: ir.Value) -> tuple[int | None, int | None]:
    """Return the smallest and largest value that an input of indices may hold, None and None where it is read as something else.

    A Gather from an axis of n takes -n to n - 1, where -1 is the last, by the standard. Only what every run of the main graph
    computes counts, not what a branch may read.

    Raises:
        ModelError: a Gather along an axis that there is not.
    """
    extents: set[int] = set()
    pending = [value]
    while pending:
        current = pending.pop()
        for node, position in current.uses():
            if node.domain != "" or node.graph is not value.graph:
                continue
            if node.op_type == "Gather" and position == 1:
                extents.update(_extent(node))
            elif node.op_type in REARRANGES and position == 0 and _is_integer(node.outputs[0]):
                pending.append(node.outputs[0])
    return (-min(extents), min(extents) - 1) if extents else (None, None)


def _extent(gather: ir.Node) -> tuple[int, ...]:
    data = gather.inputs[0]
    if data is None or data.shape is None or len(data.shape) == 0:
        return ()
    axis = gather.attributes["axis"].as_int() if "axis" in gather.attributes else 0
    if not -len(data.shape) <= axis < len(data.shape):
        raise ModelError(
            f"{describe_node(gather)} gathers along axis {axis} of '{data.name}', which has {len(data.shape)} axes. "
            "Export the model again"
        )
    extent = data.shape[axis]
    return (extent,) if isinstance(extent, int) and extent > 0 else ()


def _is_integer(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.INT32, ir.DataType.INT64)

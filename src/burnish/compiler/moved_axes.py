"""Operators that only move or copy elements, and where an axis of their output lay before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod

import onnx_ir as ir

from burnish.graph import FLOATING, constant_array, same_dimension


def _same_axis(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    return axis


def _through_cast(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    return axis if node.inputs[0] is not None and node.inputs[0].dtype in FLOATING and output.dtype in FLOATING else None


def _through_transpose(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    if "perm" not in node.attributes:
        return None if output.shape is None else len(output.shape) - 1 - axis
    permutation = node.attributes["perm"].as_ints()
    return permutation[axis] if axis < len(permutation) else None


def _through_slice(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    """Lines along the axis stay whole where other axes are sliced."""
    if len(node.inputs) < 4 or node.inputs[3] is None:
        starts = constant_array(node.inputs[1])
        return axis if starts is not None and axis >= starts.size else None
    axes = constant_array(node.inputs[3])
    if axes is None or output.shape is None:
        return None
    return None if axis in {int(sliced) % len(output.shape) for sliced in axes.reshape(-1)} else axis


def _through_split(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    split = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    if split < 0:
        if output.shape is None:
            return None
        split += len(output.shape)
    return None if split == axis else axis


def _through_gather(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    indices = node.inputs[1]
    data = node.inputs[0]
    if data is None or data.shape is None or indices is None or indices.shape is None:
        return None
    gathered = (node.attributes["axis"].as_int() if "axis" in node.attributes else 0) % len(data.shape)
    if axis < gathered:
        return axis
    behind = axis - len(indices.shape) + 1
    return behind if axis >= gathered + len(indices.shape) else None


def _through_expand(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    """Lines are copied whole where the axis keeps its extent."""
    data = node.inputs[0]
    if data is None or data.shape is None or output.shape is None:
        return None
    data_axis = axis - (len(output.shape) - len(data.shape))
    return data_axis if data_axis >= 0 and same_dimension(data.shape.dims[data_axis], output.shape.dims[axis]) else None


def _through_order(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    """Return the axis that becomes ``axis`` where elements keep their order: of the same extent, with as much after it."""
    data = node.inputs[0]
    assert data is not None
    if _restores_matrix(node, output, axis):
        return 1
    if data.shape is None or output.shape is None or axis >= len(output.shape):
        return None
    before, after = data.shape.dims, output.shape.dims
    for data_axis, extent in enumerate(before):
        if same_dimension(extent, after[axis]) and (
            _same_product(before[data_axis + 1 :], after[axis + 1 :]) or _same_product(before[:data_axis], after[:axis])
        ):
            return data_axis
    return None


def _restores_matrix(node: ir.Node, output: ir.Value, axis: int) -> bool:
    """Whether a Reshape gives back the axes that Flatten took before the activation, with ``axis`` as the rows.

    Softmax before opset 13 normalizes all axes from one on together, and is loaded in this form.
    """
    activation = node.inputs[0].producer() if node.inputs[0] is not None else None
    flattened = activation.inputs[0].producer() if activation is not None and activation.inputs and activation.inputs[0] else None
    target = node.inputs[1].producer() if node.op_type == "Reshape" and node.inputs[1] is not None else None
    if flattened is None or flattened.op_type != "Flatten" or target is None or target.op_type != "Shape":
        return False
    rank = None if output.shape is None else len(output.shape)
    if target.inputs[0] is not flattened.inputs[0] or target.attributes or rank is None:
        return False
    first = flattened.attributes["axis"].as_int() if "axis" in flattened.attributes else 1
    assert output.shape is not None
    return first % rank == axis and all(extent == 1 for extent in output.shape.dims[axis + 1 :])


def _same_product(left: Sequence[int | ir.SymbolicDim], right: Sequence[int | ir.SymbolicDim]) -> bool:
    """Whether two lists of extents are known to have the same product."""
    names = [Counter(extent.value for extent in side if not isinstance(extent, int)) for side in (left, right)]
    numbers = [prod(extent for extent in side if isinstance(extent, int)) for side in (left, right)]
    return None not in names[0] and names[0] == names[1] and numbers[0] == numbers[1]


ORDERED = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that leave the order of elements as it is."""
MOVERS: dict[str, Callable[[ir.Node, ir.Value, int], int | None]] = {
    "Identity": _same_axis,
    "Cast": _through_cast,
    "Transpose": _through_transpose,
    "Slice": _through_slice,
    "Split": _through_split,
    "Gather": _through_gather,
    "Expand": _through_expand,
    **dict.fromkeys(ORDERED, _through_order),
}
"""For each operator that only moves or copies elements of its first operand, a function of (node, output, axis): which axis of
the operand an axis of the output was, counted from the front, or None where lines along it may not have stayed whole."""

"""Arithmetic on shapes with integer, named or unknown dimensions; padding of windows; sets of dtypes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from burnish.graph.attributes import attribute_value

Dimension = int | ir.SymbolicDim


def same_dimension(left: Dimension, right: Dimension) -> bool:
    """True if two dimensions are known to be equal: the same integer or the same name. Unknown equals nothing."""
    if isinstance(left, int) or isinstance(right, int):
        return isinstance(left, int) and isinstance(right, int) and left == right
    return left.value is not None and left.value == right.value


def same_shape(left: ir.Shape | None, right: ir.Shape | None) -> bool:
    """True if two shapes are known to be equal in every dimension."""
    if left is None or right is None or len(left) != len(right):
        return False
    return all(same_dimension(a, b) for a, b in zip(left.dims, right.dims, strict=True))


def broadcast_shapes(*shapes: ir.Shape) -> ir.Shape:
    """Return the shape after multidirectional broadcasting, with unknown dimensions if it is ambiguous.

    A name and an integer above 1 give the integer: any other value of the name would be an error.
    """
    rank = max(len(shape) for shape in shapes)
    result: list[Dimension] = []
    for axis in range(-rank, 0):
        dimension: Dimension = 1
        for shape in shapes:
            if -axis > len(shape):
                continue
            other = shape.dims[axis]
            if dimension == 1 or same_dimension(dimension, other):
                dimension = other
            elif other == 1 or isinstance(dimension, int):
                continue
            elif isinstance(other, int):
                dimension = other
            else:
                dimension = ir.SymbolicDim(None)
        result.append(dimension)
    return ir.Shape(result)


def dimension_product(dimensions: Iterable[Dimension]) -> Dimension:
    """Return the product of dimensions: for one name and integers a name such as ``64*batch``, for two names unknown."""
    dims = list(dimensions)
    factor = math.prod(dim for dim in dims if isinstance(dim, int))
    names = [dim.value for dim in dims if not isinstance(dim, int)]
    if not names or factor == 0:
        return factor
    return ir.SymbolicDim(multiple_name(factor, names[0]) if len(names) == 1 and names[0] is not None else None)


def multiple_name(factor: int, name: str) -> str:
    """Return the name of a multiple of a named dimension."""
    return name if factor == 1 else f"{factor}*{name}"


def static_dimension(shape: ir.Shape | None, axis: int) -> int | None:
    """Return an extent if it is a known integer, else None; None also for a missing axis."""
    if shape is None or axis >= len(shape):
        return None
    dimension = shape.dims[axis]
    return dimension if isinstance(dimension, int) else None


def output_axis(layer: ir.Node) -> int:
    """Return the output axis of the weight of a Conv, Gemm or MatMul, or of the table of a Gather."""
    return 0 if layer.op_type == "Conv" or (layer.op_type == "Gemm" and attribute_value(layer, "transB", 0)) else 1


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """Return the shape as integers, or None if a dimension is not known."""
    return None if value.shape is None else known_extents(value.shape.dims)


def known_extents(dimensions: Sequence[int | ir.SymbolicDim]) -> tuple[int, ...] | None:
    """Return dimensions as integers, or None if one is not known."""
    extents = tuple(dimension for dimension in dimensions if isinstance(dimension, int))
    return extents if len(extents) == len(dimensions) else None


def same_padding(extent: int | None, span: int, stride: int) -> int | None:
    """Return the total padding of both sides for which an axis has ceil(extent / stride) windows.

    Args:
        extent: extent of the data; None if it is symbolic.
        span: positions from the first to the last element of a window.
        stride: distance between windows.

    Returns:
        The padding; None if it depends on a symbolic extent.
    """
    if stride == 1:
        return span - 1
    if extent is None:
        return None
    return max((-(-extent // stride) - 1) * stride + span - extent, 0)


def split_padding(totals: Sequence[int], more_at_end: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split total paddings into before and after the data; for odd totals one side gets one more."""
    smaller = tuple(total // 2 for total in totals)
    larger = tuple(total - total // 2 for total in totals)
    return (smaller, larger) if more_at_end else (larger, smaller)


SIXTEEN_BIT = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Floating-point dtypes with too few digits for sums."""

FLOATING = SIXTEEN_BIT | {ir.DataType.FLOAT, ir.DataType.DOUBLE}
"""Dtypes that carry gradients."""


def has_values_of(model: ir.Model, dtypes: Collection[ir.DataType]) -> bool:
    """True if a model has a value of one of these dtypes."""
    graphs = (model.graph, *model.graph.subgraphs())
    held = (value for graph in graphs for value in (*graph.inputs, *graph.initializers.values()))
    computed = (value for node in model.graph.all_nodes() for value in node.outputs)
    return any(value.dtype in dtypes for values in (held, computed) for value in values)


def has_sixteen_bit_values(model: ir.Model) -> bool:
    """True if a model has a float16 or bfloat16 value."""
    return has_values_of(model, SIXTEEN_BIT)

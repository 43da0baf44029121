"""The determinant of square matrices."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.operators.positions import count, reshape_as
from burnish.operators.registry import Operation, gradient


@gradient("Det")
def det(op: Operation, dy: Tensor) -> Tensor:
    """dX = dy · C (Jacobi), with the cofactors C_ij = (-1)^(i+j) · det(X without row i and column j).

    Cofactors and not det(X) · X⁻ᵀ, which a singular matrix does not have. It takes the memory of n² matrices of n - 1 rows for
    each of n rows.
    """
    builder, x = op.builder, op.input
    index = ir.DataType.INT64
    size = count(x, -1)
    order = builder.op("Range", builder.scalar(0, index), size, builder.scalar(1, index))
    row = builder.op("Unsqueeze", order, builder.integers([1]))
    others = builder.op("Slice", order, builder.integers([0]), builder.integers([-1]), builder.integers([0]))
    # For each i all numbers from 0 to n - 1 but i.
    remaining = others + builder.cast(builder.op("GreaterOrEqual", others, row), index)
    matrices = builder.op("Reshape", x, _extents(x), allowzero=1)
    minors = builder.op("Gather", builder.op("Gather", matrices, remaining, axis=1), remaining, axis=3)
    minors = builder.op("Det", builder.op("Transpose", minors, perm=[0, 1, 3, 2, 4]))
    parity = builder.op("Mod", row + order, builder.scalar(2, index))
    cofactors = minors * builder.cast(1 - parity * 2, x.dtype)
    return builder.op("Unsqueeze", dy, builder.integers([-2, -1])) * reshape_as(cofactors, x)


def _extents(x: Tensor) -> Tensor:
    """The shape [matrices, n, n]; written out, since a product of the leading extents may be zero and leaves no -1 to infer."""
    builder = x.builder
    leading = builder.op("Unsqueeze", count(x, 0, -2), builder.integers([0]))
    square = builder.op("Shape", x, start=-2)
    return builder.op("Concat", leading, square, axis=0)

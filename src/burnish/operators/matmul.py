"""Matrix products (MatMul and Gemm), and the determinant of square matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import SIXTEEN_BIT, Tensor, same_dimension, unbroadcast
from burnish.graph.uses import is_read_once
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.positions import count, extent, reshape_as, reshape_to
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import Operands, OutputType, SemanticOperator


def _gradient_types(operands: Operands) -> list[OutputType]:
    """An output that is not needed has no elements."""
    dy, (_, x, weight), transposed = operands["dy"], operands.tensors, operands.attributes["transposed"]
    assert dy.shape is not None
    dx_dims: list[Any] = [0]
    dw_dims: list[Any] = [0]
    width: Any = ir.SymbolicDim(None)
    if weight is not None:
        width = width if weight.shape is None else weight.shape[1 if transposed else 0]
        dx_dims = [*dy.shape.dims[:-1], width]
    if x is not None:
        if x.shape is not None:
            width, dx_dims = x.shape[-1], dx_dims if weight is None else [*x.shape.dims]
        dw_dims = [dy.shape[-1], width] if transposed else [width, dy.shape[-1]]
    db_dims = [dy.shape[-1] if operands.attributes["bias"] else 0]
    return [OutputType(dy.dtype, ir.Shape(dims)) for dims in (dx_dims, dw_dims, db_dims)]


def matmul(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """dA = dY·Bᵀ and dB = Aᵀ·dY over the last two axes; a vector counts as a matrix of one row (left) or column (right).

    A right operand without batch axes (the weight of a linear layer) sees the left one as a single tall matrix: its gradient
    is one product and needs no sum over a batch.
    """
    builder, a, b = op.builder, op.required(0), op.required(1)
    rank_of_b = _known_rank(op, b)
    if rank_of_b == 1 and a.rank == 1:
        return dy * b if op.wants(0) else None, dy * a if op.wants(1) else None
    if rank_of_b == 1:
        return _by_vector(op, a, b, dy)
    if rank_of_b == 2:
        return _by_matrix(op, a, b, dy)
    da = db = None
    if _known_rank(op, a) == 1:
        dy = builder.op("Unsqueeze", dy, builder.integers([-2]))
        a = builder.op("Unsqueeze", a, builder.integers([0])) if op.wants(1) else a
    if op.wants(0):
        da = builder.op("MatMul", dy, _transposed(b))
    if op.wants(1):
        db = builder.op("MatMul", _transposed(a), dy)
    return da, db


def _by_vector(op: Operation, a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    builder, one = op.builder, op.builder.integers([1])
    column_of_dy = _tall(builder.op("Unsqueeze", dy, builder.integers([-1])))
    da = None
    if op.wants(0):
        da = _rows_like(_input_gradient(column_of_dy, builder.op("Unsqueeze", b, one)), dy, a)
    db = builder.op("Squeeze", _weight_gradient(column_of_dy, a), one) if op.wants(1) else None
    return da, db


def _by_matrix(op: Operation, a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if (a.rank or 0) >= 2 and dy.shape is not None:
        da, db, _ = _linear_gradients(op, dy)
        return da, db
    rows = _tall(dy)
    da = _rows_like(_input_gradient(rows, b), dy, a) if op.wants(0) else None
    return da, _weight_gradient(rows, a) if op.wants(1) else None


def _linear_gradients(op: Operation, dy: Tensor, transposed: int = 0, bias: bool = False) -> tuple[Tensor | None, ...]:
    x, weight = op.required(0) if op.wants(1) else None, op.required(1) if op.wants(0) else None
    dx, dw, db = LINEAR_GRAD.emit(dy, x, weight, transposed=transposed, bias=int(bias))
    return None if weight is None else dx, None if x is None else dw, db if bias else None


def lower_linear_grad(op: Operation) -> tuple[Tensor | None, ...]:
    dy, x, weight, transposed = op.required(0), op.optional(1), op.optional(2), op.attribute("transposed")
    rows = _tall(dy)
    return (
        _nothing(op, 0) if weight is None else _rows_like(_input_gradient(rows, weight, transposed), dy, x),
        _nothing(op, 1) if x is None else _weight_gradient(rows, x, transposed),
        unbroadcast(dy, op.outputs[2]) if op.attribute("bias") else _nothing(op, 2),
    )


def _nothing(op: Operation, index: int) -> Tensor | None:
    output = op.outputs[index]
    is_read = output.value.uses() or output.value.is_graph_output()
    return op.builder.constant(np.zeros(0, output.dtype.numpy())) if is_read else None


def _input_gradient(dy: Tensor, weight: Tensor, transposed: int = 0) -> Tensor:
    """dY·Wᵀ, from a matrix dY. Gemm transposes without a copy."""
    return dy.builder.op("Gemm", dy, weight, transB=1 - transposed)


def _rows_like(rows: Tensor, dy: Tensor, x: Tensor | None) -> Tensor:
    """Reshape a matrix to the rows of x or, if x is not kept, to the leading axes of dY."""
    if x is not None:
        return rows if x.rank == 2 else reshaped_like(rows, x)
    assert dy.shape is not None
    leading = dy.shape.dims[:-1]
    if len(leading) == 1:
        return rows
    parts: list[int | Callable[[], Tensor]] = [
        dimension if isinstance(dimension, int) else partial(extent, dy, axis) for axis, dimension in enumerate(leading)
    ]
    width = rows.dimension(1)
    return reshape_to(rows, [*parts, partial(extent, rows, 1) if width is None else width])


def _weight_gradient(dy: Tensor, x: Tensor, transposed: int = 0) -> Tensor:
    """Xᵀ·dY, or its transpose, from a matrix dY."""
    return dy.builder.op("Gemm", *((dy, _tall(x)) if transposed else (_tall(x), dy)), transA=1)


def _tall(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix that keeps the last axis; a vector becomes one row."""
    if tensor.rank == 2:
        return tensor
    if tensor.rank == 1:
        return tensor.builder.op("Unsqueeze", tensor, tensor.builder.integers([0]))
    return tensor.builder.op("Flatten", tensor, axis=-1)


def reshaped_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Reshape ``tensor`` to the shape of ``like``, read at run time if more than one dimension is unknown."""
    builder = tensor.builder
    if like.shape is not None:
        extents = [dimension if isinstance(dimension, int) else -1 for dimension in like.shape.dims]
        if extents.count(-1) <= 1 and 0 not in extents:
            return builder.op("Reshape", tensor, builder.integers(extents), like=like)
    return builder.op("Reshape", tensor, builder.op("Shape", like), allowzero=1, like=like)


def _transposed(tensor: Tensor) -> Tensor:
    rank = tensor.rank or 0
    return tensor.builder.op("Transpose", tensor, perm=[*range(rank - 2), rank - 1, rank - 2])


def _known_rank(op: Operation, tensor: Tensor) -> int:
    if tensor.rank is None:
        raise GradientError(
            f"{op}: the number of dimensions of its operand '{tensor.name}' is unknown, and the gradient of a matrix product "
            "depends on it. Declare the shapes of the model's inputs (names for unknown extents are enough)"
        )
    return tensor.rank


def gemm(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Y = α·A'·B' + β·C, with A' and B' transposed if the attributes say so."""
    builder, a, b, c = op.builder, op.required(0), op.required(1), op.optional(2)
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    # Any nonzero value transposes.
    left, right = (int(bool(op.attribute(name, 0))) for name in ("transA", "transB"))
    if (op.wants(0) or op.wants(1)) and not left and alpha == 1 and dy.shape is not None:
        return _linear(op, dy, right, beta)
    da = db = dc = None
    if op.wants(0):
        if left:
            da = builder.op("Gemm", b, dy, transA=right, transB=1, alpha=alpha)
        else:
            da = builder.op("Gemm", dy, b, transB=1 - right, alpha=alpha)
    if op.wants(1):
        if right:
            db = builder.op("Gemm", dy, a, transA=1, transB=left, alpha=alpha)
        else:
            db = builder.op("Gemm", a, dy, transA=1 - left, alpha=alpha)
    if c is not None and op.wants(2):
        summed = unbroadcast(dy, c)
        dc = summed if beta == 1 else summed * beta
    return da, db, dc


def _linear(op: Operation, dy: Tensor, transposed: int, beta: float) -> tuple[Tensor | None, ...]:
    c = op.optional(2) if op.wants(2) else None
    is_bias = c is not None and op.wants(1) and beta == 1 and _is_bias(c, dy)
    da, db, dc = _linear_gradients(op, dy, transposed, is_bias)
    if c is not None and not is_bias:
        summed = unbroadcast(dy, c)
        dc = summed if beta == 1 else summed * beta
    return da, db, dc


def _is_bias(c: Tensor, product: Tensor) -> bool:
    """True if a tensor has one element per column of a product, in a dtype in which sums keep their digits."""
    if c.shape is None or product.shape is None or c.rank != 1 or c.dtype in SIXTEEN_BIT:
        return False
    return same_dimension(c.shape[0], product.shape[-1])


def biased_product(op: Operation) -> Tensor | None:
    """Emit a matrix product plus a bias as Gemm, for the gradients of one layer; None for any other sum."""
    for product, bias in (op.inputs, op.inputs[::-1]):
        node = None if product is None else product.value.producer()
        if node is None or product is None or bias is None or node.op_type != "MatMul" or node.domain != "":
            continue
        x, weight = (op.builder.tensor(value) for value in node.inputs if value is not None)
        if x.rank == weight.rank == 2 and is_read_once(product.value) and _is_bias(bias, product):
            return op.builder.op("Gemm", x, weight, bias, like=op.output)
    return None


def det(op: Operation, dy: Tensor) -> Tensor:
    """dX = dy · C (Jacobi), with the cofactors C_ij = (-1)^(i+j) · det(X without row i and column j).

    Uses cofactors instead of det(X) · X⁻ᵀ, which does not exist for a singular matrix. Needs the memory of n² matrices of n - 1
    rows for each matrix of n rows.
    """
    builder, x = op.builder, op.input
    index = ir.DataType.INT64
    size = count(x, -1)
    order = builder.op("Range", builder.scalar(0, index), size, builder.scalar(1, index))
    row = builder.op("Unsqueeze", order, builder.integers([1]))
    others = builder.op("Slice", order, builder.integers([0]), builder.integers([-1]), builder.integers([0]))
    # For each i, the numbers from 0 to n - 1 without i.
    remaining = others + builder.cast(builder.op("GreaterOrEqual", others, row), index)
    matrices = builder.op("Reshape", x, _extents(x), allowzero=1)
    minors = builder.op("Gather", builder.op("Gather", matrices, remaining, axis=1), remaining, axis=3)
    minors = builder.op("Det", builder.op("Transpose", minors, perm=[0, 1, 3, 2, 4]))
    parity = builder.op("Mod", row + order, builder.scalar(2, index))
    cofactors = minors * builder.cast(1 - parity * 2, x.dtype)
    return builder.op("Unsqueeze", dy, builder.integers([-2, -1])) * reshape_as(cofactors, x)


def _extents(x: Tensor) -> Tensor:
    """Return the shape [matrices, n, n] in full: a leading extent may be zero, and then -1 cannot be inferred."""
    builder = x.builder
    leading = builder.op("Unsqueeze", count(x, 0, -2), builder.integers([0]))
    square = builder.op("Shape", x, start=-2)
    return builder.op("Concat", leading, square, axis=0)


LINEAR_GRAD = SemanticOperator(
    "LinearGrad", ("dy", "x", "weight"), ("dx", "dw", "db"), _gradient_types, lowering=lower_linear_grad
)
"""The gradients of y = x W + b, with x [..., K] and W [K, N], or [N, K] if ``transposed``.

Without a weight there is no dx, and without x no dw; there is a db [N] if the attribute ``bias`` is set, for a matrix dy.
"""

OPERATORS = [
    Operator(
        "MatMul",
        gradient=matmul,
        axes=axis_rules.matmul,
        precision=Precision.NARROW,
        mixes=axis_rules.contracted,
        reopen=reopen_rules.matmul,
    ),
    Operator(
        "Gemm",
        since=7,
        gradient=gemm,
        axes=axis_rules.gemm,
        precision=Precision.NARROW,
        mixes=axis_rules.contracted_by_gemm,
        reopen=reopen_rules.gemm,
    ),
    Operator("Det", gradient=det, axes=axis_rules.determinant, reopen=reopen_rules.matrices),
    LINEAR_GRAD,
    Operator("MatMulInteger", axes=axis_rules.matmul),
    Operator("QLinearMatMul", axes=axis_rules.quantized_matmul),
]

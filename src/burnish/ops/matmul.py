"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from burnish.errors import GradientError
from burnish.graph import Tensor, unbroadcast
from burnish.ops.registry import Operation, gradient


@gradient("MatMul")
def matmul(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """dA = dY·Bᵀ and dB = Aᵀ·dY over the last two axes; a vector counts as a matrix of one row (left) or column (right).

    A right operand without batch axes, the weight of a linear layer, sees the left one as a single tall matrix: its gradient
    is one product and needs no sum over a batch. Gemm transposes without a copy.
    """
    builder, a, b = op.builder, op.required(0), op.required(1)
    rank_of_b = _known_rank(op, b)
    if rank_of_b == 1 and a.rank == 1:
        return dy * b if op.wants(0) else None, dy * a if op.wants(1) else None
    if rank_of_b <= 2:
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


def _by_matrix(op: Operation, a: Tensor, b: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    builder = op.builder
    vector = b.rank == 1
    tall_dy = _tall(builder.op("Unsqueeze", dy, builder.integers([-1])) if vector else dy)
    da = db = None
    if op.wants(0):
        column = builder.op("Unsqueeze", b, builder.integers([1])) if vector else b
        da = builder.op("Gemm", tall_dy, column, transB=1)
        if a.rank != 2:
            da = reshaped_like(da, a)
    if op.wants(1):
        db = builder.op("Gemm", _tall(a), tall_dy, transA=1)
        if vector:
            db = builder.op("Squeeze", db, builder.integers([1]))
    return da, db


def _tall(tensor: Tensor) -> Tensor:
    """The tensor as a matrix that keeps the last axis; a vector becomes one row."""
    if tensor.rank == 2:
        return tensor
    if tensor.rank == 1:
        return tensor.builder.op("Unsqueeze", tensor, tensor.builder.integers([0]))
    return tensor.builder.op("Flatten", tensor, axis=-1)


def reshaped_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Reshape ``tensor`` to the shape of ``like``, taken at run time where more than one dimension is unknown."""
    builder = tensor.builder
    if like.shape is not None:
        extents = [dimension if isinstance(dimension, int) else -1 for dimension in like.shape.dims]
        if extents.count(-1) <= 1 and 0 not in extents:
            return builder.op("Reshape", tensor, builder.integers(extents), like=like)
    return builder.op("Reshape", tensor, builder.op("Shape", like), allowzero=1, like=like)


def _transposed(tensor: Tensor) -> Tensor:
    """Exchange the last two axes."""
    rank = tensor.rank or 0
    return tensor.builder.op("Transpose", tensor, perm=[*range(rank - 2), rank - 1, rank - 2])


def _known_rank(op: Operation, tensor: Tensor) -> int:
    if tensor.rank is None:
        raise GradientError(
            f"{op}: the number of dimensions of its operand '{tensor.name}' is unknown, and the gradient of a matrix product "
            "depends on it. Declare the shapes of the model's inputs (names for unknown extents are enough)"
        )
    return tensor.rank


@gradient("Gemm", since=7)
def gemm(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Y = α·A'·B' + β·C, A' and B' being A and B, transposed if so asked."""
    builder, a, b, c = op.builder, op.required(0), op.required(1), op.optional(2)
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    # Whatever is not 0 transposes.
    left, right = (int(bool(op.attribute(name, 0))) for name in ("transA", "transB"))
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


@gradient("Einsum")
def einsum(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of an operand is the contraction of the cotangent with the other operands, onto the operand's indices.

    An index that only the operand has was summed over: the gradient is repeated along it.
    """
    operands, output = _parse_equation(op)
    gradients: list[Tensor | None] = []
    for index, labels in enumerate(operands):
        if not op.wants(index):
            gradients.append(None)
            continue
        others = [other for other in range(len(operands)) if other != index]
        present = set(output).union(*(operands[other] for other in others))
        kept = "".join(label for label in labels if label in present)
        equation = ",".join([output, *(operands[other] for other in others)]) + "->" + kept
        contracted = op.builder.op("Einsum", dy, *(op.required(other) for other in others), equation=equation)
        alone = [axis for axis, label in enumerate(labels) if label not in present]
        if alone:
            contracted = op.builder.op("Unsqueeze", contracted, op.builder.integers(alone))
            contracted = op.builder.op("Expand", contracted, op.builder.op("Shape", op.required(index)), like=op.required(index))
        gradients.append(contracted)
    return tuple(gradients)


def _parse_equation(op: Operation) -> tuple[list[str], str]:
    """Return the index letters of each operand and of the output."""
    equation = str(op.attribute("equation")).replace(" ", "")
    if "." in equation:
        raise GradientError(f"{op}: the gradient of an Einsum with an ellipsis ('{equation}') is not defined: name every axis")
    left, arrow, output = equation.partition("->")
    operands = left.split(",")
    if not arrow:
        output = "".join(label for label in sorted(set(left) - {","}) if left.count(label) == 1)
    for labels in operands:
        if len(set(labels)) < len(labels):
            raise GradientError(
                f"{op}: the gradient of an Einsum with a repeated index in one operand ('{labels}' in '{equation}', a diagonal) "
                "is not defined: take the diagonal before, with GatherElements or a product with an identity matrix"
            )
    return operands, output

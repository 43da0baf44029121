"""Resize: interpolation along axes, one after the other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Tensor, same_dimension
from burnish.ops.positions import extent, joined
from burnish.ops.registry import Operation, gradient
from burnish.ops.semantic import SemanticOperator, like

INTERPOLATION = (
    "mode",
    "coordinate_transformation_mode",
    "nearest_mode",
    "cubic_coeff_a",
    "exclude_outside",
    "antialias",
)

RESIZE_GRAD = SemanticOperator("ResizeGrad", ("dy", "x", "scales", "sizes"), ("dx",), like("x"))


@gradient("Resize", since=11)
def resize(op: Operation, dy: Tensor) -> Tensor:
    """The adjoint of an operator that is linear; of x its shape is read."""
    x, y = op.input, op.output
    _refuse_what_is_not_linear(op)
    if x.rank is None:
        raise GradientError(f"{op}: the rank of its input '{x.name}' is not known; declare the shapes of the model's inputs")
    if y.shape is not None:
        dy.value.shape = ir.Shape(y.shape.dims)
    attributes = {name: op.attribute(name) for name in (*INTERPOLATION, "axes")}
    return RESIZE_GRAD(dy, x, op.optional(2), op.optional(3), **attributes)


@RESIZE_GRAD.gradient
def resize_double_backward(op: Operation, v: Tensor) -> tuple[Tensor | None, ...]:
    """The adjoint of the adjoint: Resize again."""
    attributes = {name: op.attribute(name) for name in (*INTERPOLATION, "axes")}
    resized = op.builder.op("Resize", v, None, op.optional(2), op.optional(3), like=op.input, **attributes)
    return resized, *[None] * (len(op.inputs) - 1)


@RESIZE_GRAD.lowering
def lower_resize_grad(op: Operation) -> Tensor:
    """Along every axis y = A x with a matrix A of weights, and dx = A^T dy.

    A is what the same operator makes of the identity matrix, so that every mode has its gradient, as the runtime computes it.
    """
    dy, x, builder = op.required(0), op.required(1), op.builder
    y, rank = dy, x.rank or 0
    axes = [axis % rank for axis in op.attribute("axes", tuple(range(rank)))]
    scales = op.optional(2)
    by_scale = scales is not None and scales.dimension(0) != 0
    factors = None if scales is None or scales.array is None else scales.array.reshape(-1)
    for place, axis in enumerate(axes):
        if by_scale and factors is not None:
            unchanged = float(factors[place]) == 1.0
        else:
            unchanged = not by_scale and _same_extent(x, y, axis)
        if unchanged:
            continue
        factor = builder.op("Gather", scales, builder.integers([place]), axis=0) if by_scale else None
        dy = _apply_transposed(op, dy, x, y, axis, factor)
    if x.shape is not None:
        dy.value.shape = ir.Shape(x.shape.dims)
    return dy


def _apply_transposed(op: Operation, dy: Tensor, x: Tensor, y: Tensor, axis: int, factor: Tensor | None) -> Tensor:
    """Multiply by A^T along one axis: from the left for the last axis but one, else from the right."""
    builder, rank = op.builder, x.rank or 0
    if axis == rank - 2:
        return builder.op("MatMul", _resized_identity(op, x, y, axis, factor, along_rows=True), dy)
    matrix = _resized_identity(op, x, y, axis, factor, along_rows=False)
    if axis == rank - 1:
        return builder.op("MatMul", dy, matrix)
    exchange = list(range(rank))
    exchange[axis], exchange[-1] = exchange[-1], exchange[axis]
    moved = builder.op("MatMul", builder.op("Transpose", dy, perm=exchange), matrix)
    return builder.op("Transpose", moved, perm=exchange)


def _resized_identity(op: Operation, x: Tensor, y: Tensor, axis: int, factor: Tensor | None, along_rows: bool) -> Tensor:
    """The identity matrix of x's extent, each row resized (A^T) or each column (A)."""
    builder = op.builder
    size = extent(x, axis)
    square = builder.op("Concat", size, size, axis=0)
    zeros = builder.op("ConstantOfShape", square, value=ir.tensor(np.zeros(1, x.dtype.numpy())), dtype=x.dtype)
    identity = builder.op("Unsqueeze", builder.op("EyeLike", zeros), builder.integers([0, 1]))
    attributes = {name: op.attribute(name) for name in INTERPOLATION}
    if factor is not None:
        ones = [builder.constant(np.ones(3 if along_rows else 2, np.float32)), factor]
        ones += [] if along_rows else [builder.constant(np.ones(1, np.float32))]
        resized = builder.op("Resize", identity, None, builder.op("Concat", *ones, axis=0), dtype=x.dtype, **attributes)
    else:
        target = extent(y, axis)
        plane = [size, target] if along_rows else [target, size]
        sizes = joined(builder, [builder.integers([1, 1]), *plane])
        resized = builder.op("Resize", identity, None, None, sizes, dtype=x.dtype, **attributes)
    return builder.op("Squeeze", resized, builder.integers([0, 1]))


def _same_extent(x: Tensor, y: Tensor, axis: int) -> bool:
    return x.shape is not None and y.shape is not None and same_dimension(x.shape.dims[axis], y.shape.dims[axis])


def _refuse_what_is_not_linear(op: Operation) -> None:
    mode = op.attribute("coordinate_transformation_mode", "half_pixel")
    if mode == "tf_crop_and_resize":
        raise GradientError(
            f"{op} has no gradient rule for coordinate_transformation_mode=tf_crop_and_resize: "
            "export the model with another mode, or differentiate only what comes after it"
        )
    policy = op.attribute("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        raise GradientError(
            f"{op} has no gradient rule for keep_aspect_ratio_policy={policy}: "
            "export the model with explicit sizes or scales, or differentiate only what comes after it"
        )

"""Reductions along axes, and cumulative sums. Axes are inputs, as in every operator of opset 18 and later.

The slopes of products of many factors (ReduceProd, CumProd, scattered products) are exact if factors are zero.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.graph.annotations import FIRST, subgradient_of
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.registry import Operation, Operator, alike


def _is_identity(op: Operation) -> bool:
    """True if the node reduces nothing: no axes, and ``noop_with_empty_axes``."""
    return _without_axes(op) and bool(op.attribute("noop_with_empty_axes", 0))


def _without_axes(op: Operation) -> bool:
    axes = op.optional(1)
    return axes is None or axes.dimension(0) == 0


def _restored(op: Operation, reduced: Tensor) -> Tensor:
    """Return the reduced tensor with its lost axes back as extent 1, so that it broadcasts against the input.

    A full reduction gives a scalar, which broadcasts anyway; negative axes count from the end of the restored rank.
    """
    if op.attribute("keepdims", 1) or _without_axes(op):
        return reduced
    return op.builder.op("Unsqueeze", reduced, op.required(1))


def _over_same_axes(op: Operation, reduction: str, tensor: Tensor) -> Tensor:
    """Reduce another tensor of the input's shape along the node's axes, which stay with extent 1."""
    noop = op.attribute("noop_with_empty_axes", 0)
    return op.builder.op(reduction, tensor, op.optional(1), keepdims=1, noop_with_empty_axes=noop or None)


def _expanded(tensor: Tensor, like: Tensor) -> Tensor:
    builder = tensor.builder
    if like.shape is not None and all(isinstance(dimension, int) for dimension in like.shape.dims):
        return builder.op("Expand", tensor, builder.integers([int(str(dimension)) for dimension in like.shape.dims]), like=like)
    return builder.op("Expand", tensor, builder.op("Shape", like), like=like)


def reduce_sum(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    if _is_identity(op):
        return dy, None
    return _expanded(_restored(op, dy), op.input), None


def reduce_mean(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    if _is_identity(op):
        return dy, None
    return _expanded(_restored(op, dy * _reciprocal_count(op)), op.input), None


def _reciprocal_count(op: Operation) -> Tensor:
    """1 / (elements per average): a constant if the extents are known, otherwise computed from the sizes at run time.

    The reciprocal, because the count may overflow float16.
    """
    builder, x, axes = op.builder, op.input, op.optional(1)
    positions = None if axes is None or axes.array is None else axes.array.tolist()
    if x.rank is not None and (positions is not None or _without_axes(op)):
        extents = [x.dimension(axis) for axis in (positions or range(x.rank))]
        known = [extent for extent in extents if extent is not None]
        if len(known) == len(extents) and 0 not in known:
            return builder.scalar(1 / math.prod(known), x)
    count = builder.op("Div", builder.op("Size", x), builder.op("Size", op.output))
    wide = ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    return builder.cast(builder.op("Reciprocal", builder.cast(count, wide)), x.dtype)


def reduce_extremum(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """The gradient goes to the extreme element; ties share it evenly, like PyTorch's amax.

    With a note that asks for it the first gets all of it, like PyTorch's ``max(dim)``.
    """
    if _is_identity(op):
        return dy, None
    builder, x = op.builder, op.input
    axes = op.optional(1)
    axis = None if axes is None or axes.array is None or axes.array.size != 1 else int(axes.array.reshape(()))
    if axis is not None and subgradient_of(op.node) == FIRST:
        place = builder.op("ArgMax" if op.node.op_type == "ReduceMax" else "ArgMin", x, axis=axis, keepdims=1)
        zeros = _expanded(builder.scalar(0, x), x)
        return builder.op("ScatterElements", zeros, place, _restored(op, dy), axis=axis), None
    taken = builder.op("Equal", x, _restored(op, op.output))
    count = _over_same_axes(op, "ReduceSum", builder.cast(taken, x.dtype))
    return builder.op("Where", taken, _restored(op, dy) / count, builder.scalar(0, dy)), None


def reduce_prod(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """The slope for an element is the product of the others."""
    if _is_identity(op):
        return dy, None
    x = op.input
    is_zero, factors = without_zeros(x)
    rest = _over_same_axes(op, "ReduceProd", factors)
    zeros = _over_same_axes(op, "ReduceSum", op.builder.cast(is_zero, x.dtype))
    sum_of_zeros = _over_same_axes(op, "ReduceSum", zeros_alone(x, is_zero))
    return _restored(op, dy) * slope_of_product(x, _restored(op, op.output), rest, zeros, sum_of_zeros), None


def reduce_l1(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    return _restored(op, dy) * op.builder.op("Sign", op.input), None


def reduce_l2(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """dx = dy·x/y; 0 if the norm is 0, like PyTorch."""
    builder, norm = op.builder, op.output
    is_zero = builder.op("Equal", norm, builder.scalar(0, norm))
    divisor = builder.op("Where", is_zero, builder.scalar(1, norm), norm)
    return op.input * _restored(op, dy / divisor), None


def reduce_log_sum(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    if _is_identity(op):
        return dy / op.input, None
    return _expanded(_restored(op, dy * op.builder.op("Exp", -op.output)), op.input), None


def reduce_log_sum_exp(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """dx = dy·exp(x - y); 0 if every element is -∞, since -∞ - -∞ is undefined."""
    builder, y = op.builder, op.output
    finite = builder.op("Max", y, builder.scalar(y.dtype.min, y))
    return _restored(op, dy) * builder.op("Exp", op.input - _restored(op, finite)), None


def reduce_sum_square(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    return _restored(op, dy * 2) * op.input, None


def cumsum(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """The sum from the other end: an element enters every partial sum after it."""
    exclusive, reverse = op.attribute("exclusive", 0), op.attribute("reverse", 0)
    return op.builder.op("CumSum", dy, op.required(1), exclusive=exclusive, reverse=1 - reverse), None


def without_zeros(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a bool mask of the zeros of a factor, and the factor with ones instead; both have its shape."""
    builder = factor.builder
    is_zero = builder.op("Equal", factor, builder.scalar(0, factor))
    return is_zero, builder.op("Where", is_zero, builder.scalar(1, factor), factor)


def zeros_alone(factor: Tensor, is_zero: Tensor) -> Tensor:
    """Return zeros of the factor's shape; only those at zeros of the factor have a slope."""
    builder = factor.builder
    return builder.op("Where", is_zero, factor, builder.scalar(0, factor))


def slope_of_product(factor: Tensor, product: Tensor, rest: Tensor, zeros: Tensor, sum_of_zeros: Tensor) -> Tensor:
    """The product of all factors except this one.

    For a factor that is not zero, it is the product / the factor. For a zero, it is the product of the nonzero factors (``rest``)
    if no other factor is zero. With one other zero it is that zero * rest: also zero, but with a slope, which a second derivative
    needs. With more zeros it is zero.

    Args:
        factor: the factors.
        product: the product of all factors, including zeros; like the following arguments, it broadcasts against ``factor``.
        rest: the product of the nonzero factors.
        zeros: the number of zeros.
        sum_of_zeros: the sum of the zeros, see ``zeros_alone``.
    """
    builder = factor.builder
    is_zero, safe = without_zeros(factor)
    single = builder.op("Equal", zeros, builder.scalar(1, zeros))
    double = builder.op("Equal", zeros, builder.scalar(2, zeros))
    other = builder.op("Where", double, sum_of_zeros - factor, builder.scalar(0, factor))
    at_zero = builder.op("Where", single, rest, rest * other)
    return builder.op("Where", is_zero, at_zero, product / safe)


def cumprod(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    """dx_k = Σ_i dy_i · (the other factors of y_i), over the products y_i that contain x_k.

    This is y_i / x_k if x_k is not zero. For the first zero, the products are computed with a one in its place. The same for the
    second: the result is zero, but has a slope for the first. From the third zero on, everything is zero to second order.
    """
    builder, x, axis = op.builder, op.input, op.required(1)
    exclusive, reverse = op.attribute("exclusive", 0), op.attribute("reverse", 0)

    def gathered(products: Tensor) -> Tensor:
        return builder.op("CumSum", dy * products, axis, exclusive=exclusive, reverse=1 - reverse)

    def without(place: Tensor) -> Tensor:
        factors = builder.op("Where", place, builder.scalar(1, x), x)
        return gathered(builder.op("CumProd", factors, axis, exclusive=exclusive, reverse=reverse, like=x))

    is_zero, safe = without_zeros(x)
    number = builder.op("CumSum", builder.cast(is_zero, x.dtype), axis, reverse=reverse)
    slope = gathered(op.output) / safe
    at_zero = builder.scalar(0, x)
    for position in (2, 1):
        place = builder.op("And", is_zero, builder.op("Equal", number, builder.scalar(position, number)))
        at_zero = builder.op("Where", place, without(place), at_zero)
    return builder.op("Where", is_zero, at_zero, slope), None


_ALIKE: dict[str, Any] = {"axes": axis_rules.reduction, "mixes": axis_rules.reduced_axes, "reopen": reopen_rules.reduction}

OPERATORS = [
    Operator("ReduceSum", since=13, gradient=reduce_sum, **_ALIKE),
    Operator("ReduceMean", since=18, gradient=reduce_mean, **_ALIKE),
    *alike("ReduceMax", "ReduceMin", since=18, gradient=reduce_extremum, **{**_ALIKE, "mixes": axis_rules.extreme_axes}),
    Operator("ReduceProd", since=18, gradient=reduce_prod, **_ALIKE),
    Operator("ReduceL1", since=18, gradient=reduce_l1, **_ALIKE),
    Operator("ReduceL2", since=18, gradient=reduce_l2, **_ALIKE),
    Operator("ReduceLogSum", since=18, gradient=reduce_log_sum, **_ALIKE),
    Operator("ReduceLogSumExp", since=18, gradient=reduce_log_sum_exp, **_ALIKE),
    Operator("ReduceSumSquare", since=18, gradient=reduce_sum_square, **_ALIKE),
    Operator("CumSum", gradient=cumsum, axes=axis_rules.like_first, mixes=axis_rules.cumulated, reopen=reopen_rules.running_sum),
    Operator("CumProd", gradient=cumprod, axes=axis_rules.like_first, reopen=reopen_rules.running_sum),
    Operator("ArgMax", axes=axis_rules.position, reopen=reopen_rules.position),
    Operator("ArgMin", axes=axis_rules.position, reopen=reopen_rules.position),
]

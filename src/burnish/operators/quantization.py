"""Quantization in training: integers that represent floating-point numbers, stored as floating-point numbers.

A rounding has derivative zero wherever it has one, so nothing before it would train. The straight-through estimator (Bengio,
Léonard and Courville 2013) uses the derivative of the identity instead, and the chain rule gives the rest: zero for numbers cut
off by the range of the integers, and for a scale the gradient of learned step sizes (Esser et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import FLOATING, Tensor, attribute_value, describe_node
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import SemanticOperator, like


def lower_straight_through(op: Operation) -> Tensor:
    return op.required(1)


def straight_through(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    return dy, None


def lower_saturate(op: Operation) -> Tensor:
    return op.builder.op("Clip", op.input, op.required(1), op.required(2))


def saturate(op: Operation, dy: Tensor) -> tuple[Tensor, None, None]:
    return dy * op.builder.cast(op.builder.op("Equal", op.input, op.output), dy.dtype), None, None


def lower_scaled_gradient(op: Operation) -> Tensor:
    return op.input


def scaled_gradient(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    return dy * op.required(1), None


def dynamic_quantize_linear(op: Operation, *cotangents: Tensor | None) -> Tensor | None:
    """The gradient for the scale ``(max(x, 0) - min(x, 0)) / 255``, shared by equal extremes; ``quantized`` handles its integers.

    Computations with the scale count it as a constant, like PyTorch's observers (``simulate_quantization``): this is for a scale
    that is an output.
    """
    scale = cotangents[1]
    if scale is None:
        return None
    zero = op.builder.scalar(0.0, scale)
    widest = _share(op, "ReduceMax", "Greater", zero) - _share(op, "ReduceMin", "Less", zero)
    return scale / 255.0 * widest


def _share(op: Operation, extreme: str, beyond: str, zero: Tensor) -> Tensor:
    """The derivative of the minimum or maximum with 0: equal parts for the elements equal to it, if it is beyond 0."""
    builder, x = op.builder, op.input
    limit = builder.op(extreme, x, keepdims=0)
    at = builder.cast(builder.op("And", builder.op("Equal", x, limit), builder.op(beyond, x, zero)), x.dtype)
    return at / builder.op("Max", builder.op("ReduceSum", at, keepdims=0), builder.scalar(1.0, x))


@dataclass(frozen=True)
class Grid:
    """The numbers that a quantization can represent: ``(integer - zero_point) * scale``.

    Attributes:
        scale, zero_point: one number, one for each index along ``axis``, or one for each block of ``block_size`` along it.
        axis: may be negative.
        block_size: 0 without blocks.
        node: the node of the quantization, for messages.
    """

    scale: Tensor
    zero_point: Tensor | None
    axis: int
    block_size: int
    node: ir.Node

    @staticmethod
    def of(op: Operation) -> Grid:
        return Grid(op.required(1), op.optional(2), op.attribute("axis", 1), op.attribute("block_size", 0), op.node)

    def of_shape(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point in the dtype of ``x``, in a shape that broadcasts to it; no zero point if it is all zeros.

        Raises:
            GradientError: the rank of ``x`` is unknown, or the integers have more digits than its dtype.
        """
        scale = self._placed(x.builder.cast(self.scale, x.dtype), x)
        zero_point = self.zero_point
        if zero_point is None or (zero_point.array is not None and not np.any(zero_point.array)):
            return scale, None
        array = zero_point.array
        number = x.builder.cast(zero_point, x.dtype) if array is None else x.builder.constant(array.astype(x.dtype.numpy()))
        return scale, self._placed(number, x)

    def _placed(self, numbers: Tensor, x: Tensor) -> Tensor:
        builder = x.builder
        if numbers.rank == 0:
            return numbers
        if self.block_size == 0 and numbers.rank == 1 and numbers.dimension(0) == 1:
            return builder.op("Reshape", numbers, builder.integers([]))
        if x.rank is None:
            raise GradientError(
                f"{describe_node(self.node)} quantizes along an axis of a value whose rank is not known, and its gradient needs "
                "that: declare the shape of its input in the model, in which any dimension may be symbolic"
            )
        axis = self.axis % x.rank
        if self.block_size:
            extent = x.dimension(axis)
            if extent is not None:
                return builder.op("Gather", numbers, builder.integers([i // self.block_size for i in range(extent)]), axis=axis)
            shape = builder.op("Shape", x, start=axis, end=axis + 1)
            count = builder.op("Reshape", shape, builder.integers([]))
            positions = builder.op("Range", builder.scalar(0, count), count, builder.scalar(1, count))
            return builder.op("Gather", numbers, positions / self.block_size, axis=axis)
        after = x.rank - axis - 1
        if numbers.rank != 1 or after == 0:
            return numbers
        return builder.op("Unsqueeze", numbers, builder.integers(range(1, after + 1)))


def quantized(x: Tensor, grid: Grid, dtype: ir.DataType, saturates: bool = True) -> Tensor:
    """Emit the result of QuantizeLinear to ``dtype``, in the dtype of ``x``: ``clip(round(x / scale) + zero_point)``.

    Raises:
        GradientError: as for ``Grid.of_shape``, or ``dtype`` has more digits than that of ``x``.
    """
    builder = x.builder
    scale, zero_point = grid.of_shape(x)
    number = x / scale
    if dtype.is_floating_point():
        low, high = range_of(dtype)
        number = number if zero_point is None else number + zero_point
        if saturates:
            number = limited(number, low, high)
        narrow = builder.op("Cast", number, to=int(dtype))
        return STRAIGHT_THROUGH(number, builder.op("Cast", narrow, to=int(x.dtype), like=number))
    check_digits(x.dtype, dtype, grid.node)
    number = STRAIGHT_THROUGH(number, builder.op("Round", number))
    return limited(number if zero_point is None else number + zero_point, *range_of(dtype))


def dequantized(number: Tensor, grid: Grid) -> Tensor:
    scale, zero_point = grid.of_shape(number)
    return (number if zero_point is None else number - zero_point) * scale


def limited(number: Tensor, low: float, high: float) -> Tensor:
    return SATURATE(number, number.builder.scalar(low, number), number.builder.scalar(high, number))


def check_digits(dtype: ir.DataType, integers: ir.DataType, node: ir.Node) -> None:
    """Check that a floating-point dtype can represent every integer of another one.

    Raises:
        GradientError: it cannot.
    """
    digits = int(ml_dtypes.finfo(dtype.numpy()).nmant) + 1  # type: ignore[no-untyped-call]
    if dtype not in FLOATING or integers.bitwidth > digits:
        raise GradientError(
            f"{describe_node(node)} quantizes {dtype.name.lower()} to {integers.name.lower()}, which has more digits: a gradient "
            "passes where the model computes in float32"
        )


def saturates(node: ir.Node) -> bool:
    """True if a QuantizeLinear to a floating-point dtype clips values beyond its range."""
    return bool(attribute_value(node, "saturate", 1))


def range_of(dtype: ir.DataType) -> tuple[float, float]:
    numbers: Any = dtype.numpy()
    limits: Any = (ml_dtypes.finfo if dtype.is_floating_point() else ml_dtypes.iinfo)(numbers)
    return float(limits.min), float(limits.max)


STRAIGHT_THROUGH = SemanticOperator(
    "StraightThrough",
    ("x", "rounded"),
    ("y",),
    like("rounded"),
    shares_memory={"y": "rounded"},
    gradient=straight_through,
    lowering=lower_straight_through,
)
"""The rounded value of ``x``, with the derivative of ``x``."""
SATURATE = SemanticOperator("Saturate", ("x", "low", "high"), ("y",), like("x"), gradient=saturate, lowering=lower_saturate)
"""``x`` limited to two scalars.

Unlike Clip, which decides by its output, it also passes the gradient on the bounds, where integers often are.
"""
SCALED_GRADIENT = SemanticOperator(
    "ScaledGradient",
    ("x", "factor"),
    ("y",),
    like("x"),
    shares_memory={"y": "x"},
    gradient=scaled_gradient,
    lowering=lower_scaled_gradient,
)
"""``x``, with its derivative multiplied by a scalar."""

OPERATORS = [
    Operator("DynamicQuantizeLinear", gradient=dynamic_quantize_linear, axes=axis_rules.like_first),
    STRAIGHT_THROUGH,
    SATURATE,
    SCALED_GRADIENT,
    Operator("QuantizeLinear", axes=axis_rules.like_first, reopen=reopen_rules.quantization),
    Operator("DequantizeLinear", axes=axis_rules.like_first, reopen=reopen_rules.quantization),
]

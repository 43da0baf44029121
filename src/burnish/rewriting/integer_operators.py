"""ONNX Runtime's integer operators, emulated exactly in floating point.

float32 holds whole numbers up to 2^24 exactly, so sums of products below that are exact in any order. Weights that could exceed
it are split into digits, whose sums are added as int32.

After a sum follows the float32 arithmetic of MLAS, ONNX Runtime's kernel library (1.32), in its order. If standard operators
cannot express that, values between two roundings are float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor, attribute_value, known_extents
from burnish.quantization.graph import mark_exact

GREATEST_ACTIVATION = 255
"""Largest 8-bit integer minus its zero point."""
EXACT = 2**24
"""Largest whole number up to which float32 is exact."""

LARGEST_BIAS = 2**30
"""Integers of a bias beyond it leave no room for the sum."""
ROOM = 2**29
"""Bound on the integers of a bias that the scales of weights guarantee."""


@dataclass(frozen=True)
class Grid:
    """The numbers of a quantized 8-bit type: ``(integer - zero_point) * scale``.

    Attributes:
        scale: float32, one number.
        zero_integer: one number, UINT8 or INT8.
    """

    scale: Tensor
    zero_integer: Tensor

    @property
    def lowest(self) -> int:
        return 0 if self.zero_integer.dtype == ir.DataType.UINT8 else -128

    @property
    def zero_point(self) -> Tensor | None:
        """Zero point as float32; None for zero."""
        array = self.zero_integer.array
        builder = self.scale.builder
        return None if array is not None and not array.any() else builder.cast(self.zero_integer, ir.DataType.FLOAT)

    @property
    def _one(self) -> Tensor:
        shape = [1] * (self.zero_integer.rank or 0)
        return self.scale.builder.constant(np.ones(shape, np.float32))


@dataclass(frozen=True)
class Activation(Grid):
    """An activation as 8-bit integers with scale and zero point."""

    integers: Tensor

    @property
    def raw(self) -> Tensor:
        """The integers as float32."""
        return self.integers.builder.cast(self.integers, ir.DataType.FLOAT)

    @property
    def numbers(self) -> Tensor:
        """The integers minus the zero point, as float32."""
        builder = self.integers.builder
        return builder.op("DequantizeLinear", self.integers, self._one, self.zero_integer, axis=0)


@dataclass(frozen=True)
class Target(Grid):
    """Quantization of a result.

    Attributes:
        low, high: bounds of a Relu or Clip before it; None for no bound.
    """

    low: float | None = None
    high: float | None = None

    @property
    def _has_limits(self) -> bool:
        """True if some integers lie outside the bounds, so that a Clip is needed."""
        if self.low is None and self.high is None:
            return False
        array = self.zero_integer.array
        return self.low != 0 or array is None or bool((array != self.lowest).any())

    def integers(self, number: Tensor) -> Tensor:
        """Emit integers from steps above the zero point; rounds before adding the zero point."""
        if self._has_limits:
            number = self._limited(number)
        return number.builder.op("QuantizeLinear", number, self._one, self.zero_integer, axis=0, like=number, dtype=self._dtype)

    def integers_from_zero(self, number: Tensor) -> Tensor:
        """Emit integers from steps above integer zero; rounds with the zero point included."""
        steps = number.builder.op("Round", number)
        return self.integers(steps if self.zero_point is None else steps - self.zero_point)

    @property
    def _dtype(self) -> ir.DataType:
        return self.zero_integer.dtype

    def _limited(self, number: Tensor) -> Tensor:
        for operator, limit in (("Max", self.low), ("Min", self.high)):
            if limit is not None:
                bound = number.builder.op("Round", number.builder.scalar(limit, number) / self.scale)
                number = number.builder.op(operator, number, bound, like=number)
        return number


def digits(greatest: int, terms: int) -> tuple[int, int] | None:
    """Return the number and base of digits so that float32 holds sums of products of these digits exactly.

    Args:
        greatest: largest absolute value of the integers.
        terms: number of products in a sum.

    Returns:
        (1, 1) if the sums stay below 2^24 without splitting; None if no digits are small enough.
    """
    for count in range(1, 8):
        bases = (1,) if count == 1 else (2, 4, 8, 16, 32)
        for base in bases:
            largest = max(base // 2, math.ceil(greatest / base ** (count - 1)))
            if largest * GREATEST_ACTIVATION * terms <= EXACT:
                return count, base
    return None


def accumulated(node: ir.Node, x: Tensor, y: Tensor, division: tuple[int, int]) -> Tensor:
    """Emit the exact result of a Conv, Gemm or MatMul of whole numbers, without a bias, as int32.

    Args:
        node: the original operator, whose attributes apply, except for the factors of a Gemm.
        x, y: the operands, as float32.
        division: digits of ``y``, the result of ``digits``.
    """
    builder, (count, base) = x.builder, division
    attributes = {name: held.value for name, held in node.attributes.items() if name not in ("alpha", "beta")}
    total = None
    for index in range(count):
        digit = y
        if index + 1 < count:
            y = builder.op("Round", y / float(base), like=y)
            digit = digit - y * float(base)
        product = builder.op(node.op_type, x, digit, **attributes)
        product.value.shape = node.outputs[0].shape
        producer = product.value.producer()
        assert producer is not None
        mark_exact(producer)
        part = builder.op("Cast", builder.op("Round", product), to=int(ir.DataType.INT32))
        if index:
            part = part * int(base**index)
        total = part if total is None else total + part
    assert total is not None
    return total


def added(a: Activation, b: Activation, target: Target, wide: ir.DataType) -> Tensor:
    """Emit QLinearAdd as computed by its AVX2 kernel.

    With ``p = a_scale / y_scale`` and ``q = b_scale / y_scale``, it is ``a * p + (b * q + (y_zero - offset))`` with the offset
    ``a_zero * p + b_zero * q``. Each product and sum is rounded together, which float64 does exactly.
    """
    builder, zero = a.scale.builder, target.zero_point

    def fused(factor: Tensor, ratio: Tensor, term: Tensor) -> Tensor:
        exact = builder.cast(factor, wide) * builder.cast(ratio, wide) + builder.cast(term, wide)
        return builder.cast(exact, ir.DataType.FLOAT)

    ratios = a.scale / target.scale, b.scale / target.scale
    none = builder.scalar(0.0, a.scale)
    offset = none if b.zero_point is None else b.zero_point * ratios[1]
    if a.zero_point is not None:
        offset = fused(a.zero_point, ratios[0], offset)
    fixed = (none if zero is None else zero) - offset
    return target.integers_from_zero(fused(a.raw, ratios[0], fused(b.raw, ratios[1], fixed)))


def multiplied(a: Activation, b: Activation, target: Target, wide: ir.DataType) -> Tensor:
    """Emit QLinearMul: the product of the integers times ``a_scale * b_scale / y_scale``, plus the zero point, rounded."""
    builder = a.scale.builder
    ratio = builder.cast(a.scale * b.scale / target.scale, wide)
    # Via float64, so that no engine fuses the product with the following sum.
    product = builder.cast(builder.cast(a.numbers * b.numbers, wide) * ratio, ir.DataType.FLOAT)
    return target.integers_from_zero(product if target.zero_point is None else product + target.zero_point)


def averaged_globally(x: Activation, target: Target, wide: ir.DataType) -> Tensor | None:
    """Emit QLinearGlobalAveragePool: the sum of the integers times ``x_scale / (y_scale * pixels)``; None for an unknown rank."""
    numbers, builder = x.numbers, x.scale.builder
    if numbers.rank is None or numbers.rank < 3:
        return None
    axes = builder.integers(range(2, numbers.rank))
    total = builder.cast(builder.op("ReduceSum", builder.cast(numbers, wide), axes, keepdims=1), ir.DataType.FLOAT)
    pixels = builder.cast(builder.op("ReduceProd", builder.op("Shape", numbers, start=2), keepdims=0), ir.DataType.FLOAT)
    return target.integers(total * (x.scale / (target.scale * pixels)))


def averaged(node: ir.Node, x: Activation, target: Target) -> Tensor | None:
    """Emit QLinearAveragePool: windows are summed pixel by pixel in float32 and divided by their pixels and the scale.

    Returns:
        None for windows above 64 pixels, dilations, automatic padding, rounding up, or unknown image extents.
    """
    builder = x.scale.builder
    shape, result = _pixels(x.integers.value), _pixels(node.outputs[0])
    kernel = [int(extent) for extent in attribute_value(node, "kernel_shape", ())]
    others = (attribute_value(node, "auto_pad", "NOTSET") != "NOTSET", attribute_value(node, "ceil_mode", 0))
    if shape is None or result is None or any(others) or math.prod(kernel) > 64:
        return None
    if any(step != 1 for step in attribute_value(node, "dilations", ())):
        return None
    rank = len(kernel)
    strides = [int(step) for step in attribute_value(node, "strides", [1] * rank)]
    pads = [int(pad) for pad in attribute_value(node, "pads", [0] * (2 * rank))]
    numbers = x.numbers * x.scale
    if any(pads):
        around = [0, 0, *pads[:rank], 0, 0, *pads[rank:]]
        numbers = builder.op("Pad", numbers, builder.integers(around), builder.scalar(0.0, numbers))
    present = np.pad(np.ones(shape, np.float32), list(zip(pads[:rank], pads[rank:], strict=True)))
    total: Tensor | None = None
    counts = np.zeros(result, np.float32)
    for place in np.ndindex(*kernel):
        ends = [start + (extent - 1) * step + 1 for start, extent, step in zip(place, result, strides, strict=True)]
        operands = (place, ends, range(2, 2 + rank), strides)
        pixel = builder.op("Slice", numbers, *map(builder.integers, operands))
        total = pixel if total is None else total + pixel
        counts += present[tuple(slice(*window) for window in zip(place, ends, strides, strict=True))]
    assert total is not None
    if attribute_value(node, "count_include_pad", 0):
        counts[:] = math.prod(kernel)
    steps = total / builder.constant(counts) / target.scale
    return target.integers_from_zero(steps if target.zero_point is None else steps + target.zero_point)


def is_vector(bias: Sequence[object]) -> bool:
    """True if a bias has one number per output channel, or a single one."""
    return all(extent == 1 for extent in bias[:-1])


def terms_of(shape: Sequence[int], axis: int) -> int:
    """Return the number of products per output of a layer, from its weight's shape and output axis."""
    return math.prod(shape) // max(shape[axis], 1)


def _pixels(images: ir.Value) -> tuple[int, ...] | None:
    return None if images.shape is None else known_extents(images.shape.dims[2:]) or None

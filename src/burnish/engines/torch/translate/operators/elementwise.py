"""Arithmetic, comparisons and casts of elements, and quantization to integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch.nn import functional

from burnish.engines.torch.translate.dtypes import TORCH_DTYPES
from burnish.engines.torch.translate.rules import Call, translates

UNARY: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": functional.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
# PyTorch needs a tensor on the left of these; the right may be a number.
BINARY: dict[str, Callable[..., Any]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
}
WITHOUT_NUMBERS = frozenset({"And", "Or", "Xor"})
# PyTorch has no kernels of these for its unsigned types beyond 8 bits: they are computed in 64 bits, and truncated.
UNSIGNED = {ir.DataType.UINT32: 0xFFFFFFFF, ir.DataType.UINT16: 0xFFFF}


@translates(*UNARY)
def unary(op: Call) -> Any:
    return UNARY[op.node.op_type](op.tensor())


@translates(*BINARY)
def binary(op: Call) -> Any:
    function = BINARY[op.node.op_type]
    left = op.tensor(0)
    right = op.tensor(1) if op.node.op_type in WITHOUT_NUMBERS else op.operand(1)
    if op.node.op_type == "Add" and op.dtype(0) == ir.DataType.UINT32:
        # Signed addition gives the same bits: a key is advanced in every step.
        return torch.add(left.view(torch.int32), op.tensor(1).view(torch.int32)).view(torch.uint32)
    if op.dtype(0) in UNSIGNED:
        return _unsigned(op, function, left, op.tensor(1))
    return function(left, right)


def _unsigned(op: Call, function: Callable[..., Any], left: Any, right: Any) -> Any:
    result = function(left.to(torch.int64), right.to(torch.int64))
    if op.output_dtype() == torch.bool:
        return result
    return (result & UNSIGNED[op.dtype(0)]).to(op.output_dtype())


@translates("BitwiseXor")
def bitwise_xor(op: Call) -> Any:
    if op.dtype(0) in UNSIGNED:
        return _unsigned(op, torch.bitwise_xor, op.tensor(0), op.tensor(1))
    return torch.bitwise_xor(op.tensor(0), op.tensor(1))


@translates("BitShift")
def bit_shift(op: Call) -> Any:
    left = op.attribute("direction") == "LEFT"
    words, distance = op.tensor(0), op.tensor(1)
    if op.dtype(0) == ir.DataType.UINT64:
        # An arithmetic shift of the same bits, without the copies of the sign.
        bits, steps = words.view(torch.int64), distance.view(torch.int64)
        if left:
            return torch.bitwise_left_shift(bits, steps).view(torch.uint64)
        kept = torch.bitwise_not(torch.bitwise_left_shift(torch.bitwise_left_shift(-1, 63 - steps), 1))
        return torch.bitwise_and(torch.bitwise_right_shift(bits, steps), kept).view(torch.uint64)
    shift = torch.bitwise_left_shift if left else torch.bitwise_right_shift
    if op.dtype(0) in UNSIGNED:
        return _unsigned(op, shift, words, distance)
    return shift(words, distance)


@translates("Div")
def divide(op: Call) -> Any:
    left, right = op.tensor(0), op.operand(1)
    if op.dtype(0).is_integer():
        return torch.div(left, right, rounding_mode="trunc")
    return torch.div(left, right)


@translates("Mod")
def modulo(op: Call) -> Any:
    return (torch.fmod if op.attribute("fmod", 0) else torch.remainder)(op.tensor(0), op.operand(1))


@translates("Pow")
def power(op: Call) -> Any:
    exponent = op.operand(1)
    return (
        torch.pow(op.tensor(0), exponent).to(op.torch_dtype(0))
        if op.dtype(0) != op.dtype(1)
        else torch.pow(op.tensor(0), exponent)
    )


@translates("Sum", "Max", "Min", "Mean")
def variadic(op: Call) -> Any:
    functions: dict[str, Callable[..., Any]] = {
        "Sum": torch.add,
        "Mean": torch.add,
        "Max": torch.maximum,
        "Min": torch.minimum,
    }
    function = functions[op.node.op_type]
    total, *others = op.tensors()
    for other in others:
        total = function(total, other)
    return total / len(op) if op.node.op_type == "Mean" else total


@translates("Where")
def where(op: Call) -> Any:
    return torch.where(op.tensor(0), op.tensor(1), op.tensor(2))


@translates("Identity")
def identity(op: Call) -> Any:
    return op.tensor()


@translates("Cast")
def cast(op: Call) -> Any:
    return _cast(op, TORCH_DTYPES[ir.DataType(op.attribute("to"))])


@translates("CastLike")
def cast_like(op: Call) -> Any:
    return _cast(op, op.torch_dtype(1))


def _cast(op: Call, to: torch.dtype) -> Any:
    x = op.tensor()
    if op.dtype(0).is_floating_point() and to in (torch.uint32, torch.uint16, torch.uint64):
        return x.to(torch.int64).to(to)
    return x.to(to)


@translates("IsInf")
def is_infinite(op: Call) -> Any:
    negative, positive = op.attribute("detect_negative", 1), op.attribute("detect_positive", 1)
    if negative and positive:
        return torch.isinf(op.tensor())
    return torch.isneginf(op.tensor()) if negative else torch.isposinf(op.tensor())


@translates("Clip", since=11)
def clip(op: Call) -> Any:
    low = op.operand(1) if op.has(1) else None
    high = op.operand(2) if op.has(2) else None
    if low is None and high is None:
        return op.tensor()
    if all(bound is None or isinstance(bound, int | float) for bound in (low, high)):
        return torch.clamp(op.tensor(), low, high)
    result = op.tensor()
    if op.has(1):
        result = torch.maximum(result, op.tensor(1))
    return torch.minimum(result, op.tensor(2)) if op.has(2) else result


@translates("QuantizeLinear")
def quantize(op: Call) -> Any:
    x, scale = op.tensor(0), _placed(op, 1)
    number = torch.round(x / scale.to(op.torch_dtype(0)))
    if op.has(2):
        number = number + _placed(op, 2).to(op.torch_dtype(0))
    return _saturated(number, op.output_dtype())


@translates("DequantizeLinear")
def dequantize(op: Call) -> Any:
    number = op.tensor(0).to(op.output_dtype())
    if op.has(2):
        number = number - _placed(op, 2).to(op.output_dtype())
    return number * _placed(op, 1).to(op.output_dtype())


@translates("DynamicQuantizeLinear")
def dynamic_quantize(op: Call) -> Any:
    x = op.tensor()
    least, greatest = torch.clamp(torch.amin(x), max=0), torch.clamp(torch.amax(x), min=0)
    scale = (greatest - least) / 255
    # All zeros have no range: any scale restores them.
    divisor = torch.where(scale == 0, 1.0, scale)
    zero_point = torch.round(torch.clamp(-least / divisor, 0, 255))
    number = torch.round(x / divisor) + zero_point
    return _saturated(number, torch.uint8), scale, zero_point.to(torch.uint8)


@translates("MatMulInteger")
def matmul_integer(op: Call) -> Any:
    """Computed in float64, which holds every sum of such products exactly."""
    left, right = op.tensor(0).to(torch.float64), op.tensor(1).to(torch.float64)
    if op.has(2):
        zero_point = op.tensor(2).to(torch.float64)
        left = left - (torch.unsqueeze(zero_point, -1) if op.rank(2) == 1 else zero_point)
    if op.has(3):
        right = right - op.tensor(3).to(torch.float64)
    return torch.matmul(left, right).to(torch.int32)


def _saturated(number: Any, dtype: torch.dtype) -> Any:
    limits = torch.iinfo(dtype)
    clipped = torch.clamp(number, limits.min, limits.max)
    return clipped.to(torch.int32).to(dtype) if dtype == torch.uint16 else clipped.to(dtype)


def _placed(op: Call, index: int) -> Any:
    numbers, rank, block = op.tensor(index), op.rank(0), op.attribute("block_size", 0)
    if op.rank(index) == 0:
        return numbers
    axis = op.attribute("axis", 1) % max(rank, 1)
    if block:
        return torch.narrow(torch.repeat_interleave(numbers, block, axis), axis, 0, op.tensor(0).size(axis))
    return torch.reshape(numbers, [-1 if dimension == axis else 1 for dimension in range(rank)])

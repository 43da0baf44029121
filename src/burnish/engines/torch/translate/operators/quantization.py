"""Integers that stand for floating-point numbers: to them, back from them, and their products."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, translates


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
    # Zeros alone have no range: any scale gives them back.
    divisor = torch.where(scale == 0, 1.0, scale)
    zero_point = torch.round(torch.clamp(-least / divisor, 0, 255))
    number = torch.round(x / divisor) + zero_point
    return _saturated(number, torch.uint8), scale, zero_point.to(torch.uint8)


@translates("MatMulInteger")
def matmul_integer(op: Call) -> Any:
    """In float64, which holds every sum of such products."""
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
    """A scale or zero point in a shape that broadcasts to the first operand."""
    numbers, rank, block = op.tensor(index), op.rank(0), op.attribute("block_size", 0)
    if op.rank(index) == 0:
        return numbers
    axis = op.attribute("axis", 1) % max(rank, 1)
    if block:
        return torch.narrow(torch.repeat_interleave(numbers, block, axis), axis, 0, op.tensor(0).size(axis))
    return torch.reshape(numbers, [-1 if dimension == axis else 1 for dimension in range(rank)])

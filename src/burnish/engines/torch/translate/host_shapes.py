"""Numbers that a graph computes with on the host: extents, shapes, axes, counts.

ONNX computes shapes with tensors; PyTorch takes them as Python integers. A small integer value whose elements are known, or come
from the extents of a tensor, is held as a ``Host``: its elements are Python numbers, or their proxies in the traced program.
Known values emit nothing, and the others need no tensor and no readback.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from burnish.graph import attribute_value

Number = Any
"""A Python number, or its proxy in the traced program."""
LONGEST = 64
"""Longer constants are only tensors."""


@dataclass(frozen=True)
class Host:
    """A tensor of rank 0 or 1 whose elements are numbers of the host.

    Attributes:
        elements: Python numbers, or proxies of them.
        rank: 0 (with one element) or 1.
        dtype: dtype of the ONNX value.
    """

    elements: tuple[Number, ...]
    rank: int
    dtype: ir.DataType

    @property
    def is_known(self) -> bool:
        return not any(isinstance(element, fx.Proxy) for element in self.elements)

    @staticmethod
    def of_array(array: np.ndarray, dtype: ir.DataType, longest: int = LONGEST) -> Host | None:
        """Return a constant as host numbers, if it is small and holds integers or booleans."""
        if array.ndim > 1 or array.size > longest or array.dtype.kind not in "iub":
            return None
        return Host(tuple(array.reshape(-1).tolist()), array.ndim, dtype)


def extents(tensor: fx.Proxy, value: ir.Value) -> Host | None:
    """Return the shape of a tensor: known integers, or else numbers read from it; None if its rank is unknown."""
    if value.shape is None:
        return None
    elements = [
        dimension if isinstance(dimension, int) else torch.ops.aten.sym_size.int(tensor, axis)
        for axis, dimension in enumerate(value.shape.dims)
    ]
    return Host(tuple(elements), 1, ir.DataType.INT64)


def evaluate(node: ir.Node, operands: Sequence[Host | None]) -> Host | None:
    """Compute a node on the host, if all its operands are host numbers and its operator is for shapes; else None."""
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    if rule is None or any(operand is None and value is not None for operand, value in zip(operands, node.inputs, strict=True)):
        return None
    result = rule(node, [operand for operand in operands if operand is not None])
    return None if result is None or len(result.elements) > LONGEST else result


_Rule = Callable[[ir.Node, list[Host]], Host | None]


def _elementwise(function: Callable[..., Number], dtype: ir.DataType | None = None) -> _Rule:
    def rule(node: ir.Node, operands: list[Host]) -> Host | None:
        length = max(len(operand.elements) for operand in operands)
        if any(len(operand.elements) not in (1, length) for operand in operands):
            return None
        columns = [operand.elements * (length if len(operand.elements) == 1 else 1) for operand in operands]
        elements = tuple(function(*numbers) for numbers in zip(*columns, strict=True))
        return Host(elements, max(operand.rank for operand in operands), dtype or operands[-1].dtype)

    return rule


def _quotient(left: Number, right: Number) -> Number:
    """Integer division that rounds towards zero, like ONNX's; shapes are not negative, but known numbers may be."""
    if isinstance(left, int) and isinstance(right, int) and (left < 0) != (right < 0):
        return -(abs(left) // abs(right))
    return operator.floordiv(left, right)


def _least(left: Number, right: Number) -> Number:
    return torch.sym_min(left, right) if isinstance(left, fx.Proxy) or isinstance(right, fx.Proxy) else min(left, right)  # type: ignore[no-untyped-call]


def _greatest(left: Number, right: Number) -> Number:
    return torch.sym_max(left, right) if isinstance(left, fx.Proxy) or isinstance(right, fx.Proxy) else max(left, right)  # type: ignore[no-untyped-call]


def _gather(node: ir.Node, operands: list[Host]) -> Host | None:
    data, indices = operands
    if not indices.is_known or data.rank != 1 or attribute_value(node, "axis", 0) not in (0, -1):
        return None
    return Host(tuple(data.elements[int(index)] for index in indices.elements), indices.rank, data.dtype)


def _slice(node: ir.Node, operands: list[Host]) -> Host | None:
    data, *bounds = operands
    if len(bounds) < 2 or len(bounds) != len([value for value in node.inputs[1:] if value is not None]):
        return None
    if (node.inputs[3:4] and node.inputs[3] is None) or not all(bound.is_known for bound in bounds):
        return None
    start, end = int(bounds[0].elements[0]), int(bounds[1].elements[0])
    step = int(bounds[3].elements[0]) if len(bounds) > 3 else 1
    if step < 1:
        return None
    return Host(data.elements[start:end:step], 1, data.dtype)


def _concat(node: ir.Node, operands: list[Host]) -> Host | None:
    return Host(tuple(element for operand in operands for element in operand.elements), 1, operands[0].dtype)


def _with_rank(rank: int) -> _Rule:
    def rule(node: ir.Node, operands: list[Host]) -> Host | None:
        data = operands[0]
        output = node.outputs[0]
        declared = None if output.shape is None else len(output.shape)
        if (len(data.elements) != 1 and rank == 0) or declared not in (None, rank):
            return None if declared is None or declared > 1 else Host(data.elements, declared, data.dtype)
        return Host(data.elements, rank, data.dtype)

    return rule


def _product(node: ir.Node, operands: list[Host]) -> Host | None:
    data = operands[0]
    known = math.prod(element for element in data.elements if not isinstance(element, fx.Proxy))
    total: Number = known
    for element in data.elements:
        if isinstance(element, fx.Proxy):
            total = element if isinstance(total, int) and total == 1 else total * element
    return Host((total,), int(bool(attribute_value(node, "keepdims", 1))), data.dtype)


def _cast(node: ir.Node, operands: list[Host]) -> Host | None:
    to = ir.DataType(attribute_value(node, "to", 0))
    data = operands[0]
    integers = to.is_integer() and data.dtype.is_integer()
    return Host(data.elements, data.rank, to) if integers else None


def _same(node: ir.Node, operands: list[Host]) -> Host | None:
    return operands[0]


_RULES: dict[str, _Rule] = {
    "Add": _elementwise(operator.add),
    "Sub": _elementwise(operator.sub),
    "Mul": _elementwise(operator.mul),
    "Div": _elementwise(_quotient),
    "Min": _elementwise(_least),
    "Max": _elementwise(_greatest),
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Squeeze": _with_rank(0),
    "Unsqueeze": _with_rank(1),
    "ReduceProd": _product,
    "Cast": _cast,
    "Identity": _same,
}

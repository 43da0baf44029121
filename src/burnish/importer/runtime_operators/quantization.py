"""Quantization in the form that ONNX Runtime has of its own: that of the standard, before the standard had these integers."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, rewrites
from burnish.operators import Operation

_EIGHT_BITS = frozenset({ir.DataType.INT8, ir.DataType.UINT8})
_OTHER_INTEGERS_SINCE = 21
"""The opset in which the standard got integers of four and sixteen bits."""


def _is_standard(op: Operation, integers: Tensor | None) -> bool:
    known = integers is None or integers.dtype in _EIGHT_BITS or op.builder.opset >= _OTHER_INTEGERS_SINCE
    return known and not op.attribute("block_size", 0) and op.attribute("output_dtype") is None


@rewrites("QuantizeLinear")
def quantize_linear(op: Operation) -> Results:
    """In blocks, or in integers that the model's opset does not have, it stays."""
    x, scale, zero = op.input, op.required(1), op.optional(2)
    return op.builder.op("QuantizeLinear", x, scale, zero, axis=op.attribute("axis")) if _is_standard(op, zero) else None


@rewrites("DequantizeLinear")
def dequantize_linear(op: Operation) -> Results:
    """Likewise."""
    x, scale, zero = op.input, op.required(1), op.optional(2)
    return op.builder.op("DequantizeLinear", x, scale, zero, axis=op.attribute("axis")) if _is_standard(op, x) else None

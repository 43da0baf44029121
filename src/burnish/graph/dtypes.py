"""Sets of dtypes that are treated alike."""

from __future__ import annotations

import onnx_ir as ir

SIXTEEN_BIT = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Floating-point dtypes of too few digits to sum in."""

FLOATING = SIXTEEN_BIT | {ir.DataType.FLOAT, ir.DataType.DOUBLE}
"""The dtypes that carry gradients."""

"""Chains of elementwise arithmetic as one call of the engine's kernel."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.kernels.elementwise.operators import FUSED_ELEMENTWISE, FUSED_ELEMENTWISE_SUMS
from burnish.engines.torch.translate.rules import Call, translates

# As PyTorch counts element types.
SCALAR_TYPES = {ir.DataType.FLOAT: 6, ir.DataType.BOOL: 11, ir.DataType.BFLOAT16: 15}


@translates(FUSED_ELEMENTWISE)
def elementwise(op: Call) -> Any:
    constants = list(op.attribute("constants"))[: op.attribute("constant_count")]
    types = [SCALAR_TYPES[ir.DataType(number)] for number in op.attribute("dtypes")]
    results = torch.ops.burnish.elementwise.default(op.tensors(), constants, list(op.attribute("program")), types)
    return tuple(results[index] for index in range(len(op.node.outputs)))


@translates(FUSED_ELEMENTWISE_SUMS)
def elementwise_sums(op: Call) -> Any:
    """Results of a program, and sums over leading axes of what registers hold; program and dtypes have one number too many."""
    constants = list(op.attribute("constants"))[: op.attribute("constant_count")]
    types = [SCALAR_TYPES[ir.DataType(number)] for number in op.attribute("dtypes")[:-1]]
    registers = list(op.attribute("summed")), op.attribute("kept")
    program = list(op.attribute("program"))[:-1]
    results = torch.ops.burnish.elementwise_sums.default(op.tensors(), constants, program, types, *registers)
    return tuple(results[index] for index in range(len(op.node.outputs)))

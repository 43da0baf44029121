"""Chains of elementwise arithmetic, each in one pass over memory."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from burnish.engines.torch.native import Use, declare_kernel
from burnish.engines.torch.translate.rules import Call, translates
from burnish.kernels.elementwise import FUSED_ELEMENTWISE, FUSED_ELEMENTWISE_SUMS

declare_kernel(
    "elementwise",
    "elementwise(Tensor[] tensors, float[] constants, int[] program, int[] outputs) -> Tensor[]",
    "elementwise_sums(Tensor[] tensors, float[] constants, int[] program, int[] outputs, int[] summed, int kept) -> Tensor[]",
    "update_state_(Tensor(a!)[] tensors, Tensor plan, Tensor constants, Tensor(b!)[] entries, Tensor[] values,"
    " Tensor(c!)[] counters, Tensor[] increments) -> ()",
    use=Use.ALL,
)


# PyTorch's numbers of element types.
SCALAR_TYPES = {ir.DataType.FLOAT: 6, ir.DataType.BOOL: 11, ir.DataType.BFLOAT16: 15}


@translates(FUSED_ELEMENTWISE)
def elementwise(op: Call) -> Any:
    constants = list(op.attribute("constants"))[: op.attribute("constant_count")]
    types = [SCALAR_TYPES[ir.DataType(number)] for number in op.attribute("dtypes")]
    results = torch.ops.burnish.elementwise.default(op.tensors(), constants, list(op.attribute("program")), types)
    return tuple(results[index] for index in range(len(op.node.outputs)))


@translates(FUSED_ELEMENTWISE_SUMS)
def elementwise_sums(op: Call) -> Any:
    """Translate a program with results and sums of registers over leading axes; program and dtypes have one number too many."""
    constants = list(op.attribute("constants"))[: op.attribute("constant_count")]
    types = [SCALAR_TYPES[ir.DataType(number)] for number in op.attribute("dtypes")[:-1]]
    registers = list(op.attribute("summed")), op.attribute("kept")
    program = list(op.attribute("program"))[:-1]
    results = torch.ops.burnish.elementwise_sums.default(op.tensors(), constants, program, types, *registers)
    return tuple(results[index] for index in range(len(op.node.outputs)))

"""What the fusions of convolutions and of their gradients have in common."""

from __future__ import annotations

import onnx_ir as ir

from burnish.operators.convolution import CONV_INPUT_GRAD, CONV_WEIGHT_GRAD


def kernel_place(node: ir.Node) -> int | None:
    """Which operand holds the kernels of a convolution, of its input's gradient or of its kernels'; None for another node."""
    if node.op_type == "Conv" and node.domain == "":
        return 1
    gradient = next((operator for operator in (CONV_INPUT_GRAD, CONV_WEIGHT_GRAD) if operator.is_of(node)), None)
    return None if gradient is None else gradient.inputs.index("w")

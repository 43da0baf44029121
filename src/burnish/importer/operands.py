"""What the inputs of operators are for, by position: weights, statistics, configuration. Names of tensors say nothing."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from burnish.quantization.graph import learns_scale

WEIGHT_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "GRU": (1, 2, 3),
    "Gather": (0,),
    "Gemm": (0, 1, 2),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "LayerNormalization": (1, 2),
    "MatMul": (0, 1),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (1, 2, 3),
}
"""Operands that are weights wherever they are constant."""

STATISTIC_OPERANDS: Mapping[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}
"""Running statistics, which training updates and never differentiates."""

CONFIGURATION_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "Clip": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1, 2),
    "NegativeLogLikelihoodLoss": (2,),
    "OneHot": (2,),
    "Pad": (2,),
    "Pow": (1,),
    "QuantizeLinear": (1, 2),
    "Resize": (1, 2, 3),
    "RoiAlign": (1, 2),
    "RotaryEmbedding": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
    "Upsample": (1,),
}
"""Floating-point operands that set how an operator works."""

NOT_DIFFERENTIABLE = frozenset(
    "Bernoulli Ceil EyeLike Floor Multinomial NonMaxSuppression RandomNormal RandomNormalLike RandomUniform RandomUniformLike "
    "Range Round Sign".split()
)
"""Operators with floating-point outputs whose inputs receive no gradient, or one that is zero everywhere."""

QUANTIZES = frozenset({"DynamicQuantizeLinear", "QuantizeLinear"})
"""Operators that give integers for floating-point numbers, through which a gradient passes as if they did not round."""

INTEGER_OPERANDS: Mapping[str, tuple[int, ...] | None] = {
    "Add": None,
    "Cast": (0,),
    "Clip": (0,),
    "Concat": None,
    "ConvInteger": (0, 1),
    "DepthToSpace": (0,),
    "DequantizeLinear": (0,),
    "Expand": (0,),
    "Flatten": (0,),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "Identity": (0,),
    "MatMulInteger": (0, 1),
    "Max": None,
    "MaxPool": (0,),
    "Min": None,
    "Mul": None,
    "Pad": (0, 2),
    "Reshape": (0,),
    "Slice": (0,),
    "SpaceToDepth": (0,),
    "Split": (0,),
    "Squeeze": (0,),
    "Sub": None,
    "Tile": (0,),
    "Transpose": (0,),
    "Unsqueeze": (0,),
    "Where": (1, 2),
}
"""Operators that may stand between a quantization and what makes floating-point numbers of it again, and their operands that may
hold its integers; None for all."""


SUMS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
"""What integers of a quantization are summed in."""


def may_hold_integers(node: ir.Node, index: int) -> bool:
    """Whether an input of a node may hold integers that stand for floating-point numbers, and carry their gradient."""
    if node.domain != "" or node.op_type not in INTEGER_OPERANDS:
        return False
    value = node.inputs[index]
    if node.op_type in ("Add", "Mul", "Sub") and (value is None or value.dtype not in SUMS):
        return False  # what does not fit wraps around
    operands = INTEGER_OPERANDS[node.op_type]
    return operands is None or index in operands


def constant_operands(node: ir.Node) -> tuple[int, ...]:
    """The positions of the inputs of a node that receive no gradient: configuration, and running statistics."""
    if node.domain != "":
        return ()
    if node.op_type in ("DequantizeLinear", "QuantizeLinear") and learns_scale(node):
        return (2,)
    return (*CONFIGURATION_OPERANDS.get(node.op_type, ()), *STATISTIC_OPERANDS.get(node.op_type, ()))

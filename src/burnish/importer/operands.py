"""What the inputs of operators are for, by position: weights, statistics, configuration. Names of tensors say nothing."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

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
    "Dropout": (1, 2),
    "NegativeLogLikelihoodLoss": (2,),
    "OneHot": (2,),
    "Pad": (2,),
    "Pow": (1,),
    "Resize": (1, 2, 3),
    "RoiAlign": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
    "Upsample": (1,),
}
"""Floating-point operands that set how an operator works."""

NOT_DIFFERENTIABLE = frozenset(
    "Bernoulli Ceil DequantizeLinear DynamicQuantizeLinear EyeLike Floor Multinomial NonMaxSuppression QuantizeLinear "
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range Round Sign".split()
)
"""Operators with floating-point outputs whose inputs receive no gradient, or one that is zero everywhere."""


def constant_operands(node: ir.Node) -> tuple[int, ...]:
    """The positions of the inputs of a node that receive no gradient: configuration, and running statistics."""
    if node.domain != "":
        return ()
    return (*CONFIGURATION_OPERANDS.get(node.op_type, ()), *STATISTIC_OPERANDS.get(node.op_type, ()))

"""Matrix products and convolutions with fused operations; activations, also with a bias."""

from __future__ import annotations

import math
from typing import Any

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import channels_first, channels_last, is_read, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank


def exact_gelu(x: Tensor) -> Tensor:
    """Emit ``x / 2 * (1 + erf(x / sqrt(2)))``, as nodes that are recognized as Gelu."""
    return x * (x.builder.op("Erf", x / math.sqrt(2.0)) + 1.0) * 0.5


def fast_gelu_of(x: Tensor) -> Tensor:
    """Emit its approximation by tanh, as recognizable nodes."""
    inner = (x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)
    return x * (x.builder.op("Tanh", inner) + 1.0) * 0.5


def _biased(op: Operation) -> Tensor:
    bias = op.optional(1)
    return op.input if bias is None else op.input + bias


@rewrites("Gelu", "BiasGelu")
def gelu(op: Operation) -> Tensor:
    return exact_gelu(_biased(op))


@rewrites("FastGelu")
def fast_gelu(op: Operation) -> Tensor:
    return fast_gelu_of(_biased(op))


@rewrites("QuickGelu")
def quick_gelu(op: Operation) -> Tensor:
    """Emit ``x * sigmoid(alpha * x)``."""
    x, alpha = op.input, op.attribute("alpha", 1.702)
    return x * op.builder.op("Sigmoid", x if alpha == 1.0 else x * alpha)


@rewrites("BiasAdd")
def bias_add(op: Operation) -> Tensor:
    return op.input + op.required(1) + op.required(2)


@rewrites("BiasSplitGelu")
def bias_split_gelu(op: Operation) -> Tensor:
    """Emit half of a biased input times the activation of the other half."""
    left, right = op.builder.op("Split", op.input + op.required(1), axis=-1, num_outputs=2, outputs=2)
    return left * exact_gelu(right)


@rewrites("BiasDropout")
def bias_dropout(op: Operation) -> tuple[Tensor | None, ...]:
    """Emit ``dropout(x + bias) + residual`` and the dropout's mask."""
    residual = op.optional(2)
    operands = (_biased(op), op.optional(3), op.optional(4))
    if is_read(op, 1):
        dropped, mask = op.builder.op("Dropout", *operands, outputs=2)
    else:
        dropped, mask = op.builder.op("Dropout", *operands), None
    return dropped if residual is None else dropped + residual, mask


_PARAMETERS = {
    "Clip": ("min", "max"),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}
"""Activations with parameters, in the order of a fused convolution."""
_PLAIN = frozenset({"HardSwish", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"})


def _activated(op: Operation, x: Tensor, parameters: dict[str, Any]) -> Tensor:
    builder, name = op.builder, op.attribute("activation", "")
    if not name:
        return x
    if name == "Clip":
        return builder.op("Clip", x, *(builder.scalar(parameters[bound], x) for bound in ("min", "max")))
    if name in _PARAMETERS:
        return builder.op(name, x, **parameters)
    if name in _PLAIN:
        return builder.op(name, x)
    raise UnsupportedOperatorError(
        f"{op} has the activation '{name}', which burnish does not know: optimize the model without this fusion, or train the "
        "file that it was made of"
    )


def _named_parameters(op: Operation) -> dict[str, float]:
    names = _PARAMETERS.get(op.attribute("activation", ""), ())
    values: dict[str, Any] = {name: op.attribute(f"activation_{name}") for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _arranged(op: Operation, x: Tensor, transposed: bool, first_last: bool) -> Tensor:
    """Return a product's operand with its first axis moved after the other batch axes and its last two exchanged."""
    rank = known_rank(op, x)
    axes = list(range(rank))
    if first_last and rank > 2:
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if transposed and rank > 1:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return x if axes == list(range(rank)) else op.builder.op("Transpose", x, perm=axes)


@rewrites("FusedMatMul", "FusedMatMulActivation", "TransposeMatMul")
def fused_matmul(op: Operation) -> Tensor:
    """Emit ``alpha * A B`` with possibly transposed operands."""
    operands = [
        _arranged(op, op.required(index), bool(op.attribute(f"trans{name}", 0)), bool(op.attribute(f"transBatch{name}", 0)))
        for index, name in enumerate("AB")
    ]
    alpha = op.attribute("alpha", 1.0)
    product = op.builder.op("MatMul", *operands)
    return _activated(op, product if alpha == 1.0 else product * alpha, _named_parameters(op))


@rewrites("FusedGemm")
def fused_gemm(op: Operation) -> Tensor:
    attributes = {name: op.attribute(name) for name in ("alpha", "beta", "transA", "transB")}
    product = op.builder.op("Gemm", op.input, op.required(1), op.optional(2), **attributes)
    return _activated(op, product, _named_parameters(op))


@rewrites("GemmFastGelu")
def gemm_fast_gelu(op: Operation) -> Tensor:
    product, bias = op.builder.op("MatMul", op.input, op.required(1)), op.optional(2)
    return fast_gelu_of(product if bias is None else product + bias)


@rewrites("FusedConv", "NhwcConv", "NhwcFusedConv")
def fused_convolution(op: Operation) -> Tensor:
    """Emit a convolution, a sum and an activation; images may be channels last, but weights have channels first."""
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    is_last, x = op.node.op_type.startswith("Nhwc"), op.input
    images = channels_first(op, x) if is_last else x
    y = op.builder.op("Conv", images, op.required(1), op.optional(2), **{name: op.attribute(name) for name in names})
    y, summand = channels_last(op, y) if is_last else y, op.optional(3)
    y = y if summand is None else y + summand
    known = _PARAMETERS.get(op.attribute("activation", ""), ())
    return _activated(op, y, dict(zip(known, op.attribute("activation_params", ()), strict=False)))


@rewrites("Trilu")
def trilu(op: Operation) -> Tensor:
    return op.builder.op("Trilu", op.input, op.optional(1), upper=op.attribute("upper", 1))

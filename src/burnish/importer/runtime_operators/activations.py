"""Activations, alone and with the bias before them."""

from __future__ import annotations

import math

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import is_read, rewrites
from burnish.operators import Operation


def exact_gelu(x: Tensor) -> Tensor:
    """``x / 2 * (1 + erf(x / sqrt(2)))``, in the pieces that are recognized as one layer."""
    return x * (x.builder.op("Erf", x / math.sqrt(2.0)) + 1.0) * 0.5


def fast_gelu_of(x: Tensor) -> Tensor:
    """The approximation by tanh, likewise."""
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
    """``x * sigmoid(alpha * x)``."""
    x, alpha = op.input, op.attribute("alpha", 1.702)
    return x * op.builder.op("Sigmoid", x if alpha == 1.0 else x * alpha)


@rewrites("BiasAdd")
def bias_add(op: Operation) -> Tensor:
    return op.input + op.required(1) + op.required(2)


@rewrites("BiasSplitGelu")
def bias_split_gelu(op: Operation) -> Tensor:
    """One half of what a bias was added to, times the activation of the other."""
    left, right = op.builder.op("Split", op.input + op.required(1), axis=-1, num_outputs=2, outputs=2)
    return left * exact_gelu(right)


@rewrites("BiasDropout")
def bias_dropout(op: Operation) -> tuple[Tensor | None, ...]:
    """``dropout(x + bias) + residual``; the mask is the dropout's."""
    residual = op.optional(2)
    operands = (_biased(op), op.optional(3), op.optional(4))
    if is_read(op, 1):
        dropped, mask = op.builder.op("Dropout", *operands, outputs=2)
    else:
        dropped, mask = op.builder.op("Dropout", *operands), None
    return dropped if residual is None else dropped + residual, mask

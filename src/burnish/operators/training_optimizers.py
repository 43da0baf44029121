"""The optimizers of the standard: Adagrad, Adam and Momentum of ``ai.onnx.preview.training``, as standard operators.

The formulas follow the operators' specification, version 1. A node updates any number of tensors. Scalars are computed in
float64 and cast to the dtype of each tensor: ``1 - 0.999 ** T`` has few correct digits in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import TRAINING_DOMAIN, Tensor
from burnish.operators.registry import Operation, Operator

Updated = tuple[Tensor | None, ...]


def momentum(op: Operation) -> Updated:
    """V' = alpha V + beta G, X' = X - R V'; with Nesterov X' = X - R (G + alpha V'). At T = 0 beta counts as 1."""
    builder, rate, count = op.builder, _scalar(op, 0), _scalar(op, 1)
    alpha, mode = _number(op, "alpha"), op.attribute("mode")
    if mode not in ("standard", "nesterov"):
        raise ModelError(f"{op} has the mode '{mode}', and the standard knows 'standard' and 'nesterov': export the model again")
    beta = _where_positive(count, builder.scalar(_number(op, "beta"), count), builder.scalar(1.0, count))
    next_x, next_v = [], []
    for x, g, v in _tensors(op, 3):
        gradient = _regularized(op, x, g)
        velocity = v * alpha + gradient * builder.cast(beta, x.dtype)
        direction = gradient + velocity * alpha if mode == "nesterov" else velocity
        next_x.append(x - direction * builder.cast(rate, x.dtype))
        next_v.append(velocity)
    return (*next_x, *next_v)


def adagrad(op: Operation) -> Updated:
    """H' = H + G², X' = X - R / (1 + T decay_factor) · G / (√H' + epsilon)."""
    builder, rate, count = op.builder, _scalar(op, 0), _scalar(op, 1)
    rate = rate / (count * _number(op, "decay_factor", 0.0) + 1.0)
    next_x, next_h = [], []
    for x, g, h in _tensors(op, 3):
        gradient = _regularized(op, x, g)
        squares = h + gradient * gradient
        step = gradient * builder.cast(rate, x.dtype) / (builder.op("Sqrt", squares) + _number(op, "epsilon", 1e-6))
        next_x.append(x - step)
        next_h.append(squares)
    return (*next_x, *next_h)


def adam(op: Operation) -> Updated:
    """V' = alpha V + (1 - alpha) G, H' = beta H + (1 - beta) G², X' = (1 - post) (X - R' V' / (√H' + epsilon)).

    R' = R √(1 - beta^T) / (1 - alpha^T) if T > 0, otherwise R. G includes ``norm_coefficient`` X; post is
    ``norm_coefficient_post``.
    """
    builder, rate, count = op.builder, _scalar(op, 0), _scalar(op, 1)
    alpha, beta = _number(op, "alpha", 0.9), _number(op, "beta", 0.999)
    decay = 1.0 - _number(op, "norm_coefficient_post", 0.0)
    correction = builder.op("Sqrt", 1.0 - _power(beta, count)) / (1.0 - _power(alpha, count))
    rate = rate * _where_positive(count, correction, builder.scalar(1.0, count))
    next_x, next_v, next_h = [], [], []
    for x, g, v, h in _tensors(op, 4):
        gradient = _regularized(op, x, g)
        mean = v * alpha + gradient * (1.0 - alpha)
        squares = h * beta + gradient * gradient * (1.0 - beta)
        following = x - mean / (builder.op("Sqrt", squares) + _number(op, "epsilon", 1e-6)) * builder.cast(rate, x.dtype)
        next_x.append(following if decay == 1.0 else following * decay)
        next_v.append(mean)
        next_h.append(squares)
    return (*next_x, *next_v, *next_h)


def _tensors(op: Operation, kinds: int) -> list[tuple[Tensor, ...]]:
    """Return the inputs after R and T per updated tensor: (X, G, V) of the first, of the second, and so on."""
    inputs = len(op.inputs) - 2
    count = inputs // kinds
    if count < 1 or inputs % kinds:
        raise ModelError(
            f"{op} has {inputs} inputs behind R and T, and takes {kinds} for each tensor that it updates: export the model again"
        )
    return [tuple(op.required(2 + kind * count + index) for kind in range(kinds)) for index in range(count)]


def _number(op: Operation, name: str, default: float = 0.0) -> float:
    """Return a coefficient as stored in a file, in float32: an omitted one equals its default written out."""
    return float(np.float32(op.attribute(name, default)))


def _regularized(op: Operation, x: Tensor, g: Tensor) -> Tensor:
    coefficient = _number(op, "norm_coefficient", 0.0)
    return g if coefficient == 0.0 else g + x * coefficient


def _scalar(op: Operation, index: int) -> Tensor:
    """Return a scalar input of an optimizer in float64. Exporters also write a rate of shape [1]."""
    scalar = op.required(index)
    if scalar.rank != 0:
        scalar = op.builder.op("Reshape", scalar, op.builder.integers([]))
    return op.builder.cast(scalar, ir.DataType.DOUBLE)


def _power(base: float, count: Tensor) -> Tensor:
    """base ** count, but base for a count of 0, so that the unselected division by 1 - base ** 0 stays finite."""
    builder = count.builder
    return builder.op("Pow", builder.scalar(base, count), builder.op("Max", count, 1.0))


def _where_positive(count: Tensor, then: Tensor, otherwise: Tensor) -> Tensor:
    return count.builder.op("Where", count.builder.op("Greater", count, 0.0), then, otherwise)


OPERATORS = [
    Operator("Momentum", domain=TRAINING_DOMAIN, lowering=momentum),
    Operator("Adagrad", domain=TRAINING_DOMAIN, lowering=adagrad),
    Operator("Adam", domain=TRAINING_DOMAIN, lowering=adam),
]

"""The optimizers of the standard: Adagrad, Adam and Momentum of ``ai.onnx.preview.training``, as standard operators.

The formulas are those of the operators' specification, version 1. A node updates any number of tensors. Scalars are computed
in float64 and cast to the dtype of each tensor: ``1 - 0.999 ** T`` has few correct digits in float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import TRAINING_DOMAIN, Builder, Tensor
from burnish.ops.registry import Operation, lowering

Updated = tuple[Tensor | None, ...]


@lowering("Momentum", domain=TRAINING_DOMAIN)
def momentum(op: Operation) -> Updated:
    """V' = alpha V + beta G, X' = X - R V'; with Nesterov X' = X - R (G + alpha V'). At T = 0 beta counts as 1."""
    rate, count = _Scalar(op, 0), _Scalar(op, 1)
    alpha, mode = _number(op, "alpha"), op.attribute("mode")
    if mode not in ("standard", "nesterov"):
        raise ModelError(f"{op} has the mode '{mode}', and the standard knows 'standard' and 'nesterov': export the model again")
    beta = count.where_positive(count.number(_number(op, "beta")), count.number(1.0))
    next_x, next_v = [], []
    for x, g, v in _tensors(op, 3):
        gradient = _regularized(op, x, g)
        velocity = v * alpha + gradient * beta.like(x)
        direction = gradient + velocity * alpha if mode == "nesterov" else velocity
        next_x.append(x - direction * rate.like(x))
        next_v.append(velocity)
    return (*next_x, *next_v)


@lowering("Adagrad", domain=TRAINING_DOMAIN)
def adagrad(op: Operation) -> Updated:
    """H' = H + G², X' = X - R / (1 + T decay_factor) · G / (√H' + epsilon)."""
    count = _Scalar(op, 1)
    rate = _Scalar(op, 0).over(count.tensor * _number(op, "decay_factor", 0.0) + 1.0)
    next_x, next_h = [], []
    for x, g, h in _tensors(op, 3):
        gradient = _regularized(op, x, g)
        squares = h + gradient * gradient
        step = gradient * rate.like(x) / (op.builder.op("Sqrt", squares) + _number(op, "epsilon", 1e-6))
        next_x.append(x - step)
        next_h.append(squares)
    return (*next_x, *next_h)


@lowering("Adam", domain=TRAINING_DOMAIN)
def adam(op: Operation) -> Updated:
    """V' = alpha V + (1 - alpha) G, H' = beta H + (1 - beta) G², X' = (1 - post) (X - R' V' / (√H' + epsilon)).

    R' = R √(1 - beta^T) / (1 - alpha^T) where T > 0, else R. G holds ``norm_coefficient`` X; post is ``norm_coefficient_post``.
    """
    builder, count = op.builder, _Scalar(op, 1)
    alpha, beta = _number(op, "alpha", 0.9), _number(op, "beta", 0.999)
    kept = 1.0 - _number(op, "norm_coefficient_post", 0.0)
    root = builder.op("Sqrt", 1.0 - count.exponent_of(beta))
    one = count.number(1.0)
    correction = count.where_positive(root / (1.0 - count.exponent_of(alpha)), one)
    rate = _Scalar(op, 0).times(correction.tensor)
    next_x, next_v, next_h = [], [], []
    for x, g, v, h in _tensors(op, 4):
        gradient = _regularized(op, x, g)
        mean = v * alpha + gradient * (1.0 - alpha)
        squares = h * beta + gradient * gradient * (1.0 - beta)
        following = x - mean / (builder.op("Sqrt", squares) + _number(op, "epsilon", 1e-6)) * rate.like(x)
        next_x.append(following if kept == 1.0 else following * kept)
        next_v.append(mean)
        next_h.append(squares)
    return (*next_x, *next_v, *next_h)


def _tensors(op: Operation, kinds: int) -> list[tuple[Tensor, ...]]:
    """The inputs behind R and T by tensor that is updated: (X, G, V) of the first, of the second, and so on."""
    given = len(op.inputs) - 2
    count = given // kinds
    if count < 1 or given % kinds:
        raise ModelError(
            f"{op} has {given} inputs behind R and T, and takes {kinds} for each tensor that it updates: export the model again"
        )
    return [tuple(op.required(2 + kind * count + index) for kind in range(kinds)) for index in range(count)]


def _number(op: Operation, name: str, default: float = 0.0) -> float:
    """A coefficient as a file holds it, in float32: one that is left out is the same as its default written out."""
    return float(np.float32(op.attribute(name, default)))


def _regularized(op: Operation, x: Tensor, g: Tensor) -> Tensor:
    coefficient = _number(op, "norm_coefficient", 0.0)
    return g if coefficient == 0.0 else g + x * coefficient


class _Scalar:
    """A scalar input of an optimizer in float64, and what is computed from it."""

    def __init__(self, op: Operation, index: int):
        self._builder: Builder = op.builder
        scalar = op.required(index)
        if scalar.rank != 0:
            # Exporters write a rate of shape [1] too, which would give a scalar parameter another rank.
            scalar = self._builder.op("Reshape", scalar, self._builder.integers([]))
        self.tensor = self._builder.cast(scalar, ir.DataType.DOUBLE)

    def _with(self, tensor: Tensor) -> _Scalar:
        result = object.__new__(_Scalar)
        result._builder, result.tensor = self._builder, tensor
        return result

    def like(self, tensor: Tensor) -> Tensor:
        """The scalar in the dtype of ``tensor``."""
        return self._builder.cast(self.tensor, tensor.dtype)

    def number(self, number: float) -> Tensor:
        return self._builder.scalar(number, self.tensor)

    def over(self, divisor: Tensor) -> _Scalar:
        return self._with(self.tensor / divisor)

    def times(self, factor: Tensor) -> _Scalar:
        return self._with(self.tensor * factor)

    def exponent_of(self, base: float) -> Tensor:
        """base ** this; where this is 0, base: what divides by 1 - base ** 0 is not selected, and stays finite."""
        positive = self._builder.op("Max", self.tensor, 1.0)
        return self._builder.op("Pow", self.number(base), positive)

    def where_positive(self, then: Tensor, otherwise: Tensor) -> _Scalar:
        return self._with(self._builder.op("Where", self._builder.op("Greater", self.tensor, 0.0), then, otherwise))

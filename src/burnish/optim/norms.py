"""Sums over all elements of a parameter or a gradient, in float64: what clipping and the rates of whole layers divide by."""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.graph import Builder, Tensor, static_shape


def sum_of_squares(builder: Builder, tensor: Tensor) -> Tensor:
    """Emit the sum of the squares of all elements, a float64 scalar: in float32 it would overflow from 1e19 on.

    Runtimes add up in one accumulator: over four million elements float32 would leave five digits.
    """
    return builder.op("ReduceSumSquare", builder.cast(tensor, ir.DataType.DOUBLE), keepdims=0)


def euclidean_norm(builder: Builder, tensor: Tensor) -> Tensor:
    """Emit the root of the sum of the squares of all elements, a float64 scalar."""
    return builder.op("Sqrt", sum_of_squares(builder, tensor))


def root_mean_square(builder: Builder, parameter: Tensor) -> Tensor:
    """Emit the root of the mean of the squares of all elements of a parameter, or of what has its shape; a float64 scalar.

    Of rows of a table, of which a step may read any number, it is 0 where there are none.
    """
    shape = static_shape(parameter.value)
    if shape is not None:
        return euclidean_norm(builder, parameter) / math.sqrt(math.prod(shape))
    count = builder.cast(builder.op("Size", parameter), ir.DataType.DOUBLE)
    return builder.op("Sqrt", sum_of_squares(builder, parameter) / builder.op("Max", count, 1.0))


def trust_ratio(builder: Builder, parameter: Tensor, update: Tensor, coefficient: float = 1.0, eps: float = 0.0) -> Tensor:
    """Emit ``coefficient * |parameter| / (|update| + eps)``, a float64 scalar, with Euclidean norms.

    It is 1 where either norm is 0, as a layer that starts at zero would never leave it. What LARS and LAMB share. Sources: You,
    Gitman and Ginsburg, "Large batch training of convolutional networks", 2017; You et al., "Large batch optimization for deep
    learning", 2020.
    """
    weight, length = euclidean_norm(builder, parameter), euclidean_norm(builder, update)
    ratio = (weight if coefficient == 1.0 else weight * coefficient) / (length + eps if eps else length)
    # A norm that is not a number fails the comparison, and reaches the weights by the update itself.
    defined = builder.op("Greater", builder.op("Min", weight, length), 0.0)
    return builder.op("Where", defined, ratio, builder.scalar(1.0, ratio))

"""Shared arithmetic of optimizers.

Scalars shared by all parameters are computed in float64 and cast to a parameter's dtype at the end: in float32, ``1 - 0.999`` has
four correct digits, and it divides every element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, static_shape, zeros_like

Tensors = dict[str, Tensor]


def double(tensor: Tensor) -> Tensor:
    """Cast to float64."""
    return tensor.builder.cast(tensor, ir.DataType.DOUBLE)


def number(builder: Builder, value: float) -> Tensor:
    """Emit a float64 constant."""
    return builder.scalar(value, ir.DataType.DOUBLE)


def count(builder: Builder, value: int) -> Tensor:
    """Emit an int64 constant."""
    return builder.scalar(value, ir.DataType.INT64)


def sqrt(tensor: Tensor) -> Tensor:
    """Emit the square root of each element."""
    return tensor.builder.op("Sqrt", tensor)


def where(condition: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Emit a selection by a scalar condition; the other value may be NaN."""
    return condition.builder.op("Where", condition, new, old, like=old)


def cast_like(scalar: Tensor, like: Tensor) -> Tensor:
    """Emit a scalar in the dtype of ``like``."""
    return scalar.builder.cast(scalar, like.dtype)


def epsilon(eps: float, like: Tensor, factor: Tensor | None = None) -> Tensor:
    """Return ``eps``, optionally times a float64 scalar, in the dtype of ``like``, without rounding to zero.

    In float16 most values of eps would round to zero, and a gradient of zero would be divided by it.
    """
    builder = like.builder
    smallest = np.nextafter(np.zeros((), like.dtype.numpy()), np.ones((), like.dtype.numpy()))
    if factor is None:
        value = np.asarray(eps, like.dtype.numpy())
        return builder.constant(smallest if eps and not value else value)
    product = cast_like(factor * eps, like)
    return builder.op("Max", product, builder.constant(smallest)) if eps and like.dtype == ir.DataType.FLOAT16 else product


def zero_slots(params: Mapping[str, Tensor], *slots: str) -> Tensors:
    """Emit ``<slot>/<initializer>`` for every slot and parameter: zeros of its dtype and shape."""
    return {f"{slot}/{name}": zeros_like(parameter) for slot in slots for name, parameter in params.items()}


def penalized(gradient: Tensor, parameter: Tensor, weight_decay: float) -> Tensor:
    """Emit ``gradient + weight_decay * parameter``, the gradient with an L2 penalty."""
    return gradient + parameter * weight_decay if weight_decay else gradient


def kept_share(rate: Tensor, weight_decay: float) -> Tensor | None:
    """Emit ``1 - rate * weight_decay``, the factor of a decaying parameter; None without decay."""
    return 1.0 - rate * weight_decay if weight_decay else None


def stepped(parameter: Tensor, direction: Tensor, rate: Tensor, keep: Tensor | None = None) -> Tensor:
    """Emit ``keep * parameter - rate * direction``, with scalars of any dtype; ``keep`` defaults to 1."""
    if keep is not None:
        parameter = parameter * cast_like(keep, parameter)
    return parameter - direction * cast_like(rate, parameter)


def known_rank(parameter: Tensor) -> int:
    """Return the rank of a parameter."""
    if parameter.rank is None:
        raise AssertionError(f"parameter '{parameter.name}' has no rank; a program declares the shape of every parameter")
    return parameter.rank


def known_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the extents of a parameter."""
    shape = static_shape(parameter.value)
    if shape is None:
        raise AssertionError(
            f"parameter '{parameter.name}' has an unknown extent; a program declares the shape of every parameter"
        )
    return shape


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Emit the sum of the squares of all elements, a float64 scalar: float32 would overflow from 1e19 on.

    Runtimes sum in a single accumulator: over four million elements float32 would leave five digits.
    """
    return tensor.builder.op("ReduceSumSquare", double(tensor), keepdims=0)


def euclidean_norm(tensor: Tensor) -> Tensor:
    """Emit the Euclidean norm of all elements, a float64 scalar."""
    return sqrt(sum_of_squares(tensor))


def root_mean_square(parameter: Tensor) -> Tensor:
    """Emit the root mean square of a parameter or a tensor of its shape, a float64 scalar.

    For the rows of a table that a step reads, it is 0 if there are none.
    """
    shape = static_shape(parameter.value)
    if shape is not None:
        return euclidean_norm(parameter) / math.sqrt(math.prod(shape))
    builder = parameter.builder
    size = double(builder.op("Size", parameter))
    return sqrt(sum_of_squares(parameter) / builder.op("Max", size, 1.0))


def trust_ratio(parameter: Tensor, update: Tensor, coefficient: float = 1.0, eps: float = 0.0) -> Tensor:
    """Emit ``coefficient * |parameter| / (|update| + eps)`` for LARS and LAMB, a float64 scalar, with Euclidean norms.

    It is 1 if either norm is 0, because a layer that starts at zero would never change otherwise. Sources: You, Gitman and
    Ginsburg, "Large batch training of convolutional networks", 2017; You et al., "Large batch optimization for deep learning",
    2020.
    """
    builder = parameter.builder
    weight, length = euclidean_norm(parameter), euclidean_norm(update)
    ratio = (weight if coefficient == 1.0 else weight * coefficient) / (length + eps if eps else length)
    # A NaN norm fails the comparison; the NaN reaches the weights through the update itself.
    defined = builder.op("Greater", builder.op("Min", weight, length), 0.0)
    return builder.op("Where", defined, ratio, builder.scalar(1.0, ratio))

"""Fourier transforms. Each is linear, and its gradient is the transposed transform of the cotangent.

With real and imaginary parts as the last axis, the transpose of the transform of N values is N times its inverse.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.indexing import GATHER_GRAD
from burnish.operators.positions import extent, known_rank
from burnish.operators.registry import Operation, Operator

OPSET_OF_AXIS_INPUT = 20
"""The opset from which the axis of DFT is an input."""


def dft(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of DFT over N values: an input shorter than N is padded with zeros, a longer one is cut to N.

    With ``onesided``, the other half of the spectrum has no cotangent. If the half is the input of the inverse, each entry stands
    for two values, except the constant and, for even N, the highest frequency.
    """
    x, axis, given = op.input, _axis(op), op.optional(1)
    inverse, onesided = bool(op.attribute("inverse", 0)), bool(op.attribute("onesided", 0))
    length = _number(x if onesided and not inverse else dy, axis) if given is None else _scalar(given)
    if not inverse:
        dx = _transform(dy, length if onesided else None, axis, inverse=1) * op.builder.cast(length, dy.dtype)
    elif not onesided:
        dx = _transform(dy, None, axis) / op.builder.cast(length, dy.dtype)
    else:
        dx = _transform(dy, None, axis, onesided=1) * _weights(op, length, axis)
    if given is not None:
        dx = _fitted(dx, x, axis)
    return (_parts_of(dx, x), *(None for _ in op.inputs[1:]))


def _weights(op: Operation, length: Tensor, axis: int | Tensor) -> Tensor:
    """1/N for the frequencies that are their own mirror images, 2/N for the others, [N // 2 + 1] along ``axis``."""
    builder, index, x = op.builder, ir.DataType.INT64, op.input
    zero, one = builder.scalar(0, index), builder.scalar(1, index)
    frequency = builder.op("Range", zero, length / 2 + 1, one)
    is_single = builder.op("Equal", builder.op("Mod", frequency * 2, length), zero)
    weights = builder.op("Where", is_single, builder.scalar(1, x), builder.scalar(2, x)) / builder.cast(length, x.dtype)
    if isinstance(axis, int):
        following = axis if axis < 0 else axis - known_rank(op, x)
        return builder.op("Reshape", weights, builder.integers([-1] + [1] * (-1 - following)))
    rank = builder.op("Size", builder.op("Shape", x))
    is_along = builder.op("Equal", builder.op("Range", zero, rank, one), builder.op("Mod", axis, rank))
    return builder.op("Reshape", weights, builder.op("Where", is_along, builder.scalar(-1, index), one))


def stft(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of STFT: each windowed frame is transformed back, and added at its position.

    Shapes: signal [batch, length, parts], dy [batch, frames, frequencies, 2], frames [batch, frames, frame length, parts].
    """
    builder, signal, window = op.builder, op.required(0), op.optional(2)
    index, given = ir.DataType.INT64, op.optional(3)
    length = _scalar((extent(signal, 1) if window is None else extent(window, 0)) if given is None else given)
    dframes = _transform(dy, length, -2, inverse=1) * builder.cast(length, dy.dtype)
    dframes = _parts_of(dframes, signal)
    zero, one = builder.scalar(0, index), builder.scalar(1, index)
    starts = builder.op("Range", zero, _number(dy, 1), one) * _scalar(op.required(1))
    places = builder.op("Unsqueeze", starts, builder.integers([1])) + builder.op("Range", zero, length, one)
    dsignal, dwindow = None, None
    if op.wants(0):
        column = None if window is None else builder.op("Unsqueeze", window, builder.integers([1]))
        dsignal = GATHER_GRAD(dframes if column is None else dframes * column, places, signal, axis=1)
    if window is not None and op.wants(2):
        frames = builder.op("Gather", signal, places, axis=1)
        dwindow = builder.op("ReduceSum", dframes * frames, builder.integers([0, 1, 3]), keepdims=0, like=window)
    return (dsignal, None, dwindow, None)[: len(op.inputs)]


def _transform(x: Tensor, length: Tensor | None, axis: int | Tensor, **attributes: Any) -> Tensor:
    if x.builder.opset < OPSET_OF_AXIS_INPUT:
        return x.builder.op("DFT", x, length, axis=axis, **attributes)
    given = x.builder.scalar(axis, ir.DataType.INT64) if isinstance(axis, int) else axis
    return x.builder.op("DFT", x, length, given, **attributes)


def _axis(op: Operation) -> int | Tensor:
    if op.builder.opset < OPSET_OF_AXIS_INPUT:
        return int(op.attribute("axis", 1))
    given = op.optional(2)
    if given is None:
        return -2
    return _scalar(given) if given.array is None else int(given.array.reshape(()))


def _extent(tensor: Tensor, axis: int | Tensor) -> Tensor:
    if isinstance(axis, int):
        return extent(tensor, axis)
    return tensor.builder.op("Gather", tensor.builder.op("Shape", tensor), _axes(tensor, axis))


def _axes(tensor: Tensor, axis: int | Tensor) -> Tensor:
    builder = tensor.builder
    return builder.integers([axis]) if isinstance(axis, int) else builder.op("Reshape", axis, builder.integers([1]))


def _scalar(number: Tensor) -> Tensor:
    """Return a number as an int64 scalar; runtimes also accept a vector of one."""
    builder = number.builder
    if number.array is not None and number.array.size == 1:
        return builder.constant(number.array.reshape(()).astype(np.int64))
    number = builder.cast(number, ir.DataType.INT64)
    return number if number.rank == 0 else builder.op("Reshape", number, builder.integers([]))


def _number(tensor: Tensor, axis: int | Tensor) -> Tensor:
    return _scalar(_extent(tensor, axis))


def _parts_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a complex tensor, or its real part if ``like`` is real; the shape is that of ``like`` or of its frames."""
    if like.rank is not None and like.dimension(-1) == 2:
        return tensor
    builder = tensor.builder
    return builder.op("Slice", tensor, builder.integers([0]), extent(like, -1), builder.integers([-1]))


def _fitted(tensor: Tensor, like: Tensor, axis: int | Tensor) -> Tensor:
    """Return the tensor, cut or padded with zeros to the extent of ``like`` along ``axis``."""
    builder = tensor.builder
    axes, zero = _axes(tensor, axis), builder.integers([0])
    size, wanted = _extent(tensor, axis), _extent(like, axis)
    missing = builder.op("Max", wanted - size, zero)
    filled = builder.op("Pad", tensor, builder.op("Concat", zero, missing, axis=0), None, axes)
    return builder.op("Slice", filled, zero, wanted, axes)


OPERATORS = [
    Operator("DFT", gradient=dft, axes=axis_rules.resized, reopen=reopen_rules.fourier_transform),
    Operator("STFT", gradient=stft, axes=axis_rules.of_another_rank, reopen=reopen_rules.images),
]

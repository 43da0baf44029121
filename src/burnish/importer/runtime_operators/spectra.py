"""Fourier transforms of real signals, which ONNX Runtime has on graphics processors alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, rewrites
from burnish.operators import Operation
from burnish.operators.positions import known_rank
from burnish.operators.spectrum import OPSET_OF_AXIS_INPUT


def _transform(x: Tensor, axis: int, **attributes: Any) -> Tensor:
    if x.builder.opset < OPSET_OF_AXIS_INPUT:
        return x.builder.op("DFT", x, axis=axis, **attributes)
    return x.builder.op("DFT", x, None, x.builder.scalar(axis, ir.DataType.INT64), **attributes)


def _is_known(op: Operation) -> bool:
    """Whether a node is of the one form that its operator defines: half of the spectrum, and no scale but 1/N of the inverse."""
    return bool(op.attribute("onesided", 1)) and not op.attribute("normalized", 0)


@rewrites("Rfft")
def transform_of_reals(op: Operation) -> Results:
    """Over the last ``signal_ndim`` axes: ``[..., n]`` to ``[..., n // 2 + 1, 2]``, real and imaginary parts last."""
    if not _is_known(op):
        return None
    builder, x = op.builder, op.input
    last = known_rank(op, x) - 1
    half = _transform(builder.op("Unsqueeze", x, builder.integers([-1])), last, onesided=1)
    for axis in range(last - op.attribute("signal_ndim", 1) + 1, last):
        half = _transform(half, axis)
    return half


@rewrites("Irfft")
def inverse_transform_to_reals(op: Operation) -> Results:
    """``[..., m, 2]`` to ``[..., 2 (m - 1)]``, or to ``2 m - 1`` numbers where the file declares as many.

    Of the two lengths that have m frequencies, exporters mean the even one, as NumPy and PyTorch do.
    """
    if not _is_known(op):
        return None
    builder, half = op.builder, op.input
    last = known_rank(op, half) - 2
    for axis in range(last - op.attribute("signal_ndim", 1) + 1, last):
        half = _transform(half, axis, inverse=1)
    # The frequencies above the half are the conjugates of those below it, in the order from the highest.
    highest = -1 if _is_odd(op, half.dimension(last)) else -2
    above = builder.op("Slice", half, *(builder.integers([each]) for each in (highest, 0, last, -1)))
    conjugate = above * builder.cast(builder.constant(np.array([1.0, -1.0])), half.dtype)
    whole = _transform(builder.op("Concat", half, conjugate, axis=last), last, inverse=1)
    return builder.op("Gather", whole, builder.scalar(0, ir.DataType.INT64), axis=last + 1)


def _is_odd(op: Operation, frequencies: int | None) -> bool:
    declared = op.node.outputs[0].shape
    return declared is not None and frequencies is not None and declared.dims[-1] == 2 * frequencies - 1

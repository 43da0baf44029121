"""Local response normalization: across neighboring channels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.positions import extent, joined, reshape_as
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like


def local_response_normalization(op: Operation, dy: Tensor) -> Tensor:
    """The gradient as one LrnGrad node, which reads x and y."""
    attributes = {name: op.attribute(name) for name in ("size", "alpha", "beta", "bias")}
    return LRN_GRAD(dy, op.input, op.output, **attributes)


def lower_local_response_gradient(op: Operation) -> Tensor:
    """The gradient with S = bias + alpha / size * (sum of x^2 over the window of a channel) and y = x S^-beta.

    dx = dy S^-beta - 2 alpha beta / size * x * (sum of dy y / S over the channels with this one in their window)
    (Krizhevsky et al. 2012, 3.3). A window of even size reaches one channel further forward than back; the second sum has the
    mirrored window.
    """
    dy, x, y = op.required(0), op.required(1), op.required(2)
    size = int(op.attribute("size"))
    alpha, beta, bias = op.attribute("alpha", 1e-4), op.attribute("beta", 0.75), op.attribute("bias", 1.0)
    before = (size - 1) // 2
    after = size - 1 - before
    scale = _channel_sum(x * x, before, after) * (alpha / size) + bias
    through_scale = x * _channel_sum(dy * y / scale, after, before)
    power = op.builder.op("Exp", op.builder.op("Log", scale) * -beta)
    return dy * power - through_scale * (2 * alpha * beta / size)


def _channel_sum(x: Tensor, before: int, after: int) -> Tensor:
    """Sum x [N, C, ...] over each channel and its neighbors: ``before`` channels below, ``after`` above.

    Multiplies with a band matrix of ones: an AveragePool across channels takes ONNX Runtime four times as long.
    """
    builder = x.builder
    rows = builder.op("Reshape", x, joined(builder, [builder.integers([0]), extent(x, 1), builder.integers([-1])]))
    return reshape_as(builder.op("MatMul", _band(x, before, after), rows), x)


def _band(x: Tensor, before: int, after: int) -> Tensor:
    """Return the matrix [C, C] with ones for each column whose channel is in the window of the row's channel."""
    builder = x.builder
    channels = x.dimension(1)
    if channels is not None:
        distance = np.arange(channels) - np.arange(channels)[:, None]
        return builder.constant(((distance >= -before) & (distance <= after)).astype(x.dtype.numpy()))
    zero, one = (builder.scalar(number, ir.DataType.INT64) for number in (0, 1))
    places = builder.op("Range", zero, builder.op("Squeeze", extent(x, 1)), one)
    distances = places - builder.op("Unsqueeze", places, builder.integers([1]))
    inside = builder.op("And", builder.op("GreaterOrEqual", distances, -before), builder.op("LessOrEqual", distances, after))
    return builder.cast(inside, x.dtype)


LRN_GRAD = SemanticOperator("LrnGrad", ("dy", "x", "y"), ("dx",), like("x"), lowering=lower_local_response_gradient)
"""The gradient of LRN, with the attributes and defaults of LRN."""

OPERATORS = [
    Operator(
        "LRN",
        gradient=local_response_normalization,
        axes=axis_rules.like_first,
        precision=Precision.WIDENED,
        reopen=reopen_rules.images,
    ),
    LRN_GRAD,
]

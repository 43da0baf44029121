"""Pooling over windows of the spatial axes, in one to three dimensions.

Two semantic gradient operators in the domain ``burnish`` carry the window in explicit ``kernel_shape``, ``strides``,
``dilations`` and ``pads``:

- ``MaxPoolGrad(dy, indices, x) -> dx``: indices as the standard's MaxPool returns them, flat over the whole of x.
- ``AveragePoolGrad(dy, x) -> dx``: of x only the shape is read.

A maximum that occurs several times in a window counts once, at its first place, as in ONNX Runtime and PyTorch.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor, zeros_like
from burnish.graph.uses import is_used, producer_of
from burnish.operators.pooling_windows import are_apart, counts, spread, to_first_maxima
from burnish.operators.positions import add_at_positions, count_like, flat_positions, reshape_as
from burnish.operators.registry import Operation, gradient
from burnish.operators.semantic import SemanticOperator, like
from burnish.operators.windows import Windows

MAX_POOL_GRAD = SemanticOperator("MaxPoolGrad", ("dy", "indices", "x"), ("dx",), like("x"))
AVERAGE_POOL_GRAD = SemanticOperator("AveragePoolGrad", ("dy", "x"), ("dx",), like("x"))


@gradient("MaxPool")
def max_pool(op: Operation, dy: Tensor | None, *_: Tensor | None) -> Tensor | None:
    if dy is None:
        return None
    x = op.input
    windows = Windows.of(op)
    if op.attribute("storage_order", 0) != 0 and len(op.outputs) > 1 and is_used(op.node.outputs[1]):
        # The Indices of the model count columns first; the gradient needs those that count rows first.
        names = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
        indices = op.builder.op("MaxPool", x, outputs=2, **{name: op.attribute(name) for name in names})[1]
    else:
        op.node.attributes.pop("storage_order", None)
        indices = op.second_output(ir.DataType.INT64, op.output)
    return MAX_POOL_GRAD(dy, indices, x, **windows.attributes())


@MAX_POOL_GRAD.lowering
def lower_max_pool_grad(op: Operation) -> Tensor:
    """Each element of dy is added where its maximum was: by index, or by comparing where windows do not overlap.

    With the maxima, which then need no indices, comparing takes 2.6 ms and scattering 6.1 ms (1x64x112x112, 2x2 windows, ONNX
    Runtime on one thread). Windows that overlap gain nothing: 8.5 ms in place of 7.7 ms (3x3, stride 2).
    """
    dy, indices, x = op.required(0), op.required(1), op.required(2)
    windows, pool = Windows.of(op), producer_of(indices.value, "MaxPool")
    if pool is not None and pool.inputs[0] is x.value and are_apart(dy, x, windows):
        return to_first_maxima(dy, x, op.builder.tensor(pool.outputs[0]), windows)
    return add_at_positions(dy, indices, x)


@gradient("AveragePool")
def average_pool(op: Operation, dy: Tensor) -> Tensor:
    windows = Windows.of(op)
    return AVERAGE_POOL_GRAD(
        dy,
        op.input,
        count_include_pad=op.attribute("count_include_pad", 0),
        ceil_mode=op.attribute("ceil_mode", 0),
        **windows.attributes(),
    )


@AVERAGE_POOL_GRAD.lowering
def lower_average_pool_grad(op: Operation) -> Tensor:
    """dy divided by what each average divided by, spread over its window."""
    dy, x = op.required(0), op.required(1)
    windows = Windows.of(op)
    included, rounded_up = bool(op.attribute("count_include_pad", 0)), bool(op.attribute("ceil_mode", 0))
    return spread(dy / counts(dy, x, windows, included, rounded_up), x, windows)


@gradient("LpPool", since=2)
def lp_pool(op: Operation, dy: Tensor) -> Tensor:
    """y = (sum |x|^p)^(1/p): dx = sign(x) |x|^(p-1) sum over the windows of dy y^(1-p); zero where y is zero."""
    x, power = op.input, int(op.attribute("p", 2))
    return _power_slope(x, power) * spread(_norm_slope(dy, op.output, power), x, Windows.of(op))


@gradient("GlobalLpPool", since=2)
def global_lp_pool(op: Operation, dy: Tensor) -> Tensor:
    x, power = op.input, int(op.attribute("p", 2))
    return _power_slope(x, power) * _norm_slope(dy, op.output, power)


@gradient("GlobalAveragePool")
def global_average_pool(op: Operation, dy: Tensor) -> Tensor:
    x, builder = op.input, op.builder
    return builder.op("Expand", dy / count_like(x, 2), builder.op("Shape", x), like=x)


@gradient("GlobalMaxPool")
def global_max_pool(op: Operation, dy: Tensor) -> Tensor:
    """dy goes to the first maximum of each channel."""
    x, builder = op.input, op.builder
    channels = builder.integers([0, 0, -1])
    rows = builder.op("Reshape", x, channels)
    places = builder.op("ArgMax", rows, axis=2, keepdims=1)
    return reshape_as(builder.op("ScatterElements", zeros_like(rows), places, builder.op("Reshape", dy, channels), axis=2), x)


@gradient("MaxUnpool")
def max_unpool(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """Each element receives dy from where it went; of several that went to one place, as those of overlapping windows do, only
    the last is in the output."""
    x, indices, builder = op.required(0), op.required(1), op.builder
    flat, positions = builder.integers([-1]), flat_positions(x)
    size = builder.op("Reshape", builder.op("Size", dy), flat)
    nobody = builder.op("ConstantOfShape", size, value=ir.tensor(np.full(1, -1, np.int64)), dtype=ir.DataType.INT64)
    places = builder.op("Reshape", indices, flat)
    writers = builder.op("ScatterElements", nobody, places, builder.op("Reshape", positions, flat), axis=0, reduction="max")
    is_last = builder.op("Equal", builder.op("Gather", writers, indices, axis=0), positions)
    received = builder.op("Gather", builder.op("Reshape", dy, flat), indices, axis=0)
    return (builder.op("Where", is_last, received, builder.scalar(0, dy), like=x),)


def _power_slope(x: Tensor, power: int) -> Tensor:
    """The derivative of |x|^p / p."""
    if power == 2:
        return x
    sign = x.builder.op("Sign", x)
    return sign if power == 1 else sign * x.builder.op("Abs", x) ** float(power - 1)


def _norm_slope(dy: Tensor, y: Tensor, power: int) -> Tensor:
    """dy y^(1-p), and zero where y is zero: the subgradient of smallest norm."""
    if power == 1:
        return dy
    builder = y.builder
    is_zero = builder.op("Equal", y, 0)
    divisor = builder.op("Where", is_zero, builder.scalar(1, y), y if power == 2 else y ** float(power - 1))
    return builder.op("Where", is_zero, builder.scalar(0, y), dy / divisor)

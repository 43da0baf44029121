"""Convolutions: Conv and ConvTranspose in one to three dimensions.

Their gradients are two semantic operators in the domain ``burnish``, with explicit ``kernel_shape``, ``strides``,
``dilations``, ``pads`` and ``group`` of their convolution ``y = Conv(x, w)``:

- ``ConvInputGrad(dy, w, x) -> dx``: the transpose of the convolution as a map of ``x``; only the shape of ``x`` is read.
- ``ConvWeightGrad(dy, x, w) -> dw``: the transpose of the convolution as a map of ``w``; only the shape of ``w`` is read.

A transposed convolution ``y = ConvTranspose(x, w)`` is the input gradient of ``x' = Conv(y', w)``, so its gradients are that
convolution and its weight gradient. Both semantic operators are bilinear, and can themselves be differentiated.

Each gradient has several forms in standard operators (``convolution_input_forms``, ``convolution_weight_forms``);
``convolution_forms`` chooses the cheapest.
"""

from __future__ import annotations

from typing import Any

from burnish.errors import GradientError
from burnish.graph import Tensor, split_padding
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.convolution_forms import Convolution, Form, choose
from burnish.operators.convolution_input_forms import INPUT_FORMS
from burnish.operators.convolution_weight_forms import (
    DEPTHWISE_WEIGHT_FORMS,
    POINTWISE_WEIGHT_FORMS,
    WEIGHT_FORMS,
    exchanged_weight_gradient,
)
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like
from burnish.operators.windows import Windows


def _attributes(op: Operation, windows: Windows) -> dict[str, Any]:
    return {**windows.attributes(), "group": op.attribute("group", 1)}


def _transposed_windows(op: Operation) -> tuple[Windows, tuple[int, ...]]:
    """Read a ``ConvTranspose`` node as the convolution that it transposes.

    Returns:
        Its windows, and per spatial axis the number of trailing entries of the output beyond the last window and the end pads.

    Raises:
        GradientError: the kernel's size is unknown, or ``output_shape`` is given for an input of symbolic size.
    """
    windows = Windows.declared(op)
    rank, strides, begin, end = windows.rank, windows.strides, windows.pads_begin, windows.pads_end
    auto_pad, output_shape = op.attribute("auto_pad", "NOTSET"), op.attribute("output_shape")
    extra = op.attribute("output_padding", (0,) * rank)
    if output_shape is None and auto_pad == "VALID":
        begin = end = (0,) * rank
    elif output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [_padding_in_total(op, windows, axis, extra[axis]) for axis in range(rank)]
        extra = tuple(more + max(-total, 0) for more, total in zip(extra, totals, strict=True))
        begin, end = split_padding([max(total, 0) for total in totals], more_at_end=auto_pad == "SAME_UPPER")
    surplus = [max(more - stride + 1, 0) for more, stride in zip(extra, strides, strict=True)]
    cropped = tuple(max(more - pad, 0) for more, pad in zip(surplus, end, strict=True))
    return windows.padded(begin, tuple(max(pad - more, 0) for more, pad in zip(surplus, end, strict=True))), cropped


def _padding_in_total(op: Operation, windows: Windows, axis: int, extra: int) -> int:
    """Return the excess length of a transposed convolution's output along an axis, for ``output_shape`` or ``auto_pad``."""
    output_shape, stride, span = op.attribute("output_shape"), windows.strides[axis], windows.span(axis) + extra
    if output_shape is None:
        return span - stride
    size = op.required(0).dimension(axis + 2)
    if size is None:
        raise GradientError(
            f"{op} has output_shape={list(output_shape)} and an input of symbolic size along spatial axis {axis}, so its padding "
            "changes with the input: fix the spatial size of the model's input, or export the model with explicit pads and "
            "output_padding"
        )
    return int((size - 1) * stride + span - output_shape[axis - windows.rank])


def convolution(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = op.required(0), op.required(1)
    db = _bias_gradient(op, dy)
    if not (op.wants(0) or op.wants(1)):
        return None, None, db
    attributes = _attributes(op, Windows.of(op))
    dx = CONV_INPUT_GRAD(dy, w, x, **attributes) if op.wants(0) else None
    dw = CONV_WEIGHT_GRAD(dy, x, w, **attributes) if op.wants(1) else None
    return dx, dw, db


def transposed_convolution(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, builder = op.required(0), op.required(1), op.builder
    db = _bias_gradient(op, dy)
    if not (op.wants(0) or op.wants(1)):
        return None, None, db
    windows, cropped = _transposed_windows(op)
    attributes = _attributes(op, windows)
    axes = [axis for axis, count in enumerate(cropped) if count]
    if axes:
        ends = builder.integers([-cropped[axis] for axis in axes])
        dy = builder.op("Slice", dy, builder.integers([0] * len(axes)), ends, builder.integers([axis + 2 for axis in axes]))
    dx = builder.op("Conv", dy, w, like=x, **attributes) if op.wants(0) else None
    dw = CONV_WEIGHT_GRAD(x, dy, w, **attributes) if op.wants(1) else None
    return dx, dw, db


def convolution_input_gradient(op: Operation, g: Tensor) -> tuple[Tensor | None, ...]:
    dy, w = op.required(0), op.required(1)
    attributes = _attributes(op, Windows.declared(op))
    d_dy = op.builder.op("Conv", g, w, like=dy, **attributes) if op.wants(0) else None
    return d_dy, CONV_WEIGHT_GRAD(dy, g, w, **attributes) if op.wants(1) else None, None


def convolution_weight_gradient(op: Operation, g: Tensor) -> tuple[Tensor | None, ...]:
    dy, x = op.required(0), op.required(1)
    attributes = _attributes(op, Windows.declared(op))
    d_dy = op.builder.op("Conv", x, g, like=dy, **attributes) if op.wants(0) else None
    return d_dy, CONV_INPUT_GRAD(dy, g, x, **attributes) if op.wants(1) else None, None


def _bias_gradient(op: Operation, dy: Tensor) -> Tensor | None:
    bias = op.optional(2)
    if bias is None or not op.wants(2):
        return None
    spatial = Windows.declared(op).rank
    return op.builder.op("ReduceSum", dy, op.builder.integers([0, *range(2, spatial + 2)]), keepdims=0, like=bias)


def lower_input_gradient(op: Operation) -> Tensor:
    dy, w, x = op.required(0), op.required(1), op.required(2)
    convolution = Convolution(op, dy, x, w)
    return choose(INPUT_FORMS, convolution).build(op.builder, convolution, dy, w, x)


def lower_weight_gradient(op: Operation) -> Tensor:
    dy, x, w = op.required(0), op.required(1), op.required(2)
    convolution = Convolution(op, dy, x, w)
    if not convolution.has_static_channels:
        return exchanged_weight_gradient(op.builder, dy, x, convolution)
    return choose(weight_forms(convolution), convolution).build(op.builder, convolution, dy, x, w)


def weight_forms(convolution: Convolution) -> tuple[Form, ...]:
    if convolution.is_pointwise:
        return POINTWISE_WEIGHT_FORMS
    return (*WEIGHT_FORMS, *(DEPTHWISE_WEIGHT_FORMS if convolution.is_depthwise else ()))


CONV_INPUT_GRAD = SemanticOperator(
    "ConvInputGrad", ("dy", "w", "x"), ("dx",), like("x"), gradient=convolution_input_gradient, lowering=lower_input_gradient
)
CONV_WEIGHT_GRAD = SemanticOperator(
    "ConvWeightGrad", ("dy", "x", "w"), ("dw",), like("w"), gradient=convolution_weight_gradient, lowering=lower_weight_gradient
)

OPERATORS = [
    Operator("Conv", gradient=convolution, axes=axis_rules.image, precision=Precision.NARROW, reopen=reopen_rules.images),
    Operator(
        "ConvTranspose",
        gradient=transposed_convolution,
        axes=axis_rules.image,
        precision=Precision.NARROW,
        reopen=reopen_rules.images,
    ),
    CONV_INPUT_GRAD,
    CONV_WEIGHT_GRAD,
    Operator("ConvInteger", axes=axis_rules.image),
    Operator("QLinearConv", axes=axis_rules.image),
]

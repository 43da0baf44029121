"""Convolutions: Conv and ConvTranspose in one to three dimensions.

Their gradients are two semantic operators in the domain ``burnish``, which carry explicit ``kernel_shape``, ``strides``,
``dilations``, ``pads`` and ``group`` of the convolution ``y = Conv(x, w)`` they belong to:

- ``ConvInputGrad(dy, w, x) -> dx``: the transpose of the convolution as a map of ``x``; of ``x`` only the shape is read.
- ``ConvWeightGrad(dy, x, w) -> dw``: the transpose of the convolution as a map of ``w``; of ``w`` only the shape is read.

A transposed convolution ``y = ConvTranspose(x, w)`` is the input gradient of ``x' = Conv(y', w)``, so its gradients are that
convolution and its weight gradient. Both semantic operators are bilinear, and differentiable in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Tensor, same_padding, split_padding
from burnish.ops.convolution_lowering import lower_input_gradient, lower_weight_gradient
from burnish.ops.registry import Operation, gradient
from burnish.ops.semantic import SemanticOperator, like

CONV_INPUT_GRAD = SemanticOperator("ConvInputGrad", ("dy", "w", "x"), ("dx",), like("x"))
CONV_WEIGHT_GRAD = SemanticOperator("ConvWeightGrad", ("dy", "x", "w"), ("dw",), like("w"))


@dataclass(frozen=True)
class ConvolutionAttributes:
    """A convolution with nothing left to a default; one entry per spatial axis."""

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads_begin: tuple[int, ...]
    pads_end: tuple[int, ...]
    group: int

    @staticmethod
    def of_convolution(op: Operation) -> ConvolutionAttributes:
        """Read a ``Conv`` node; ``auto_pad`` becomes explicit pads.

        Raises:
            UnsupportedOperatorError: the kernel's size is unknown, or ``auto_pad`` needs a spatial size that is.
        """
        kernel, strides, dilations, pads, group = _declared(op)
        auto_pad = op.attribute("auto_pad", "NOTSET")
        rank = len(kernel)
        begin, end = pads[:rank], pads[rank:]
        if auto_pad == "VALID":
            begin = end = (0,) * rank
        elif auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            totals = []
            for axis in range(rank):
                span = (kernel[axis] - 1) * dilations[axis] + 1
                total = same_padding(op.required(0).dimension(axis + 2), span, strides[axis])
                if total is None:
                    raise UnsupportedOperatorError(
                        f"{op} has auto_pad={auto_pad} and stride {strides[axis]} along spatial axis {axis}, whose size is "
                        "symbolic, so its padding changes with the input: fix the spatial size of the model's input, or export "
                        "the model with explicit pads"
                    )
                totals.append(total)
            begin, end = split_padding(totals, more_at_end=auto_pad == "SAME_UPPER")
        return ConvolutionAttributes(kernel, strides, dilations, begin, end, group)

    @staticmethod
    def of_transposed_convolution(op: Operation) -> tuple[ConvolutionAttributes, tuple[int, ...]]:
        """Read a ``ConvTranspose`` node as the convolution it transposes.

        Returns:
            The convolution, and per spatial axis how many trailing entries of the output lie beyond its last window and end pads.

        Raises:
            UnsupportedOperatorError: the kernel's size is unknown, or ``output_shape`` is given for an input of symbolic size.
        """
        kernel, strides, dilations, pads, group = _declared(op)
        rank = len(kernel)
        begin, end = pads[:rank], pads[rank:]
        auto_pad = op.attribute("auto_pad", "NOTSET")
        extra = tuple(op.attribute("output_padding", (0,) * rank))
        output_shape = op.attribute("output_shape")
        if output_shape is None and auto_pad == "VALID":
            begin = end = (0,) * rank
        elif output_shape is not None or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            totals = []
            for axis in range(rank):
                natural = (kernel[axis] - 1) * dilations[axis] + 1 + extra[axis]
                if output_shape is None:
                    totals.append(natural - strides[axis])
                    continue
                size = op.required(0).dimension(axis + 2)
                if size is None:
                    raise UnsupportedOperatorError(
                        f"{op} has output_shape={list(output_shape)} and an input of symbolic size along spatial axis {axis}, so "
                        "its padding changes with the input: fix the spatial size of the model's input, or export the model "
                        "with explicit pads and output_padding"
                    )
                totals.append((size - 1) * strides[axis] + natural - output_shape[axis - rank])
            extra = tuple(more + max(-total, 0) for more, total in zip(extra, totals, strict=True))
            begin, end = split_padding([max(total, 0) for total in totals], more_at_end=auto_pad == "SAME_UPPER")
        surplus = [max(more - stride + 1, 0) for more, stride in zip(extra, strides, strict=True)]
        cropped = tuple(max(more - pad, 0) for more, pad in zip(surplus, end, strict=True))
        end = tuple(max(pad - more, 0) for more, pad in zip(surplus, end, strict=True))
        return ConvolutionAttributes(kernel, strides, dilations, begin, end, group), cropped

    def as_attributes(self) -> dict[str, Any]:
        """The attributes of a Conv node or of a semantic gradient operator."""
        return {
            "kernel_shape": list(self.kernel_shape),
            "strides": list(self.strides),
            "dilations": list(self.dilations),
            "pads": [*self.pads_begin, *self.pads_end],
            "group": self.group,
        }


def _declared(op: Operation) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    weight = op.required(1)
    kernel = op.attribute("kernel_shape")
    if kernel is None:
        sizes = [weight.dimension(axis) for axis in range(2, weight.rank or 0)]
        known = tuple(size for size in sizes if size is not None)
        if not sizes or len(known) != len(sizes):
            raise UnsupportedOperatorError(
                f"{op} has no kernel_shape and its weight '{weight.name}' has no known shape: declare the shape of the weight"
            )
        kernel = known
    rank = len(kernel)
    ones = (1,) * rank
    return (
        tuple(kernel),
        tuple(op.attribute("strides", ones)),
        tuple(op.attribute("dilations", ones)),
        tuple(op.attribute("pads", (0,) * (2 * rank))),
        op.attribute("group", 1),
    )


@gradient("Conv")
def convolution(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = op.required(0), op.required(1)
    if not (op.wants(0) or op.wants(1)):
        return None, None, _bias_gradient(op, dy)
    attributes = ConvolutionAttributes.of_convolution(op)
    dx = _input_gradient(dy, w, x, attributes) if op.wants(0) else None
    dw = _weight_gradient(dy, x, w, attributes) if op.wants(1) else None
    return dx, dw, _bias_gradient(op, dy)


@gradient("ConvTranspose")
def transposed_convolution(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = op.required(0), op.required(1)
    if not (op.wants(0) or op.wants(1)):
        return None, None, _bias_gradient(op, dy)
    attributes, cropped = ConvolutionAttributes.of_transposed_convolution(op)
    db = _bias_gradient(op, dy)
    if any(cropped):
        b = op.builder
        axes = [axis for axis, count in enumerate(cropped) if count]
        starts, ends = b.integers([0] * len(axes)), b.integers([-cropped[axis] for axis in axes])
        dy = b.op("Slice", dy, starts, ends, b.integers([axis + 2 for axis in axes]))
    dx = op.builder.op("Conv", dy, w, like=x, **attributes.as_attributes()) if op.wants(0) else None
    dw = _weight_gradient(x, dy, w, attributes) if op.wants(1) else None
    return dx, dw, db


@CONV_INPUT_GRAD.gradient
def convolution_input_gradient(op: Operation, g: Tensor) -> tuple[Tensor | None, ...]:
    dy, w = op.required(0), op.required(1)
    attributes = _carried(op)
    d_dy = op.builder.op("Conv", g, w, like=dy, **attributes.as_attributes()) if op.wants(0) else None
    return d_dy, _weight_gradient(dy, g, w, attributes) if op.wants(1) else None, None


@CONV_WEIGHT_GRAD.gradient
def convolution_weight_gradient(op: Operation, g: Tensor) -> tuple[Tensor | None, ...]:
    dy, x = op.required(0), op.required(1)
    attributes = _carried(op)
    d_dy = op.builder.op("Conv", x, g, like=dy, **attributes.as_attributes()) if op.wants(0) else None
    return d_dy, _input_gradient(dy, g, x, attributes) if op.wants(1) else None, None


@CONV_INPUT_GRAD.lowering
def lower_convolution_input_gradient(op: Operation) -> Tensor:
    return lower_input_gradient(op)


@CONV_WEIGHT_GRAD.lowering
def lower_convolution_weight_gradient(op: Operation) -> Tensor:
    return lower_weight_gradient(op)


def _carried(op: Operation) -> ConvolutionAttributes:
    kernel, strides, dilations, pads, group = _declared(op)
    return ConvolutionAttributes(kernel, strides, dilations, pads[: len(kernel)], pads[len(kernel) :], group)


def _input_gradient(dy: Tensor, w: Tensor, x: Tensor, attributes: ConvolutionAttributes) -> Tensor:
    return CONV_INPUT_GRAD(dy, w, x, **attributes.as_attributes())


def _weight_gradient(dy: Tensor, x: Tensor, w: Tensor, attributes: ConvolutionAttributes) -> Tensor:
    return CONV_WEIGHT_GRAD(dy, x, w, **attributes.as_attributes())


def _bias_gradient(op: Operation, dy: Tensor) -> Tensor | None:
    bias = op.optional(2)
    if bias is None or not op.wants(2):
        return None
    spatial = len(_declared(op)[0])
    return op.builder.op("ReduceSum", dy, op.builder.integers([0, *range(2, spatial + 2)]), keepdims=0, like=bias)

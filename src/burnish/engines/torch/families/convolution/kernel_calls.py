"""Convolutions by the engine's own kernels: depthwise, by Winograd's minimal filtering, and as pointwise."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.kernels.engine_operator import EngineOperator
from burnish.engines.torch.families.convolution import pointwise
from burnish.engines.torch.native import kernels
from burnish.engines.torch.translate.rules import Call, translates

DEPTHWISE_CONV = EngineOperator("DepthwiseConv", ("x", "w", "b"), ("y",))
DEPTHWISE_CONV_GRAD = EngineOperator("DepthwiseConvGrad", ("dy", "x", "w"), ("dx", "dw"))
WINOGRAD_CONV = EngineOperator("WinogradConv", ("x", "w", "b"), ("y",))
WINOGRAD_CONV_INPUT_GRAD = EngineOperator("WinogradConvInputGrad", ("dy", "w"), ("dx",))
WINOGRAD_CONV_WEIGHT_GRAD = EngineOperator("WinogradConvWeightGrad", ("dy", "x"), ("dw",))
POINTWISE_CONV = EngineOperator("PointwiseConv", ("x", "w", "b"), ("y",))
POINTWISE_CONV_INPUT_GRAD = EngineOperator("PointwiseConvInputGrad", ("dy", "w", "x"), ("dx",))
POINTWISE_CONV_GRAD = EngineOperator("PointwiseConvGrad", ("dy", "x", "w"), ("dx", "dw"))
CONV_WEIGHT_GRAD_PRODUCTS = EngineOperator("ConvWeightGradProducts", ("dy", "x"), ("dw",))


def _window_suffix(op: Call, weight: int) -> str:
    """What the kernels for windows of 5x5 have behind their names; those for 3x3 have nothing."""
    return "_5x5" if op.known_extents(weight)[2] == 5 else ""


@translates(DEPTHWISE_CONV)
def depthwise_convolution(op: Call) -> Any:
    return kernels.for_elements("depthwise_convolution" + _window_suffix(op, 1), op.dtype(0))(
        op.tensor(0), op.tensor(1), op.optional(2), op.attribute("stride"), list(op.attribute("pads"))
    )


@translates(DEPTHWISE_CONV_GRAD)
def depthwise_convolution_gradient(op: Call) -> Any:
    wanted = [bool(op.attribute(name)) for name in ("input", "weight")]
    results = kernels.for_elements("depthwise_convolution_gradient" + _window_suffix(op, 2), op.dtype(0))(
        op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("stride"), list(op.attribute("pads")), *wanted
    )
    return results[0], results[1]


@translates(WINOGRAD_CONV)
def winograd_convolution(op: Call) -> Any:
    return torch.ops.burnish.winograd_convolution.default(op.tensor(0), op.tensor(1), op.optional(2), op.attribute("padding"))


@translates(WINOGRAD_CONV_INPUT_GRAD)
def winograd_input_gradient(op: Call) -> Any:
    """(dy, w) -> dx."""
    return torch.ops.burnish.winograd_input_gradient.default(op.tensor(0), op.tensor(1), op.attribute("padding"))


@translates(WINOGRAD_CONV_WEIGHT_GRAD)
def winograd_weight_gradient(op: Call) -> Any:
    """(dy, x) -> dw."""
    return torch.ops.burnish.winograd_weight_gradient.default(op.tensor(0), op.tensor(1), op.attribute("padding"))


@translates(POINTWISE_CONV)
def pointwise_convolution(op: Call) -> Any:
    pointwise.expect()
    return pointwise.convolution(op.tensor(0), op.tensor(1), op.optional(2), op.attribute("strides"))


@translates(POINTWISE_CONV_INPUT_GRAD)
def pointwise_input_gradient(op: Call) -> Any:
    """(dy, w, x) -> dx; of x the shape is read."""
    pointwise.expect()
    return pointwise.input_gradient(op.tensor(0), op.tensor(1), op.tensor(2), op.attribute("strides"))


@translates(POINTWISE_CONV_GRAD)
def pointwise_gradients(op: Call) -> Any:
    """(dy, x, w) -> dx, dw."""
    pointwise.expect_gradients()
    results = pointwise.gradients(*op.tensors())
    return results[0], results[1]


@translates(CONV_WEIGHT_GRAD_PRODUCTS)
def convolution_weight_gradient(op: Call) -> Any:
    """(dy, x) -> dw."""
    window = [op.attribute(name) for name in ("extents", "strides", "padding")]
    return torch.ops.burnish.convolution_weight_gradient.default(op.tensor(0), op.tensor(1), *window)

"""The lowerings of ``ConvInputGrad`` and ``ConvWeightGrad``."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.operators.convolution_gradients.depthwise_weight_forms import DEPTHWISE_WEIGHT_FORMS
from burnish.operators.convolution_gradients.form import Form, choose
from burnish.operators.convolution_gradients.geometry import Convolution
from burnish.operators.convolution_gradients.input_forms import INPUT_FORMS
from burnish.operators.convolution_gradients.weight_forms import POINTWISE_WEIGHT_FORMS, WEIGHT_FORMS, exchanged_weight_gradient
from burnish.operators.registry import Operation


def lower_input_gradient(op: Operation) -> Tensor:
    """``ConvInputGrad(dy, w, x)``."""
    dy, w, x = op.required(0), op.required(1), op.required(2)
    convolution = Convolution(op, dy, x, w)
    return choose(INPUT_FORMS, convolution).build(op.builder, convolution, dy, w, x)


def lower_weight_gradient(op: Operation) -> Tensor:
    """``ConvWeightGrad(dy, x, w)``."""
    dy, x, w = op.required(0), op.required(1), op.required(2)
    convolution = Convolution(op, dy, x, w)
    if not convolution.has_static_channels:
        return exchanged_weight_gradient(op.builder, dy, x, convolution)
    return choose(weight_forms(convolution), convolution).build(op.builder, convolution, dy, x, w)


def weight_forms(convolution: Convolution) -> tuple[Form, ...]:
    """The forms to choose from for a weight gradient, of a static number of channels."""
    if convolution.is_pointwise:
        return POINTWISE_WEIGHT_FORMS
    return (*WEIGHT_FORMS, *(DEPTHWISE_WEIGHT_FORMS if convolution.is_depthwise else ()))

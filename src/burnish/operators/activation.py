"""Activation functions, Clip, Softmax and LogSoftmax."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor, same_shape
from burnish.graph.annotations import INCLUSIVE, WHOLE, subgradient_of
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.registry import Elementwise, Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like

SELU_ALPHA = 1.67326319217681884765625
SELU_GAMMA = 1.05070102214813232421875


SINGULAR_AT_ZERO = frozenset({"Div", "Log", "Pow", "Reciprocal", "ReduceLogSum", "Sqrt"})


def _masked(condition: Tensor, dy: Tensor, y: Tensor | None = None) -> Tensor:
    """Return ``dy`` if ``condition`` is true, otherwise 0, elementwise.

    Given the output ``y``, it is a product, which costs ONNX Runtime's CPU kernels half of a Where. But 0·∞ is NaN, so it is a
    Where if a reader of ``y`` has an infinite slope at the values cut to zero (sqrt(relu(x))).
    """
    builder = dy.builder
    if y is None or any(reader.op_type in SINGULAR_AT_ZERO for reader in y.value.consumers()):
        return builder.op("Where", condition, dy, builder.scalar(0, dy))
    return dy * builder.cast(condition, dy.dtype)


def relu(op: Operation, dy: Tensor) -> Tensor:
    """The gradient of Relu from the output alone, so that the input need not be kept."""
    return RELU_GRAD(dy, op.output)


def lower_relu_grad(op: Operation) -> Tensor:
    """Inputs dY, Y; output dX = dY if Y > 0, otherwise 0."""
    dy, y = op.required(0), op.required(1)
    return _masked(op.builder.op("Greater", y, 0), dy, y)


def clip(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of Clip: zero outside the bounds and, like PyTorch's relu6 and hardtanh, exactly on them.

    So the output alone decides and the input need not be kept. If the gradient of a bound is needed, or a note asks for it, the
    rule is that of PyTorch's clamp: on the bound the cotangent goes to the input, beyond it to the bound; if the bounds cross, to
    the upper one.
    """
    if subgradient_of(op.node) == WHOLE:
        return dy, None, None
    builder, x, y, low, high = op.builder, op.input, op.output, op.optional(1), op.optional(2)
    if not (op.wants(1) or op.wants(2)) and (subgradient_of(op.node) != INCLUSIVE or (low is None and high is None)):
        if low is None and high is None:
            return (dy,)
        return (CLIP_GRAD(dy, y, low, high),)
    below = builder.op("Less", x, low) if low is not None and (op.wants(0) or op.wants(1)) else None
    above = builder.op("Greater", x, high) if high is not None and (op.wants(0) or op.wants(2)) else None
    if low is not None and high is not None:
        crossed = builder.op("Less", high, low)
        below = builder.op("And", below, builder.op("Not", crossed)) if below is not None else None
        above = builder.op("Or", above, crossed) if above is not None else None
    dx = None
    if op.wants(0):
        outside = builder.op("Or", below, above) if below is not None and above is not None else below or above
        dx = dy if outside is None else _masked(builder.op("Not", outside), dy)
    return (
        dx,
        _masked(below, dy) if below is not None and op.wants(1) else None,
        _masked(above, dy) if above is not None and op.wants(2) else None,
    )


def lower_clip_grad(op: Operation) -> Tensor:
    """Inputs dY, Y and the bounds, one of them optional; output dX = dY if Y is strictly between them, otherwise 0."""
    builder, dy, y, low, high = op.builder, op.required(0), op.required(1), op.optional(2), op.optional(3)
    inside = [builder.op("Greater", y, low)] if low is not None else []
    inside += [builder.op("Less", y, high)] if high is not None else []
    return _masked(inside[0] if len(inside) == 1 else builder.op("And", *inside), dy, y)


def leaky_relu(op: Operation, dy: Tensor) -> Tensor:
    """The output has the sign of the input while alpha >= 0; for alpha in [0, 1] the slope is max([y > 0], alpha)."""
    builder, alpha = op.builder, op.attribute("alpha", 0.01)
    positive = builder.op("Greater", op.output if alpha >= 0 else op.input, 0)
    if 0 <= alpha <= 1:
        slope = builder.cast(positive, dy.dtype)
        return dy * builder.op("Clip", slope, builder.scalar(alpha, dy))
    return builder.op("Where", positive, dy, dy * alpha)


def prelu(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    builder, x, slope = op.builder, op.required(0), op.required(1)
    positive = builder.op("Greater", x, 0)
    return (
        builder.op("Where", positive, dy, dy * slope) if op.wants(0) else None,
        builder.op("Where", positive, builder.scalar(0, dy), dy * x) if op.wants(1) else None,
    )


def elu(op: Operation, dy: Tensor) -> Tensor:
    builder, x, alpha = op.builder, op.input, op.attribute("alpha", 1.0)
    negative_side = dy * builder.op("Exp", builder.op("Min", x, 0))
    if alpha == 1:
        return negative_side
    return builder.op("Where", builder.op("Greater", x, 0), dy, negative_side * alpha)


def selu(op: Operation, dy: Tensor) -> Tensor:
    builder, x = op.builder, op.input
    alpha, gamma = op.attribute("alpha", SELU_ALPHA), op.attribute("gamma", SELU_GAMMA)
    negative_side = dy * (builder.op("Exp", builder.op("Min", x, 0)) * (alpha * gamma))
    return builder.op("Where", builder.op("Greater", x, 0), dy * gamma, negative_side)


def celu(op: Operation, dy: Tensor) -> Tensor:
    """y = max(0, x) + min(0, α(exp(x/α) - 1)), of slope exp(min(x, 0)/α) for α > 0."""
    builder, alpha = op.builder, op.attribute("alpha", 1.0)
    bounded = builder.op("Min", op.input, 0)
    return dy * builder.op("Exp", bounded if alpha == 1 else bounded * (1 / alpha))


def softplus(op: Operation, dy: Tensor) -> Tensor:
    return dy * op.builder.op("Sigmoid", op.input)


def softsign(op: Operation, dy: Tensor) -> Tensor:
    scale = op.builder.op("Abs", op.input) + 1
    return dy / (scale * scale)


def sigmoid(op: Operation, dy: Tensor) -> Tensor:
    y = op.output
    return dy * (y * (1 - y))


def hard_sigmoid(op: Operation, dy: Tensor) -> Tensor:
    builder, y = op.builder, op.output
    inside = builder.op("And", builder.op("Greater", y, 0), builder.op("Less", y, 1))
    return _masked(inside, dy * op.attribute("alpha", 0.2), y)


def hard_swish(op: Operation, dy: Tensor) -> Tensor:
    """y = x·h with h = HardSigmoid(x; 1/6, 1/2); the slope is 2h - 1/2 for 0 < h < 1, otherwise h (0 or 1)."""
    builder, x = op.builder, op.input
    if x.dtype == ir.DataType.DOUBLE:  # an attribute stores a sixth with float32 digits
        h = builder.op("Clip", x / 6 + 0.5, builder.scalar(0, x), builder.scalar(1, x))
    else:
        h = builder.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    inside = builder.op("And", builder.op("Greater", h, 0), builder.op("Less", h, 1))
    return dy * builder.op("Where", inside, h * 2 - 0.5, h)


def thresholded_relu(op: Operation, dy: Tensor) -> Tensor:
    return _masked(op.builder.op("Greater", op.input, op.attribute("alpha", 1.0)), dy, op.output)


def shrink(op: Operation, dy: Tensor) -> Tensor:
    """The gradient of Shrink: outside ±lambd the input is shifted by a constant, inside the output is 0."""
    builder = op.builder
    return _masked(builder.op("Greater", builder.op("Abs", op.input), op.attribute("lambd", 0.5)), dy, op.output)


def gelu(op: Operation, dy: Tensor) -> Tensor:
    """The gradient of Gelu: d(x·Φ(x)) = Φ(x) + x·φ(x), with Φ the normal distribution function and φ its density.

    For the tanh approximation ½(1 + t) + ½x(1 - t²)·u' with t = tanh(u), u = √(2/π)(x + 0.044715x³).
    """
    builder, x = op.builder, op.input
    if op.attribute("approximate", "none") == "tanh":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        t = builder.op("Tanh", x * (square * (scale * cubic) + scale))
        slope_of_u = square * (3 * scale * cubic) + scale
        return dy * (((1 - t * t) * slope_of_u * x + t + 1) * 0.5)
    distribution = (builder.op("Erf", x * math.sqrt(0.5)) + 1) * 0.5
    density = builder.op("Exp", x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return dy * (distribution + x * density)


def mish(op: Operation, dy: Tensor) -> Tensor:
    """y = x·t with t = tanh(softplus(x)); dy/dx = t + x(1 - t²)·sigmoid(x)."""
    builder, x = op.builder, op.input
    t = builder.op("Tanh", builder.op("Softplus", x))
    return dy * (t + x * (1 - t * t) * builder.op("Sigmoid", x))


def swish(op: Operation, dy: Tensor) -> Tensor:
    """y = x·s with s = sigmoid(αx); dy/dx = s(1 + αx(1 - s))."""
    alpha = op.attribute("alpha", 1.0)
    scaled = op.input if alpha == 1 else op.input * alpha
    s = op.builder.op("Sigmoid", scaled)
    return dy * (s * (scaled * (1 - s) + 1))


def gated_product(op: Operation) -> Tensor | None:
    """Replace x * sigmoid(x), as exporters write SiLU, by one operator; None for any other product."""
    one, other = op.required(0), op.required(1)
    for x, gate in ((one, other), (other, one)):
        maker = gate.value.producer()
        if maker is not None and maker.op_type == "Sigmoid" and maker.domain == "" and maker.inputs[0] is x.value:
            return _sigmoid_linear_unit(x)
    return None


def swish_in_training(op: Operation) -> Tensor | None:
    return _sigmoid_linear_unit(op.input) if op.attribute("alpha", 1.0) == 1 else None


def _sigmoid_linear_unit(x: Tensor) -> Tensor | None:
    """Emit ``burnish.Silu``, x * sigmoid(x), which also returns sigmoid(x) (Elfwing et al. 2017); None for 16-bit types."""
    if x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    y, _ = SILU.emit(x)
    return y


def silu(op: Operation, dy: Tensor | None, d_gate: Tensor | None) -> Tensor | None:
    """The gradient of Silu; second derivatives also read the gate."""
    dx = None
    if dy is not None:
        dx = SILU_GRAD(dy, op.input, *op.outputs)
    if d_gate is None:
        return dx
    gate = op.outputs[1]
    by_gate = d_gate * (gate * (1 - gate))
    return by_gate if dx is None else dx + by_gate


def silu_double_backward(op: Operation, v: Tensor) -> tuple[Tensor | None, ...]:
    """With s = sigmoid(x): the slope s(1 + x(1 - s)) has the derivative s(1 - s)(2 + x(1 - 2s)); y and s get no gradient."""
    dy, x, y, gate = (op.required(index) for index in range(4))
    by_dy = SILU_GRAD(v, x, y, gate) if op.wants(0) else None
    by_x = v * dy * (gate * (1 - gate) * (x * (1 - gate * 2) + 2)) if op.wants(1) else None
    return by_dy, by_x, None, None


def lower_silu(op: Operation) -> tuple[Tensor, Tensor]:
    gate = op.builder.op("Sigmoid", op.input)
    return op.input * gate, gate


def lower_silu_grad(op: Operation) -> Tensor:
    """Inputs dY, X, Y and the gate s = sigmoid(X); output dX = dY(s + Y(1 - s)). X need not be kept."""
    dy, y, gate = op.required(0), op.required(2), op.required(3)
    return dy * (gate + y * (1 - gate))


def softmax(op: Operation, dy: Tensor) -> Tensor:
    """dx = y(dy - Σ dy·y) along the axis.

    If a reader replaces rows with zeros, such as fully masked rows, its result is used for y: no gradient reaches those rows, and
    0·NaN would not be zero.
    """
    axis = op.attribute("axis", -1)
    return SOFTMAX_GRAD(dy, _with_zero_rows(op, axis), axis=axis)


def _with_zero_rows(op: Operation, axis: int) -> Tensor:
    """Return the output of a Softmax, or the result of a reader that replaces whole rows with zeros."""
    builder, value = op.builder, op.output.value
    while value.uses():
        readers = [use.node for use in value.uses() if use.node.op_type != "IsNaN"]
        if len(readers) != 1 or readers[0].domain != "":
            return op.output
        reader = readers[0]
        if reader.op_type == "Where":
            condition, zero, kept = (builder.tensor(operand) for operand in reader.inputs if operand is not None)
            made = builder.tensor(reader.outputs[0])
            is_zero = zero.array is not None and not np.any(zero.array)
            if kept.value is value and is_zero and _chooses_rows(condition, value, axis) and same_shape(made.shape, kept.shape):
                return builder.cast(made, op.output.dtype)
            return op.output
        if reader.op_type not in ("Cast", "CastLike", "Identity"):
            return op.output
        value = reader.outputs[0]
    return op.output


def _chooses_rows(condition: Tensor, value: ir.Value, axis: int) -> bool:
    """True if a condition is constant along an axis, or is IsNaN, which holds for whole rows."""
    producer = condition.value.producer()
    if producer is not None and producer.op_type == "IsNaN" and producer.inputs[0] is value:
        return True
    if condition.rank is None or value.shape is None:
        return False
    from_the_end = axis - len(value.shape) if axis >= 0 else axis
    return condition.rank < -from_the_end or condition.dimension(from_the_end) == 1


def lower_softmax_grad(op: Operation) -> Tensor:
    dy, y = op.required(0), op.required(1)
    along = op.builder.integers([op.attribute("axis")])
    return (dy - op.builder.op("ReduceSum", dy * y, along, keepdims=1)) * y


def log_softmax(op: Operation, dy: Tensor) -> Tensor:
    return LOG_SOFTMAX_GRAD(dy, op.output, axis=op.attribute("axis", -1))


def lower_log_softmax_grad(op: Operation) -> Tensor:
    """dx = dy - softmax(x)·Σ dy, the sum along the axis; softmax(x) = exp(y) is accurate since y <= 0."""
    dy, y = op.required(0), op.required(1)
    along = op.builder.integers([op.attribute("axis")])
    return dy - op.builder.op("Exp", y) * op.builder.op("ReduceSum", dy, along, keepdims=1)


def hardmax(op: Operation, dy: Tensor) -> None:
    return


RELU_GRAD = SemanticOperator("ReluGrad", ("dy", "y"), ("dx",), like("dy"), lowering=lower_relu_grad)
CLIP_GRAD = SemanticOperator("ClipGrad", ("dy", "y", "low", "high"), ("dx",), like("dy"), lowering=lower_clip_grad)
SILU = SemanticOperator("Silu", ("x",), ("y", "gate"), like("x", "x"), gradient=silu, lowering=lower_silu)
SILU_GRAD = SemanticOperator(
    "SiluGrad", ("dy", "x", "y", "gate"), ("dx",), like("dy"), gradient=silu_double_backward, lowering=lower_silu_grad
)
SOFTMAX_GRAD = SemanticOperator("SoftmaxGrad", ("dy", "y"), ("dx",), like("y"), lowering=lower_softmax_grad)
"""The gradient of Softmax along ``axis``, from the cotangent of the output and the output."""
LOG_SOFTMAX_GRAD = SemanticOperator("LogSoftmaxGrad", ("dy", "y"), ("dx",), like("y"), lowering=lower_log_softmax_grad)

_ALONG_AXIS: dict[str, Any] = {
    "axes": axis_rules.like_first,
    "mixes": axis_rules.named_axis,
    "reopen": reopen_rules.along_axis,
}

OPERATORS = [
    Operator("Relu", gradient=relu, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("Clip", gradient=clip, axes=axis_rules.like_first, precision=Precision.FOLLOWS, reopen=reopen_rules.unary),
    Operator("LeakyRelu", gradient=leaky_relu, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("PRelu", gradient=prelu, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS, reopen=reopen_rules.prelu),
    Operator("Elu", gradient=elu, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Selu", gradient=selu, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Celu", gradient=celu, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Softplus", gradient=softplus, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Softsign", gradient=softsign, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Sigmoid", gradient=sigmoid, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("HardSigmoid", gradient=hard_sigmoid, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("HardSwish", gradient=hard_swish, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("ThresholdedRelu", gradient=thresholded_relu, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("Shrink", gradient=shrink, elementwise=Elementwise.UNARY),
    Operator("Gelu", gradient=gelu, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Mish", gradient=mish, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator(
        "Swish", gradient=swish, training_form=swish_in_training, elementwise=Elementwise.UNARY, precision=Precision.WIDENED
    ),
    Operator("Softmax", since=13, gradient=softmax, **_ALONG_AXIS),
    Operator("LogSoftmax", since=13, gradient=log_softmax, **_ALONG_AXIS),
    Operator("Hardmax", since=13, gradient=hardmax, **_ALONG_AXIS),
    RELU_GRAD,
    CLIP_GRAD,
    SILU,
    SILU_GRAD,
    SOFTMAX_GRAD,
    LOG_SOFTMAX_GRAD,
]

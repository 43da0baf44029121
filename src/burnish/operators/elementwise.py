"""Elementwise arithmetic with broadcasting, powers, exponentials, trigonometry, selection and casts.

Activation functions are in ``activation.py``. ``StopGradient`` makes its operand a constant in the backward pass, like
``tensor.detach()`` in PyTorch.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.graph import Tensor, constant_array, same_shape, unbroadcast
from burnish.graph.annotations import FIRST, WHOLE, subgradient_of
from burnish.graph.uses import producer_of
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.activation import gated_product
from burnish.operators.matmul import biased_product
from burnish.operators.registry import Elementwise, Operation, Operator, Precision, alike
from burnish.operators.semantic import SemanticOperator, like


def identity(op: Operation, dy: Tensor) -> Tensor:
    return dy


def add(op: Operation, dy: Tensor) -> tuple[Tensor, Tensor]:
    return dy, dy


def sub(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return dy, -unbroadcast(dy, op.required(1)) if op.wants(1) else None


def mul(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    a, b = op.required(0), op.required(1)
    return dy * b if op.wants(0) else None, dy * a if op.wants(1) else None


def div(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """d(a/b)/db = -y/b; a broadcast divisor divides after the sum, when the tensor is small again."""
    b, y = op.required(1), op.output
    da = dy / b if op.wants(0) else None
    if not op.wants(1):
        return da, None
    if da is not None and same_shape(y.shape, b.shape):
        return da, -(da * y)
    return da, -(unbroadcast(dy * y, b) / b)


def mod(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """y = a - q·b with a whole quotient q, constant between its jumps."""
    if not op.wants(1):
        return dy, None
    a, b = op.required(0), op.required(1)
    quotient = op.builder.op("Round", (a - op.output) / b)
    return dy, -(dy * quotient)


def sum_(op: Operation, dy: Tensor) -> tuple[Tensor, ...]:
    return (dy,) * len(op.inputs)


def mean(op: Operation, dy: Tensor) -> tuple[Tensor, ...]:
    count = len(op.inputs)
    return (dy if count == 1 else dy * (1 / count),) * count


def extremum(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient goes to the chosen operand; ties share it evenly, like PyTorch's maximum.

    With a note that asks for it the first operand gets all of it, like the input of PyTorch's ``clamp_min``.
    """
    if len(op.inputs) == 1:
        return (dy,)
    if subgradient_of(op.node) == WHOLE:
        return dy, None
    builder, y = op.builder, op.output
    taken = [builder.op("Equal", op.required(index), y) for index in range(len(op.inputs))]
    if len(taken) == 2 and subgradient_of(op.node) == FIRST:
        first, zero = taken[0], builder.scalar(0, dy)
        return (
            builder.op("Where", first, dy, zero) if op.wants(0) else None,
            builder.op("Where", first, zero, dy) if op.wants(1) else None,
        )
    share = dy / builder.op("Sum", *(builder.cast(mask, y.dtype) for mask in taken))
    zero = builder.scalar(0, dy)
    return tuple(builder.op("Where", mask, share, zero) if op.wants(index) else None for index, mask in enumerate(taken))


def neg(op: Operation, dy: Tensor) -> Tensor:
    return -dy


def abs_(op: Operation, dy: Tensor) -> Tensor:
    return dy * op.builder.op("Sign", op.input)


def piecewise_constant(op: Operation, dy: Tensor) -> None:
    """No gradient: the derivative is zero wherever it exists."""
    return


def range_(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """y_i = start + i · delta; the limit only sets the number of elements."""
    builder, index = op.builder, ir.DataType.INT64
    start, delta = None, None
    if op.wants(0):
        start = builder.op("ReduceSum", dy, keepdims=0)
    if op.wants(2):
        number = builder.op("Range", builder.scalar(0, index), builder.op("Size", dy), builder.scalar(1, index))
        delta = builder.op("ReduceSum", dy * builder.cast(number, dy.dtype), keepdims=0)
    return start, None, delta


def exp(op: Operation, dy: Tensor) -> Tensor:
    return dy * op.output


def log(op: Operation, dy: Tensor) -> Tensor:
    return dy / op.input


def sqrt(op: Operation, dy: Tensor) -> Tensor:
    """dy/(2y); 0 at 0 for a sum of squares or a value bounded by 0, like PyTorch's norm, std and cdist."""
    y = op.output
    if _is_sum_of_powers(op.input.value):
        return op.builder.op("Where", _is_zero(y), op.builder.scalar(0, dy), dy / (_nonzero(y) * 2))
    return dy / (y * 2)


def _nonzero(x: Tensor) -> Tensor:
    return x.builder.op("Where", _is_zero(x), x.builder.scalar(1, x), x)


def _is_sum_of_powers(value: ir.Value | None, depth: int = 8) -> bool:
    """True if a value is a sum or mean of even powers, or of powers of sizes, times numbers, or is bounded by 0."""
    node = producer_of(value)
    if node is None or not depth:
        return False
    if node.op_type in ("ReduceSumSquare", "Relu") or (node.op_type in ("Clip", "Max") and _is_from_zero(node)):
        return True
    if node.op_type in ("ReduceSum", "ReduceMean"):
        power = producer_of(node.inputs[0])
        is_cast = power is not None and power.op_type == "Cast"
        return _is_sum_of_powers(node.inputs[0], depth - 1) if is_cast else _is_power(power)
    if node.op_type == "Add":
        return all(_is_power(producer_of(term)) or _is_sum_of_powers(term, depth - 1) for term in node.inputs)
    passed = {"Mul": node.inputs[:2], "Div": node.inputs[:1]}
    passed |= dict.fromkeys(("Cast", "Clip", "Identity", "Reshape", "Squeeze", "Unsqueeze"), node.inputs[:1])
    return any(_is_sum_of_powers(operand, depth - 1) for operand in passed.get(node.op_type, ()))


def _is_power(node: ir.Node | None) -> bool:
    if node is None or node.op_type not in ("Mul", "Pow"):
        return False
    base, other = node.inputs[:2]
    if node.op_type == "Mul":
        return base is other
    exponent = None if other is None else constant_array(other)
    return exponent is not None and exponent.size == 1 and (float(exponent.reshape(())) % 2 == 0 or _is_size(base))


def _is_from_zero(bound: ir.Node) -> bool:
    low = constant_array(bound.inputs[1]) if len(bound.inputs) > 1 and bound.inputs[1] is not None else None
    return low is not None and not low.any()


def _is_size(value: ir.Value | None) -> bool:
    return producer_of(value, "Abs") is not None


def reciprocal(op: Operation, dy: Tensor) -> Tensor:
    y = op.output
    return -(dy * y * y)


def erf(op: Operation, dy: Tensor) -> Tensor:
    x = op.input
    return dy * (op.builder.op("Exp", -(x * x)) * (2 / math.sqrt(math.pi)))


def pow_(op: Operation, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """d(xᵖ)/dx = p·xᵖ⁻¹ and d(xᵖ)/dp = xᵖ·ln x.

    If p = 0 the first is 0 at every x, and if x = 0 and p >= 0 the second is 0: the products would be 0·∞. A negative base has no
    derivative for the exponent (NaN). A base of 1 instead gives these zeros, and keeps their derivatives.
    """
    return _pow_base(op, dy) if op.wants(0) else None, _pow_exponent(op, dy) if op.wants(1) else None


def _pow_base(op: Operation, dy: Tensor) -> Tensor | None:
    builder, x, exponent = op.builder, op.required(0), op.required(1)
    array = exponent.array
    if array is not None and array.size == 1 and exponent.rank is not None and exponent.rank <= (x.rank or 0):
        number = float(array.reshape(()))
        if number == 0:
            return None
        if number == 1:
            return dy
        if number == 2:
            return dy * (x * 2)
        if 0 < number < 1 and (_is_size(x.value) or _is_sum_of_powers(x.value)):
            slope = dy * (_nonzero(x) ** (number - 1) * number)
            return builder.op("Where", _is_zero(x), builder.scalar(0, dy), slope)
        if number == 0.5:
            return dy / (op.output * 2)
        return dy * (x ** (number - 1) * number)
    p = builder.cast(exponent, x.dtype)
    both = builder.op("And", _is_zero(p), _is_zero(x))
    return dy * (p * builder.op("Where", both, builder.scalar(1, x), x) ** (p - 1))


def _pow_exponent(op: Operation, dy: Tensor) -> Tensor:
    builder, x, exponent, y = op.builder, op.required(0), op.required(1), op.output
    constant = builder.op("And", _is_zero(x), builder.op("GreaterOrEqual", exponent, builder.scalar(0, exponent)))
    slope = y * builder.op("Log", builder.op("Where", constant, builder.scalar(1, x), x))
    return builder.cast(dy * slope, exponent.dtype)


def _is_zero(x: Tensor) -> Tensor:
    return x.builder.op("Equal", x, x.builder.scalar(0, x))


def sin(op: Operation, dy: Tensor) -> Tensor:
    return dy * op.builder.op("Cos", op.input)


def cos(op: Operation, dy: Tensor) -> Tensor:
    return -(dy * op.builder.op("Sin", op.input))


def tan(op: Operation, dy: Tensor) -> Tensor:
    y = op.output
    return dy * (y * y + 1)


def asin(op: Operation, dy: Tensor) -> Tensor:
    x = op.input
    return dy / op.builder.op("Sqrt", 1 - x * x)


def acos(op: Operation, dy: Tensor) -> Tensor:
    return -asin(op, dy)


def atan(op: Operation, dy: Tensor) -> Tensor:
    x = op.input
    return dy / (x * x + 1)


def sinh(op: Operation, dy: Tensor) -> Tensor:
    return dy * op.builder.op("Cosh", op.input)


def cosh(op: Operation, dy: Tensor) -> Tensor:
    return dy * op.builder.op("Sinh", op.input)


def tanh(op: Operation, dy: Tensor) -> Tensor:
    y = op.output
    return dy * (1 - y * y)


def asinh(op: Operation, dy: Tensor) -> Tensor:
    x = op.input
    return dy / op.builder.op("Sqrt", x * x + 1)


def acosh(op: Operation, dy: Tensor) -> Tensor:
    x = op.input
    return dy / op.builder.op("Sqrt", x * x - 1)


def atanh(op: Operation, dy: Tensor) -> Tensor:
    x = op.input
    return dy / (1 - x * x)


def where(op: Operation, dy: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
    condition, zero = op.required(0), op.builder.scalar(0, dy)
    return (
        None,
        op.builder.op("Where", condition, dy, zero) if op.wants(1) else None,
        op.builder.op("Where", condition, zero, dy) if op.wants(2) else None,
    )


def cast(op: Operation, dy: Tensor) -> Tensor:
    return op.builder.cast(dy, op.input.dtype)


def cast_like(op: Operation, dy: Tensor) -> tuple[Tensor, None]:
    return op.builder.cast(dy, op.input.dtype), None


def stop_gradient(op: Operation) -> Tensor:
    return op.builder.op("Identity", op.required(0))


STOP_GRADIENT = SemanticOperator(
    "StopGradient", ("x",), ("y",), like("x"), constants=("y",), shares_memory={"y": "x"}, lowering=stop_gradient
)

OPERATORS = [
    Operator("Identity", gradient=identity, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("Add", gradient=add, training_form=biased_product, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS),
    Operator("Sub", gradient=sub, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS),
    Operator("Mul", gradient=mul, training_form=gated_product, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS),
    Operator("Div", gradient=div, elementwise=Elementwise.BROADCAST, precision=Precision.WIDENED),
    Operator("Mod", gradient=mod, elementwise=Elementwise.BROADCAST),
    Operator("Sum", gradient=sum_, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS),
    Operator("Mean", gradient=mean, elementwise=Elementwise.BROADCAST),
    *alike("Max", "Min", gradient=extremum, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS),
    Operator("Neg", gradient=neg, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    Operator("Abs", gradient=abs_, elementwise=Elementwise.UNARY, precision=Precision.FOLLOWS),
    *alike("Floor", "Ceil", "Round", "Sign", gradient=piecewise_constant, elementwise=Elementwise.UNARY),
    Operator("EyeLike", gradient=piecewise_constant, axes=axis_rules.like_first),
    Operator("MelWeightMatrix", gradient=piecewise_constant),
    Operator("Range", gradient=range_, axes=axis_rules.counted),
    Operator("Exp", gradient=exp, elementwise=Elementwise.UNARY),
    Operator("Log", gradient=log, elementwise=Elementwise.UNARY),
    Operator("Sqrt", gradient=sqrt, elementwise=Elementwise.UNARY),
    Operator("Reciprocal", gradient=reciprocal, elementwise=Elementwise.UNARY),
    Operator("Erf", gradient=erf, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Pow", gradient=pow_, elementwise=Elementwise.BROADCAST),
    Operator("Sin", gradient=sin, elementwise=Elementwise.UNARY),
    Operator("Cos", gradient=cos, elementwise=Elementwise.UNARY),
    Operator("Tan", gradient=tan, elementwise=Elementwise.UNARY),
    Operator("Asin", gradient=asin, elementwise=Elementwise.UNARY),
    Operator("Acos", gradient=acos, elementwise=Elementwise.UNARY),
    Operator("Atan", gradient=atan, elementwise=Elementwise.UNARY),
    Operator("Sinh", gradient=sinh, elementwise=Elementwise.UNARY),
    Operator("Cosh", gradient=cosh, elementwise=Elementwise.UNARY),
    Operator("Tanh", gradient=tanh, elementwise=Elementwise.UNARY, precision=Precision.WIDENED),
    Operator("Asinh", gradient=asinh, elementwise=Elementwise.UNARY),
    Operator("Acosh", gradient=acosh, elementwise=Elementwise.UNARY),
    Operator("Atanh", gradient=atanh, elementwise=Elementwise.UNARY),
    Operator("Where", gradient=where, elementwise=Elementwise.BROADCAST, precision=Precision.FOLLOWS),
    Operator("Cast", gradient=cast, axes=axis_rules.like_first, reopen=reopen_rules.unary),
    Operator("BitCast", reopen=reopen_rules.unary),
    Operator("CastLike", gradient=cast_like, axes=axis_rules.like_first),
    *alike(
        "And",
        "BitShift",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Equal",
        "Greater",
        "GreaterOrEqual",
        "Less",
        "LessOrEqual",
        "Or",
        "Xor",
        elementwise=Elementwise.BROADCAST,
    ),
    *alike("BitwiseNot", "IsInf", "IsNaN", "Not", elementwise=Elementwise.UNARY),
    STOP_GRADIENT,
]

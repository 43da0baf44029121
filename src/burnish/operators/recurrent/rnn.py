"""RNN (Elman 1990): h = f(x + h' R), with h' the state before and f tanh, ReLU or the sigmoid."""

from __future__ import annotations

from typing import Any, NoReturn

from burnish.graph import Builder, Tensor
from burnish.operators.recurrent.layer import (
    Direction,
    Recurrence,
    before,
    dead,
    given_or_zeros,
    hidden_states,
    recurrent_layer,
    refused,
    weight_gradient,
    where_live,
)
from burnish.operators.registry import Operation, gradient, training_form
from burnish.operators.semantic import SemanticOperator
from burnish.operators.time_loop import Tensors, scan

RNN = Recurrence(1, (5,), None, ("tanh",), (("tanh", "relu", "sigmoid"),))
RNN_STEPS = SemanticOperator(
    "RNNSteps", ("z", "r", "initial_h", "live"), ("h", "last_h"), hidden_states(("z", 1), ("initial_h", 1))
)
RNN_STEPS_GRAD = SemanticOperator(
    "RNNStepsGrad",
    ("r", "initial_h", "h", "dh", "d_last_h", "live"),
    ("dz", "d_initial_h"),
    hidden_states(("h", 1), ("initial_h", 1)),
)


@training_form("RNN", since=7)
def rnn(op: Operation) -> tuple[Tensor | None, ...] | None:
    def run(direction: Direction) -> tuple[Tensor, ...]:
        z, (h,), hidden = direction.z, direction.initial, direction.hidden
        attributes: dict[str, Any] = {
            "reverse": int(direction.reverse),
            "hidden_size": hidden,
            "activation": direction.activations[0].capitalize(),
        }
        return RNN_STEPS.emit(z, direction.r, h, direction.live, **attributes)

    return recurrent_layer(op, RNN, run)


@gradient("RNN", since=7)
def rnn_gradient(op: Operation, *_: Tensor | None) -> NoReturn:
    raise refused(op, RNN)


@RNN_STEPS.gradient
def rnn_steps_gradient(op: Operation, dh: Tensor | None, d_last_h: Tensor | None) -> tuple[Tensor | None, ...]:
    r, initial_h = op.required(1), op.required(2)
    attributes = {name: op.attribute(name) for name in ("reverse", "hidden_size", "activation")}
    h = op.output
    dz, d_initial_h = RNN_STEPS_GRAD.emit(r, initial_h, h, dh, d_last_h, op.optional(3), **attributes)
    dr = weight_gradient(dz, before(h, initial_h, attributes["reverse"]), r) if op.wants(1) else None
    return dz, dr, d_initial_h, None


@RNN_STEPS.lowering
def lower_rnn_steps(op: Operation) -> tuple[Tensor, ...]:
    z, r, initial_h = (op.required(index) for index in range(3))
    live = op.optional(3)

    def step(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (h,) = states
        following = inner.op(op.attribute("activation"), inner.op("Gemm", h, r, frames[0], transB=1, like=h))
        if live is not None:
            following = inner.op("Where", frames[1], following, h, like=h)
        return [following], [following]

    frames = [z] if live is None else [z, live]
    (last_h,), (h,) = scan(op.builder, step, [initial_h], frames, reverse=bool(op.attribute("reverse")), name=op.output.name)
    return h, last_h


@RNN_STEPS_GRAD.lowering
def lower_rnn_steps_grad(op: Operation) -> tuple[Tensor, ...]:
    builder = op.builder
    r, initial_h, h = (op.required(index) for index in range(3))
    dh, d_last_h, live = (op.optional(index) for index in range(3, 6))
    slope = {
        "Tanh": lambda: 1 - h * h,
        "Sigmoid": lambda: h * (1 - h),
        "Relu": lambda: builder.cast(builder.op("Greater", h, 0.0), h.dtype),
    }[op.attribute("activation")]()
    frames = [where_live(live, slope, 0.0), *([] if dh is None else [dh]), *([] if live is None else [dead(live, h)])]

    def step(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (d_h,) = states
        if dh is not None:
            d_h = d_h + frames[1]
        dz = d_h * frames[0]
        d_before = inner.op("MatMul", dz, r, like=d_h)
        if live is not None:
            d_before = d_before + d_h * frames[-1]
        return [d_before], [dz]

    start = given_or_zeros(d_last_h, initial_h)
    (d_initial_h,), (dz,) = scan(builder, step, [start], frames, reverse=not op.attribute("reverse"), name=op.output.name)
    return dz, d_initial_h

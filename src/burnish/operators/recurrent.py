"""Recurrent layers: LSTM, GRU and RNN, in each direction, with padded batches.

In a training graph a layer becomes, per direction, the product of all frames with its input weight, before the recursion, and
a semantic operator for the recursion itself, which keeps the values for the gradient:

    LSTMSteps(z, r, initial_h, initial_c, live, p; reverse) -> h, last_h, last_c, c, iof, g
    GRUSteps(z, r, initial_h, b, live; reverse, linear_before_reset) -> h, last_h, update_reset, n, q
    RNNSteps(z, r, initial_h, live; reverse, activation) -> h, last_h

z ``[T, N, G * H]`` is the contribution of frames and biases to the G gates, in the standard's order; r ``[G * H, H]``; live
``[T, N, 1]``, bool, omitted if every sequence has all T frames: a frame that is not live does not change the state.

The gradients, ``LSTMStepsGrad`` and so on, go backwards through time. The factors of a state's cotangent are computed before, for
all frames at once, so a step is a product with r and few multiplications. The gradients of the weights are one product each after
the recursion, over all frames.

LSTM (Hochreiter and Schmidhuber 1997; with peepholes, Gers and Schmidhuber 2000). Gates in the standard's order: i, o, f, c.

    i, o, f = sigmoid(z + h' r + p c),  g = tanh(z + h' r),  c = f c' + i g,  h = o tanh(c)

with h', c' the previous states, and c instead of c' for the peephole of o.

GRU (Cho et al. 2014). Gates in the standard's order: z (update), r (reset), h (candidate).

    z, r = sigmoid(x + h' R),  n = tanh(x + (r h') R),  h = n + z (h' - n)

with h' the previous state; with ``linear_before_reset``, as in cuDNN and PyTorch, n = tanh(x + r q) with q = h' R + b.

RNN (Elman 1990): h = f(x + h' R), with h' the previous state and f tanh, ReLU or the sigmoid.
"""

from __future__ import annotations

from typing import Any, NoReturn

from burnish.graph import Builder, Tensor
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.recurrent_layer import (
    Direction,
    Recurrence,
    before,
    dead,
    given_or_zeros,
    hidden_states,
    recurrent_layer,
    refused,
    split,
    split_rows,
    weight_gradient,
    where_live,
)
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import Inference, Operands, OutputType, SemanticOperator
from burnish.operators.time_loop import Tensors, scan

LSTM = Recurrence(4, (5, 6), 7, ("sigmoid", "tanh", "tanh"), (("sigmoid",), ("tanh",), ("tanh",)))


def lstm(op: Operation) -> tuple[Tensor | None, ...] | None:
    def run(direction: Direction) -> tuple[Tensor, ...]:
        z, h, c = direction.z, *direction.initial
        hidden = direction.hidden
        operands = (z, direction.r, h, c, direction.live, direction.peepholes)
        return LSTM_STEPS.emit(*operands, reverse=int(direction.reverse), hidden_size=hidden)[:3]

    return recurrent_layer(op, LSTM, run)


def lstm_gradient(op: Operation, *_: Tensor | None) -> NoReturn:
    raise refused(op, LSTM)


def lstm_steps_gradient(
    op: Operation, dh: Tensor | None, d_last_h: Tensor | None, d_last_c: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    r, initial_h, initial_c = (op.required(index) for index in range(1, 4))
    live, p = op.optional(4), op.optional(5)
    h, c, iof, g = (op.outputs[index] for index in (0, 3, 4, 5))
    hidden, reverse = op.attribute("hidden_size"), op.attribute("reverse")
    operands = (r, initial_c, c, iof, g, dh, d_last_h, d_last_c, live, p)
    dz, d_initial_h, d_initial_c = LSTM_STEPS_GRAD.emit(*operands, reverse=reverse, hidden_size=hidden)
    dr = weight_gradient(dz, before(h, initial_h, reverse), r) if op.wants(1) else None
    dp = None
    if p is not None and op.wants(5):
        cell = before(c, initial_c, reverse)
        di, do, df, _dg = split(dz, *[hidden] * 4)
        terms = op.builder.op("Concat", di * cell, do * c, df * cell, axis=-1)
        dp = op.builder.op("ReduceSum", terms, op.builder.integers([0, 1]), keepdims=0, like=p)
    return dz, dr, d_initial_h, d_initial_c, None, dp


def lower_lstm_steps(op: Operation) -> tuple[Tensor, ...]:
    z, r, initial_h, initial_c = (op.required(index) for index in range(4))
    live, p = op.optional(4), op.optional(5)
    hidden = op.attribute("hidden_size")
    peepholes = None if p is None else split(p, *[hidden] * 3)

    def step(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        h, c = states
        gates = inner.op("Gemm", h, r, frames[0], transB=1)
        if peepholes is None:
            ungated, candidate = split(gates, 3 * hidden, hidden)
            iof = inner.op("Sigmoid", ungated)
            i, o, f = split(iof, *[hidden] * 3)
        else:
            p_i, p_o, p_f = peepholes
            i, o, f, candidate = split(gates, *[hidden] * 4)
            i, f = inner.op("Sigmoid", i + c * p_i), inner.op("Sigmoid", f + c * p_f)
        g = inner.op("Tanh", candidate)
        following_c = f * c + i * g
        if peepholes is not None:
            o = inner.op("Sigmoid", o + following_c * p_o)
            iof = inner.op("Concat", i, o, f, axis=-1)
        following_h = o * inner.op("Tanh", following_c)
        if live is not None:
            following_h = inner.op("Where", frames[1], following_h, h, like=h)
            following_c = inner.op("Where", frames[1], following_c, c, like=c)
        return [following_h, following_c], [following_h, following_c, iof, g]

    frames = [z] if live is None else [z, live]
    reverse = bool(op.attribute("reverse"))
    (last_h, last_c), (h, c, iof, g) = scan(
        op.builder, step, [initial_h, initial_c], frames, reverse=reverse, name=op.output.name
    )
    return h, last_h, last_c, c, iof, g


def lower_lstm_steps_grad(op: Operation) -> tuple[Tensor, ...]:
    """dc += dh o (1 - tanh² c), and dz = (dc, dh, dc, dc) times the known factors of the gates."""
    builder = op.builder
    r, initial_c, c, iof, g = (op.required(index) for index in range(5))
    dh, d_last_h, d_last_c, live, p = (op.optional(index) for index in range(5, 10))
    hidden, reverse = op.attribute("hidden_size"), bool(op.attribute("reverse"))
    i, o, f = split(iof, *[hidden] * 3)
    cell, squashed = before(c, initial_c, reverse), builder.op("Tanh", c)
    of_i = g * i * (1 - i)
    of_o = squashed * o * (1 - o)
    of_f = cell * f * (1 - f)
    of_g = i * (1 - g * g)
    to_cell, carried = o * (1 - squashed * squashed), f
    if p is not None:
        p_i, p_o, p_f = split(p, *[hidden] * 3)
        to_cell, carried = to_cell + of_o * p_o, carried + of_i * p_i + of_f * p_f
    to_gates = where_live(live, builder.op("Concat", of_i, of_o, of_f, of_g, axis=-1), 0.0)
    factors = [to_gates, where_live(live, to_cell, 0.0), where_live(live, carried, 1.0)]
    frames = [*factors, *([] if dh is None else [dh]), *([] if live is None else [dead(live, c)])]

    def step(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        d_h, d_c = states
        to_gates, to_cell, carried = frames[:3]
        if dh is not None:
            d_h = d_h + frames[3]
        d_c = d_c + d_h * to_cell
        dz = inner.op("Concat", d_c, d_h, d_c, d_c, axis=-1) * to_gates
        d_before = inner.op("MatMul", dz, r, like=d_h)
        if live is not None:
            d_before = d_before + d_h * frames[-1]
        return [d_before, d_c * carried], [dz]

    starts = [given_or_zeros(cotangent, initial_c) for cotangent in (d_last_h, d_last_c)]
    (d_initial_h, d_initial_c), (dz,) = scan(builder, step, starts, frames, reverse=not reverse, name=op.output.name)
    return dz, d_initial_h, d_initial_c


GRU = Recurrence(3, (5,), None, ("sigmoid", "tanh"), (("sigmoid",), ("tanh",)), keeps_biases_apart=True)


def _last_if_linear(infer: Inference) -> Inference:
    def of_operands(operands: Operands) -> list[OutputType]:
        types = list(infer(operands))
        return types if operands.attributes["linear_before_reset"] else types[:-1]

    return of_operands


def gru(op: Operation) -> tuple[Tensor | None, ...] | None:
    linear = int(op.attribute("linear_before_reset", 0))

    def run(direction: Direction) -> tuple[Tensor, ...]:
        z, (h,), hidden, bias = direction.z, direction.initial, direction.hidden, direction.recurrent_bias
        if bias is not None:
            # With linear_before_reset the bias of the candidate is multiplied by r: it cannot be added before the recursion.
            outside, inside = split_rows(bias, 2 * hidden, hidden) if linear else (bias, None)
            if linear:
                outside = op.builder.op("Pad", outside, op.builder.integers([0, hidden]))
            z, bias = z + outside, inside
        operands = (z, direction.r, h, bias, direction.live)
        reverse = int(direction.reverse)
        return GRU_STEPS.emit(*operands, reverse=reverse, hidden_size=hidden, linear_before_reset=linear)[:2]

    return recurrent_layer(op, GRU, run)


def gru_gradient(op: Operation, *_: Tensor | None) -> NoReturn:
    raise refused(op, GRU)


def gru_steps_gradient(op: Operation, dh: Tensor | None, d_last_h: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    builder = op.builder
    r, initial_h = op.required(1), op.required(2)
    bias, live = op.optional(3), op.optional(4)
    h, update_reset, n = (op.outputs[index] for index in (0, 2, 3))
    attributes = {name: op.attribute(name) for name in ("reverse", "hidden_size", "linear_before_reset")}
    hidden, linear = attributes["hidden_size"], attributes["linear_before_reset"]
    operands = (r, initial_h, h, update_reset, n, op.outputs[4] if linear else None, dh, d_last_h, live)
    dz, d_initial_h, *d_inside = GRU_STEPS_GRAD.emit(*operands, **attributes)
    dr = None
    if op.wants(1):
        previous = before(h, initial_h, attributes["reverse"])
        of_gates, of_candidate = split(dz, 2 * hidden, hidden)
        # The factor of the candidate's recurrent weight, and the cotangent of their product.
        factor = previous if linear else split(update_reset, hidden, hidden)[1] * previous
        parts = [(of_gates, previous), (d_inside[0] if linear else of_candidate, factor)]
        dr = builder.op("Concat", *(weight_gradient(*part) for part in parts), axis=0, like=r)
    d_bias = None
    if bias is not None and op.wants(3):
        d_bias = builder.op("ReduceSum", d_inside[0], builder.integers([0, 1]), keepdims=0, like=bias)
    return dz, dr, d_initial_h, d_bias, None


def lower_gru_steps(op: Operation) -> tuple[Tensor, ...]:
    z, r, initial_h = (op.required(index) for index in range(3))
    bias, live = op.optional(3), op.optional(4)
    hidden, linear = op.attribute("hidden_size"), op.attribute("linear_before_reset")
    r_gates, r_candidate = split_rows(r, 2 * hidden, hidden)

    def step(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (h,), (of_gates, of_candidate) = states, frames[:2]
        update_reset = inner.op("Sigmoid", inner.op("Gemm", h, r_gates, of_gates, transB=1))
        update, reset = split(update_reset, hidden, hidden)
        if linear:
            inside = inner.op("Gemm", h, r_candidate, bias, transB=1)
            n = inner.op("Tanh", of_candidate + reset * inside)
        else:
            n = inner.op("Tanh", inner.op("Gemm", reset * h, r_candidate, of_candidate, transB=1))
        following = n + update * (h - n)
        if live is not None:
            following = inner.op("Where", frames[-1], following, h, like=h)
        return [following], [following, update_reset, n, *([inside] if linear else [])]

    frames = [*split(z, 2 * hidden, hidden), *([] if live is None else [live])]
    reverse = bool(op.attribute("reverse"))
    (last_h,), (h, *gates) = scan(op.builder, step, [initial_h], frames, reverse=reverse, name=op.output.name)
    return h, last_h, *gates


def lower_gru_steps_grad(op: Operation) -> tuple[Tensor, ...]:
    """The cotangent of a gate is that of h times known factors; except for r without linear_before_reset."""
    builder = op.builder
    r, initial_h, h, update_reset, n = (op.required(index) for index in range(5))
    inside, dh, d_last_h, live = (op.optional(index) for index in range(5, 9))
    hidden, reverse = op.attribute("hidden_size"), bool(op.attribute("reverse"))
    update, reset = split(update_reset, hidden, hidden)
    previous = before(h, initial_h, reverse)
    to_update = (previous - n) * update * (1 - update)
    to_candidate = where_live(live, (1 - update) * (1 - n * n), 0.0)
    carried = where_live(live, update, 1.0)
    cotangents = [] if dh is None else [dh]
    start = given_or_zeros(d_last_h, initial_h)

    if inside is not None:
        to_reset = to_candidate * inside * reset * (1 - reset)
        parts = (where_live(live, to_update, 0.0), to_reset, to_candidate * reset)
        to_gates = builder.op("Concat", *parts, axis=-1)

        def step_linear(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
            (d_h,), (to_gates, carried) = states, frames[:2]
            if dh is not None:
                d_h = d_h + frames[2]
            d_gates = inner.op("Concat", d_h, d_h, d_h, axis=-1) * to_gates
            return [inner.op("MatMul", d_gates, r, like=d_h) + d_h * carried], [d_gates, d_h]

        frames = [to_gates, carried, *cotangents]
        (d_initial_h,), (d_gates, d_h) = scan(builder, step_linear, [start], frames, reverse=not reverse, name=op.output.name)
        d_update_reset, d_inside = split(d_gates, 2 * hidden, hidden)
        return builder.op("Concat", d_update_reset, d_h * to_candidate, axis=-1), d_initial_h, d_inside

    r_gates, r_candidate = split_rows(r, 2 * hidden, hidden)
    to_reset = previous * reset * (1 - reset)

    def step(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (d_h,), (to_update, to_reset, to_candidate, carried, reset) = states, frames[:5]
        if dh is not None:
            d_h = d_h + frames[5]
        d_candidate = d_h * to_candidate
        d_product = inner.op("MatMul", d_candidate, r_candidate, like=d_h)
        d_gates = inner.op("Concat", d_h * to_update, d_product * to_reset, axis=-1)
        through_gates = inner.op("MatMul", d_gates, r_gates, like=d_h)
        return [through_gates + d_h * carried + d_product * reset], [d_gates, d_candidate]

    frames = [where_live(live, to_update, 0.0), to_reset, to_candidate, carried, reset, *cotangents]
    (d_initial_h,), (d_gates, d_candidate) = scan(builder, step, [start], frames, reverse=not reverse, name=op.output.name)
    return builder.op("Concat", d_gates, d_candidate, axis=-1), d_initial_h


RNN = Recurrence(1, (5,), None, ("tanh",), (("tanh", "relu", "sigmoid"),))


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


def rnn_gradient(op: Operation, *_: Tensor | None) -> NoReturn:
    raise refused(op, RNN)


def rnn_steps_gradient(op: Operation, dh: Tensor | None, d_last_h: Tensor | None) -> tuple[Tensor | None, ...]:
    r, initial_h = op.required(1), op.required(2)
    attributes = {name: op.attribute(name) for name in ("reverse", "hidden_size", "activation")}
    h = op.output
    dz, d_initial_h = RNN_STEPS_GRAD.emit(r, initial_h, h, dh, d_last_h, op.optional(3), **attributes)
    dr = weight_gradient(dz, before(h, initial_h, attributes["reverse"]), r) if op.wants(1) else None
    return dz, dr, d_initial_h, None


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


LSTM_STEPS = SemanticOperator(
    "LSTMSteps",
    ("z", "r", "initial_h", "initial_c", "live", "peepholes"),
    ("h", "last_h", "last_c", "c", "iof", "g"),
    hidden_states(("z", 1), ("initial_h", 1), ("initial_c", 1), ("z", 1), ("z", 3), ("z", 1)),
    internal=("c", "iof", "g"),
    gradient=lstm_steps_gradient,
    lowering=lower_lstm_steps,
)
LSTM_STEPS_GRAD = SemanticOperator(
    "LSTMStepsGrad",
    ("r", "initial_c", "c", "iof", "g", "dh", "d_last_h", "d_last_c", "live", "peepholes"),
    ("dz", "d_initial_h", "d_initial_c"),
    hidden_states(("c", 4), ("initial_c", 1), ("initial_c", 1)),
    lowering=lower_lstm_steps_grad,
)
GRU_STEPS = SemanticOperator(
    "GRUSteps",
    ("z", "r", "initial_h", "bias", "live"),
    ("h", "last_h", "update_reset", "candidate", "inside"),
    _last_if_linear(hidden_states(("z", 1), ("initial_h", 1), ("z", 2), ("z", 1), ("z", 1))),
    internal=("update_reset", "candidate", "inside"),
    gradient=gru_steps_gradient,
    lowering=lower_gru_steps,
)
GRU_STEPS_GRAD = SemanticOperator(
    "GRUStepsGrad",
    ("r", "initial_h", "h", "update_reset", "candidate", "inside", "dh", "d_last_h", "live"),
    ("dz", "d_initial_h", "d_inside"),
    _last_if_linear(hidden_states(("h", 3), ("initial_h", 1), ("h", 1))),
    lowering=lower_gru_steps_grad,
)
RNN_STEPS = SemanticOperator(
    "RNNSteps",
    ("z", "r", "initial_h", "live"),
    ("h", "last_h"),
    hidden_states(("z", 1), ("initial_h", 1)),
    gradient=rnn_steps_gradient,
    lowering=lower_rnn_steps,
)
RNN_STEPS_GRAD = SemanticOperator(
    "RNNStepsGrad",
    ("r", "initial_h", "h", "dh", "d_last_h", "live"),
    ("dz", "d_initial_h"),
    hidden_states(("h", 1), ("initial_h", 1)),
    lowering=lower_rnn_steps_grad,
)

_ALIKE: dict[str, Any] = {"axes": axis_rules.recurrent, "mixes": axis_rules.time_axis, "reopen": reopen_rules.recurrent}

OPERATORS = [
    Operator("LSTM", since=7, gradient=lstm_gradient, training_form=lstm, **_ALIKE),
    Operator("GRU", since=7, gradient=gru_gradient, training_form=gru, **_ALIKE),
    Operator("RNN", since=7, gradient=rnn_gradient, training_form=rnn, **_ALIKE),
    LSTM_STEPS,
    LSTM_STEPS_GRAD,
    GRU_STEPS,
    GRU_STEPS_GRAD,
    RNN_STEPS,
    RNN_STEPS_GRAD,
]

"""LSTM (Hochreiter and Schmidhuber 1997; with peepholes, Gers and Schmidhuber 2000). Gates in the standard's order: i, o, f, c.

    i, o, f = sigmoid(z + h' r + p c),  g = tanh(z + h' r),  c = f c' + i g,  h = o tanh(c)

with h', c' the states before, and c instead of c' for the peephole of o.
"""

from __future__ import annotations

from typing import NoReturn

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
    split,
    weight_gradient,
    where_live,
)
from burnish.operators.registry import Operation, gradient, training_form
from burnish.operators.semantic import SemanticOperator
from burnish.operators.time_loop import Tensors, scan

LSTM = Recurrence(4, (5, 6), 7, ("sigmoid", "tanh", "tanh"), (("sigmoid",), ("tanh",), ("tanh",)))
LSTM_STEPS = SemanticOperator(
    "LSTMSteps",
    ("z", "r", "initial_h", "initial_c", "live", "peepholes"),
    ("h", "last_h", "last_c", "c", "iof", "g"),
    hidden_states(("z", 1), ("initial_h", 1), ("initial_c", 1), ("z", 1), ("z", 3), ("z", 1)),
    internal=("c", "iof", "g"),
)
LSTM_STEPS_GRAD = SemanticOperator(
    "LSTMStepsGrad",
    ("r", "initial_c", "c", "iof", "g", "dh", "d_last_h", "d_last_c", "live", "peepholes"),
    ("dz", "d_initial_h", "d_initial_c"),
    hidden_states(("c", 4), ("initial_c", 1), ("initial_c", 1)),
)


@training_form("LSTM", since=7)
def lstm(op: Operation) -> tuple[Tensor | None, ...] | None:
    def run(direction: Direction) -> tuple[Tensor, ...]:
        z, h, c = direction.z, *direction.initial
        hidden = direction.hidden
        operands = (z, direction.r, h, c, direction.live, direction.peepholes)
        return LSTM_STEPS.emit(*operands, reverse=int(direction.reverse), hidden_size=hidden)[:3]

    return recurrent_layer(op, LSTM, run)


@gradient("LSTM", since=7)
def lstm_gradient(op: Operation, *_: Tensor | None) -> NoReturn:
    raise refused(op, LSTM)


@LSTM_STEPS.gradient
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


@LSTM_STEPS.lowering
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


@LSTM_STEPS_GRAD.lowering
def lower_lstm_steps_grad(op: Operation) -> tuple[Tensor, ...]:
    """dc += dh o (1 - tanh² c), and dz = (dc, dh, dc, dc) times what is known of the gates."""
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

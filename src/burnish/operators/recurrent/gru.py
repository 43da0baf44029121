"""GRU (Cho et al. 2014). Gates in the standard's order: z (update), r (reset), h (candidate).

    z, r = sigmoid(x + h' R),  n = tanh(x + (r h') R),  h = n + z (h' - n)

with h' the state before; with ``linear_before_reset``, as in cuDNN and PyTorch, n = tanh(x + r q) with q = h' R + b.
"""

from __future__ import annotations

from typing import NoReturn

from burnish.graph import Builder, Tensor
from burnish.operators.recurrent.layer import (
    Direction,
    Recurrence,
    before,
    given_or_zeros,
    hidden_states,
    recurrent_layer,
    refused,
    split,
    split_rows,
    weight_gradient,
    where_live,
)
from burnish.operators.registry import Operation, gradient, training_form
from burnish.operators.semantic import Inference, Operands, OutputType, SemanticOperator
from burnish.operators.time_loop import Tensors, scan

GRU = Recurrence(3, (5,), None, ("sigmoid", "tanh"), (("sigmoid",), ("tanh",)), keeps_biases_apart=True)


def _last_if_linear(infer: Inference) -> Inference:
    """The last output is there with ``linear_before_reset`` alone."""

    def of_operands(operands: Operands) -> list[OutputType]:
        types = list(infer(operands))
        return types if operands.attributes["linear_before_reset"] else types[:-1]

    return of_operands


GRU_STEPS = SemanticOperator(
    "GRUSteps",
    ("z", "r", "initial_h", "bias", "live"),
    ("h", "last_h", "update_reset", "candidate", "inside"),
    _last_if_linear(hidden_states(("z", 1), ("initial_h", 1), ("z", 2), ("z", 1), ("z", 1))),
    internal=("update_reset", "candidate", "inside"),
)
GRU_STEPS_GRAD = SemanticOperator(
    "GRUStepsGrad",
    ("r", "initial_h", "h", "update_reset", "candidate", "inside", "dh", "d_last_h", "live"),
    ("dz", "d_initial_h", "d_inside"),
    _last_if_linear(hidden_states(("h", 3), ("initial_h", 1), ("h", 1))),
)


@training_form("GRU", since=7)
def gru(op: Operation) -> tuple[Tensor | None, ...] | None:
    linear = int(op.attribute("linear_before_reset", 0))

    def run(direction: Direction) -> tuple[Tensor, ...]:
        z, (h,), hidden, bias = direction.z, direction.initial, direction.hidden, direction.recurrent_bias
        if bias is not None:
            # With linear_before_reset the bias of the candidate is multiplied by r: it cannot be added in front.
            outside, inside = split_rows(bias, 2 * hidden, hidden) if linear else (bias, None)
            if linear:
                outside = op.builder.op("Pad", outside, op.builder.integers([0, hidden]))
            z, bias = z + outside, inside
        operands = (z, direction.r, h, bias, direction.live)
        reverse = int(direction.reverse)
        return GRU_STEPS.emit(*operands, reverse=reverse, hidden_size=hidden, linear_before_reset=linear)[:2]

    return recurrent_layer(op, GRU, run)


@gradient("GRU", since=7)
def gru_gradient(op: Operation, *_: Tensor | None) -> NoReturn:
    raise refused(op, GRU)


@GRU_STEPS.gradient
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
        # What the recurrent weight of the candidate is multiplied with, and the cotangent of their product.
        factor = previous if linear else split(update_reset, hidden, hidden)[1] * previous
        parts = [(of_gates, previous), (d_inside[0] if linear else of_candidate, factor)]
        dr = builder.op("Concat", *(weight_gradient(*part) for part in parts), axis=0, like=r)
    d_bias = None
    if bias is not None and op.wants(3):
        d_bias = builder.op("ReduceSum", d_inside[0], builder.integers([0, 1]), keepdims=0, like=bias)
    return dz, dr, d_initial_h, d_bias, None


@GRU_STEPS.lowering
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


@GRU_STEPS_GRAD.lowering
def lower_gru_steps_grad(op: Operation) -> tuple[Tensor, ...]:
    """Every cotangent of a gate is that of h times what is known of the gates; without linear_before_reset, but for that of r."""
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

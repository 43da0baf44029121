"""Operators with bodies: branches (If), loops (Loop), recursions over slices (Scan).

Their gradients are such nodes again: an If gives an If with the same condition, a Loop or Scan gives a Loop from the last
iteration to the first. A body of the gradient recomputes the values that it reads from the forward body: from captured values
and, in loops, from the states at the start of each iteration, which the forward pass keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, zeros_like
from burnish.operators import axis_rules
from burnish.operators.control_bodies import (
    Recursion,
    Stack,
    added_up,
    body_of,
    copy_of_body,
    count_of,
    emit_with_bodies,
    finish_body,
    return_from,
    reverse,
    stacked_input,
)
from burnish.operators.registry import Operation, Operator

BRANCHES = ("then_branch", "else_branch")


def branch(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return, for each captured value, its gradient in the branch taken: zeros if that branch does not depend on it."""
    count, captured = len(op.inputs), op.captured
    wanted = [value for index, value in enumerate(captured) if op.wants(count + index)]
    passes = {name: _reverse_pass(op, name, wanted, cotangents) for name in BRANCHES}
    reached = [value for value in wanted if any(gradients[value] is not None for _, gradients in passes.values())]
    if not reached:
        return (None,) * (count + len(captured))
    for builder, gradients in passes.values():
        return_from(builder, [gradients[value] or zeros_like(builder.tensor(value)) for value in reached])
        finish_body(op, builder.graph)
    bodies = {name: builder.graph for name, (builder, _) in passes.items()}
    results = emit_with_bodies(op.builder, "If", [op.input], bodies, [op.builder.tensor(value) for value in reached])
    by_value = dict(zip(reached, results, strict=True))
    return (*(None for _ in range(count)), *(by_value.get(value) for value in captured))


def _reverse_pass(
    op: Operation, name: str, wanted: list[ir.Value], cotangents: tuple[Tensor | None, ...]
) -> tuple[Builder, dict[ir.Value, Tensor | None]]:
    body, outputs = copy_of_body(body_of(op, name))
    builder = Builder(body)
    pairs = zip(outputs, cotangents, strict=True)
    incoming = [(output, builder.tensor(cotangent.value)) for output, cotangent in pairs if cotangent is not None]
    return builder, op.differentiate(builder, added_up(incoming), wanted)


def loop(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of Loop. The iteration numbers are stacked too, which gives their count, even if it is 0."""
    body = body_of(op, "body")
    states = len(op.inputs) - 2
    rows = len(body.outputs) - 1 - states
    stacks = [Stack()] * rows

    def counted() -> Tensor:
        return count_of(stacked_input(op, body, 0, 1, states, stacks))

    recursion = Recursion(op, body, states, (2, 2, 1), (), stacks, counted)

    def counters(builder: Builder, iteration: Tensor) -> Sequence[Tensor]:
        number = iteration if not body.inputs[0].shape else builder.op("Reshape", iteration, builder.integers([1]))
        return [number, builder.constant(np.ones([1] * len(body.inputs[1].shape or ()), bool))]

    return reverse(recursion, cotangents, counters)


def scan(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of Scan: slices along any axis, in either direction; opset 9 and later."""
    body = body_of(op, "body")
    sliced = int(op.attribute("num_scan_inputs"))
    states = len(op.inputs) - sliced
    slices, rows = _stacks(op, "input", sliced), _stacks(op, "output", len(body.outputs) - states)

    def counted() -> Tensor:
        return count_of(op.required(states), slices[0].axis)

    recursion = Recursion(op, body, states, (0, 0, 0), slices, rows, counted)
    return reverse(recursion, cotangents, lambda builder, iteration: ())


def _stacks(op: Operation, kind: str, count: int) -> list[Stack]:
    axes = op.attribute(f"scan_{kind}_axes", (0,) * count)
    directions = op.attribute(f"scan_{kind}_directions", (0,) * count)
    return [Stack(axis, bool(direction)) for axis, direction in zip(axes, directions, strict=True)]


OPERATORS = [
    Operator("If", gradient=branch, axes=axis_rules.branches),
    Operator("Loop", gradient=loop, axes=axis_rules.loop),
    Operator("Scan", since=9, gradient=scan, axes=axis_rules.scan, mixes=axis_rules.scanned),
]

"""Scan: the gradient is a Loop over the slices, from the last iteration to the first."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.operators.control.bodies import body_of
from burnish.operators.control.recursion import Recursion, Stack, count_of, reverse
from burnish.operators.registry import Operation, gradient


@gradient("Scan", since=9)
def scan(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Slices along any axis, in either direction; opset 9 and later."""
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

"""Loop, counted and while: the gradient is a Loop over as many iterations as there were."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burnish.graph import Builder, Tensor
from burnish.operators.control.bodies import body_of
from burnish.operators.control.recursion import Recursion, Stack, count_of, reverse, stacked_input
from burnish.operators.registry import Operation, gradient


@gradient("Loop")
def loop(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """The number of each iteration is stacked too: that tells how many there were, also of none."""
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

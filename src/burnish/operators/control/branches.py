"""If: the gradient is an If by the same condition."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, Tensor, zeros_like
from burnish.operators.control.bodies import added_up, body_of, copy_of_body, emit_with_bodies, finish_body, return_from
from burnish.operators.registry import Operation, gradient

BRANCHES = ("then_branch", "else_branch")


@gradient("If")
def branch(op: Operation, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """For each captured value, its gradient in the branch that is taken: zeros where that one does not depend on it."""
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
    """Differentiate a copy of a branch."""
    body, outputs = copy_of_body(body_of(op, name))
    builder = Builder(body)
    pairs = zip(outputs, cotangents, strict=True)
    incoming = [(output, builder.tensor(cotangent.value)) for output, cotangent in pairs if cotangent is not None]
    return builder, op.differentiate(builder, added_up(incoming), wanted)

"""Which values of a graph depend on others in a way that a derivative sees."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from burnish.graph.uses import operands_of
from burnish.operators.semantic import differentiable_outputs


def reached_from(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """Return ``sources``, and the floating-point values that nodes, in their order, compute from them: these carry gradients."""
    reached = set(sources)
    for node in nodes:
        if any(value in reached for value in operands_of(node)):
            reached.update(differentiable_outputs(node))
    return reached


def needed_for(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Return ``targets``, and what nodes, in their order, compute them from."""
    needed = set(targets)
    for node in reversed(list(nodes)):
        if any(output in needed for output in differentiable_outputs(node)):
            needed.update(value for value in operands_of(node) if value is not None)
    return needed

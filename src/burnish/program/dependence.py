"""Why an initializer has no gradient: what stands between it and the values that are differentiated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from burnish.graph import FLOATING, describe_node
from burnish.importer.operands import CONFIGURATION_OPERANDS, NOT_DIFFERENTIABLE, STATISTIC_OPERANDS

SHOWN = 3


def why_no_weight(graph: ir.Graph, value: ir.Value) -> str:
    """Return why an initializer of a canonical model is no weight, as a clause: ``no operator reads it``."""
    if value.dtype not in FLOATING:
        return "it is not floating-point"
    if value.shape is not None and len(value.shape) == 0:
        return "it is a scalar, which counts as a constant"
    return why_no_gradient(graph, value, graph.outputs)


def why_no_gradient(graph: ir.Graph, value: ir.Value, targets: Collection[ir.Value]) -> str:
    """Return why no gradient flows from ``targets`` to ``value``, as a clause that names the first operator in the way.

    Args:
        graph: the graph that both belong to; the bodies of its nodes are not looked into.
        value: an input or initializer.
        targets: what is differentiated.
    """
    if not value.uses():
        return "no operator reads it"
    needed = set(targets)
    for node in reversed(list(graph)):
        if any(output in needed for output in node.outputs):
            needed.update(operand for operand in node.inputs if operand is not None)
    if value not in needed:
        return f"nothing that leads to {_names(targets)} reads it"
    reached = {value}
    for node in graph:
        operands = [index for index, operand in enumerate(node.inputs) if operand is not None and operand in reached]
        outputs = [output for output in node.outputs if output.dtype in FLOATING]
        if not operands:
            continue
        if outputs and _passes_gradient(node, operands):
            reached.update(outputs)
        elif any(output in needed for output in node.outputs):
            return f"{describe_node(node)} lets no gradient through"
    return f"its gradient from {_names(targets)} is zero"


def reasons(named: Sequence[tuple[str, str]]) -> str:
    """Return ``'first': why; 'second': why; and 4 more``."""
    shown = "; ".join(f"'{name}': {why}" for name, why in named[:SHOWN])
    return shown + (f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else "")


def _passes_gradient(node: ir.Node, operands: Sequence[int]) -> bool:
    if node.domain != "":
        return True
    without = {*CONFIGURATION_OPERANDS.get(node.op_type, ()), *STATISTIC_OPERANDS.get(node.op_type, ())}
    return node.op_type not in NOT_DIFFERENTIABLE and any(index not in without for index in operands)


def _names(targets: Collection[ir.Value]) -> str:
    return f"'{next(iter(targets)).name}'" if len(targets) == 1 else "an output"

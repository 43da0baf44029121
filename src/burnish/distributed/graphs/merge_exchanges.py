"""One exchange in place of several: of what is known at the same time, and of what nothing waits for.

The cost of a small exchange is its latency. Two exchanges can be one where neither waits for the other: the first layers of two
branches of a network, and their gradients. Exchanges are put into levels: one level more than the highest of those that the
operands depend on. Those of one level never depend on each other, and are one exchange. What is reported of a step, and running
statistics that are averages, are waited for by nothing in it: they are one exchange at its end.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, remove_node, replace_uses
from burnish.ops.collectives import (
    ALL_GATHER,
    ALL_GATHER_ROWS,
    ALL_REDUCE,
    ALL_REDUCE_START,
    LOOK_UP_ROWS,
    OWN_GRADIENTS,
    SCATTER_ROWS,
)
from burnish.ops.semantic import semantic_operator

LATE = frozenset({"figure", "average"})
ALONE = frozenset({ALL_GATHER_ROWS, LOOK_UP_ROWS, SCATTER_ROWS})
"""Exchanges of rows, which were put in for all that they are of."""
BEGINNING = frozenset({ALL_REDUCE, ALL_GATHER, ALL_REDUCE_START}) | ALONE
"""What begins an exchange."""


def share_exchanges(graph: ir.Graph) -> None:
    """Merge, in place, exchanges that do not wait for each other; those of gradients have rules of their own."""
    merged: dict[Hashable, list[ir.Node]] = {}
    levels: dict[ir.Value, int] = {}
    for node in graph:
        level = max((levels.get(value, 0) for value in node.inputs if value is not None), default=0)
        if is_exchange(node):
            purpose = attribute_value(node, "purpose", "")
            kind = (node.op_type, attribute_value(node, "group", 0), attribute_value(node, "counted", 0))
            if purpose in LATE:
                merged.setdefault(("late", *kind), []).append(node)
            elif semantic_operator(node) in ALONE:
                level += 1
            elif purpose != "gradient":
                level += 1
                merged.setdefault((level, *kind), []).append(node)
        levels.update(dict.fromkeys(node.outputs, level))
    for nodes in merged.values():
        if len(nodes) > 1:
            _merge(graph, nodes)
    graph.sort()


def is_exchange(node: ir.Node) -> bool:
    return semantic_operator(node) in BEGINNING


def number_exchanges(graph: ir.Graph) -> None:
    """Give every exchange, now or of what is made of ``OwnGradients``, its place in the one order of all workers, in place."""
    for order, node in enumerate(node for node in graph if is_exchange(node) or OWN_GRADIENTS.is_of(node)):
        node.attributes["order"] = ir.AttrInt64("order", order)


def _merge(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """One exchange of all that these exchange, where the last of them stands."""
    last = nodes[-1]
    operator, builder = semantic_operator(last), Builder(graph, before=last)
    assert operator is not None
    counted = attribute_value(last, "counted", 0)
    operands = [value for node in nodes for value in node.inputs[: len(node.inputs) - counted]]
    operands += last.inputs[len(last.inputs) - counted :] if counted else []
    results = operator.emit(
        *(None if value is None else builder.tensor(value) for value in operands),
        **{name: attribute_value(last, name, None) for name in ("purpose", "group", "workers", "counted")},
    )
    outputs = [output for node in nodes for output in node.outputs]
    for output, result in zip(outputs, results, strict=True):
        name, is_output = output.name, output.is_graph_output()
        replace_uses(output, result.value)
        if is_output:
            output.name = None
            result.value.name = name
    for node in nodes:
        remove_node(node)

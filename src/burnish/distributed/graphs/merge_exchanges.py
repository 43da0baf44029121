"""One exchange in place of several: of what is known at the same time, and of what nothing waits for.

The cost of a small exchange is its latency. Two exchanges can be one if neither waits for the other: the first layers of two
branches of a network, and their gradients. Exchanges are put into levels: one level more than the highest of those that the
operands depend on. Those of one level never depend on each other, and are one exchange. What is reported of a step, and running
statistics that are averages, are waited for by nothing in it: they are one exchange at its end.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node
from burnish.graph.uses import read_by
from burnish.operators.collectives import (
    ALL_GATHER,
    ALL_GATHER_ROWS,
    ALL_REDUCE,
    ALL_REDUCE_START,
    LOOK_UP_ROWS,
    OWN_GRADIENTS,
    SCATTER_ROWS,
)
from burnish.operators.semantic import semantic_operator

LATE = frozenset({"figure", "average"})
ALONE = frozenset({ALL_GATHER_ROWS, LOOK_UP_ROWS, SCATTER_ROWS})
"""Exchanges of rows, which were put in for all that they are of."""
BEGINNING = frozenset({ALL_REDUCE, ALL_GATHER, ALL_REDUCE_START}) | ALONE
"""What begins an exchange."""


def share_exchanges(graph: ir.Graph) -> None:
    """Merge, in place, exchanges that do not wait for each other; those of gradients have rules of their own."""
    exchanges = {node: attribute_value(node, "purpose", "") for node in graph if is_exchange(node)}
    awaited = {node for node, purpose in exchanges.items() if purpose not in LATE and purpose != "gradient"}
    levels = by_level(graph, awaited) | {-1: [node for node, purpose in exchanges.items() if purpose in LATE]}
    merged: dict[Hashable, list[ir.Node]] = {}
    for level, nodes in levels.items():
        for node in nodes:
            if semantic_operator(node) not in ALONE:
                kind = (node.op_type, attribute_value(node, "group", 0), attribute_value(node, "counted", 0))
                merged.setdefault((level, *kind), []).append(node)
    for nodes in merged.values():
        if len(nodes) > 1:
            _merge(graph, nodes)
    graph.sort()


def by_level(graph: ir.Graph, exchanges: Container[ir.Node]) -> dict[int, list[ir.Node]]:
    """Return exchanges of a graph in order, by how many others, one after another, their operands wait for."""
    found: dict[int, list[ir.Node]] = {}
    levels: dict[ir.Value, int] = {}
    for node in graph:
        level = max((levels.get(value, 0) for value in read_by(node)), default=0)
        if node in exchanges:
            found.setdefault(level, []).append(node)
            level += 1
        levels.update(dict.fromkeys(node.outputs, level))
    return found


def is_exchange(node: ir.Node) -> bool:
    return semantic_operator(node) in BEGINNING


def number_exchanges(graph: ir.Graph) -> None:
    """Give every exchange, now or of what is made of ``OwnGradients``, its place in the one order of all workers, in place."""
    for order, node in enumerate(node for node in graph if is_exchange(node) or OWN_GRADIENTS.is_of(node)):
        node.attributes["order"] = ir.AttrInt64("order", order)


def next_order(graph: ir.Graph) -> int:
    """Return the place after the last exchange that has one."""
    return 1 + max((attribute_value(node, "order", -1) for node in graph if node.domain == BURNISH_DOMAIN), default=-1)


def _merge(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Put one exchange in place of several, at the last of them."""
    last = nodes[-1]
    operator, builder = semantic_operator(last), Builder(graph, before=last)
    assert operator is not None
    counted = attribute_value(last, "counted", 0)
    operands = [value for node in nodes for value in node.inputs[: len(node.inputs) - counted]]
    results = operator.emit(
        *builder.tensors([*operands, *last.inputs[len(last.inputs) - counted :]]),
        **{name: attribute_value(last, name, None) for name in ("purpose", "group", "workers", "counted")},
    )
    start = 0
    for node in nodes:
        end = start + len(node.outputs)
        replace_node(node, results[start:end])
        start = end

"""Rewrites of a graph's exchanges: merging those that need not wait for each other, buckets of gradients, their order.

A small exchange costs its latency. Two exchanges can be one if neither waits for the other, such as those of the first layers of
two branches. Each exchange has a level: one more than the highest level that its operands depend on. Exchanges of one level never
depend on each other, and become one. Nothing in a step waits for reported figures and averaged running statistics: they are one
exchange at its end.

Gradients travel in buckets. The reverse pass comes to the last layers first; a bucket is exchanged while it goes on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Hashable, Mapping, Sequence

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, attribute_value, replace_node, replace_value, static_shape
from burnish.graph.uses import read_by
from burnish.operators.collectives import (
    ALL_GATHER,
    ALL_GATHER_ROWS,
    ALL_REDUCE,
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    GATHER_OWNED,
    LOOK_UP_ROWS,
    OWN_GRADIENTS,
    SCATTER_ROWS,
    WORKER_RANK,
)
from burnish.operators.semantic import semantic_operator
from burnish.program.signature import Entry, Role

LATE = frozenset({"figure", "average"})
ALONE = frozenset({ALL_GATHER_ROWS, LOOK_UP_ROWS, SCATTER_ROWS})
"""Exchanges of rows, which were put in for all tables that they are of."""
BEGINNING = frozenset({ALL_REDUCE, ALL_GATHER, ALL_REDUCE_START}) | ALONE
"""Operators that begin an exchange."""
JOINING = frozenset({ALL_REDUCE, ALL_REDUCE_FINISH, ALL_GATHER, ALL_GATHER_ROWS, GATHER_OWNED})
"""Operators whose results are the same on every worker."""


def is_exchange(node: ir.Node) -> bool:
    return semantic_operator(node) in BEGINNING


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


def number_exchanges(graph: ir.Graph) -> None:
    """Give every exchange its place in the one order of all workers, in place; ``OwnGradients`` become exchanges later."""
    for order, node in enumerate(node for node in graph if is_exchange(node) or OWN_GRADIENTS.is_of(node)):
        set_order(node, order)


def set_order(node: ir.Node, order: int) -> None:
    node.attributes["order"] = ir.AttrInt64("order", order)


def next_order(graph: ir.Graph) -> int:
    return 1 + max((attribute_value(node, "order", -1) for node in graph if node.domain == BURNISH_DOMAIN), default=-1)


def replace_by_exchanged(values: Sequence[ir.Value], results: Sequence[Tensor], order: int) -> None:
    """Let all but the exchange itself read, in place of its operands, its results; ``order`` is its place."""
    exchange = results[0].value.producer()
    assert exchange is not None
    set_order(exchange, order)
    for value, result in zip(values, results, strict=True):
        replace_value(value, result.value, but=exchange)


def bucket_gradients(graph: ir.Graph, bucket_size: int, accumulating: bool = False) -> None:
    """Replace, in place, the exchange of each gradient by one for each bucket of at least ``bucket_size`` bytes.

    ``accumulating`` puts ``OwnGradients`` in place of the exchange of a bucket; what is accumulated is exchanged instead.
    """
    nodes = list(graph)
    position = {node: index for index, node in enumerate(nodes)}

    def ready(exchange: ir.Node) -> int:
        """The position of the node that computes the last operand."""
        producers = [value.producer() for value in exchange.inputs if value is not None]
        return max((position[producer] for producer in producers if producer is not None), default=-1)

    exchanges = [node for node in nodes if node.domain == BURNISH_DOMAIN and attribute_value(node, "purpose", "") == "gradient"]
    buckets: list[list[ir.Node]] = []
    size = 0
    for node in sorted(exchanges, key=ready):
        value = node.inputs[0]
        assert value is not None
        first = buckets[-1][0].inputs[0] if buckets else None
        if first is None or size >= bucket_size or first.dtype != value.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(node)
        size += int(math.prod(static_shape(value) or ()) * (4 if value.dtype is None else value.dtype.itemsize))

    operator, purpose = (OWN_GRADIENTS, None) if accumulating else (ALL_REDUCE_START, "gradient")
    begun = []
    for bucket in buckets:
        builder = Builder(graph, before=nodes[max(map(ready, bucket)) + 1])
        gradients, samples = builder.tensors(node.inputs[0] for node in bucket), builder.tensors(bucket[0].inputs[1:])
        begun.append(operator.emit(*gradients, *samples, purpose=purpose, counted=attribute_value(bucket[0], "counted", None)))
    for bucket, results in zip(buckets, begun, strict=True):
        if not accumulating:
            builder = Builder(graph, before=max(bucket, key=position.__getitem__))
            results = ALL_REDUCE_FINISH.emit(*builder.tensors([results[0].value, *(node.inputs[0] for node in bucket)]))
        for node, result in zip(bucket, results, strict=True):
            replace_node(node, result)


def check_replicated(graph: ir.Graph, own: Collection[str], outputs: Mapping[str, Entry]) -> None:
    """Raise ConfigurationError if an output is computed from a worker's own part of the batch without an exchange.

    ``own`` names the inputs of which each worker has its own; ``outputs`` are those that must not differ, by name.
    """
    differing = {value for value in graph.inputs if value.name in own}
    for node in graph:
        if semantic_operator(node) in JOINING and not attribute_value(node, "group", 0):
            continue
        if WORKER_RANK.is_of(node) or any(value in differing for value in read_by(node)):
            differing.update(node.outputs)
    for value in graph.outputs:
        entry = outputs.get(value.name or "")
        if value not in differing or entry is None:
            continue
        if entry.role is Role.METRIC:
            raise ConfigurationError(
                f"parallel=...: the metric '{entry.name}' of a batch is no function of sums over its samples, and workers cannot "
                "add it up: leave it out of burnish.compile(metrics=...), and evaluate it with a session of one worker"
            )
        raise ConfigurationError(
            f"parallel=...: '{entry.name}' would differ between workers: it is computed from each worker's own part of the "
            "batch. Train this program with one worker"
        )

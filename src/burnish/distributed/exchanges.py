"""Rewrites of a graph's exchanges: merging, buckets of gradients, and their order.

Latency dominates the cost of a small exchange, so independent exchanges of the same level are merged. Nothing in a step waits for
reported figures and averaged statistics: they are one exchange at the end. Gradients are sent while the reverse pass continues.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Hashable, Mapping, Sequence

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, attribute_value, replace_node, replace_value, static_shape
from burnish.graph.uses import read_by
from burnish.operators import collectives
from burnish.operators.semantic import semantic_operator
from burnish.program.signature import Entry, Role

LATE = frozenset({"figure", "average"})
ALONE = frozenset({collectives.ALL_GATHER_ROWS, collectives.LOOK_UP_ROWS, collectives.SCATTER_ROWS})
"""Exchanges of rows, each already made for all of its tables together."""
BEGINNING = frozenset({collectives.ALL_REDUCE, collectives.ALL_GATHER, collectives.ALL_REDUCE_START}) | ALONE
"""Operators that begin an exchange."""
JOINING = frozenset(
    {
        collectives.ALL_REDUCE,
        collectives.ALL_REDUCE_FINISH,
        collectives.ALL_GATHER,
        collectives.ALL_GATHER_ROWS,
        collectives.GATHER_OWNED,
    }
)
"""Operators with the same result on every worker."""


def is_exchange(node: ir.Node) -> bool:
    return semantic_operator(node) in BEGINNING


def share_exchanges(graph: ir.Graph) -> bool:
    exchanges = {node: attribute_value(node, "purpose", "") for node in graph if is_exchange(node)}
    awaited = {node for node, purpose in exchanges.items() if purpose not in LATE and purpose != "gradient"}
    levels = by_level(graph, awaited) | {-1: [node for node, purpose in exchanges.items() if purpose in LATE]}
    merged: dict[Hashable, list[ir.Node]] = {}
    for level, nodes in levels.items():
        for node in nodes:
            if semantic_operator(node) not in ALONE:
                kind = (node.op_type, attribute_value(node, "group", 0), attribute_value(node, "counted", 0))
                merged.setdefault((level, *kind), []).append(node)
    several = [nodes for nodes in merged.values() if len(nodes) > 1]
    for nodes in several:
        last = nodes[-1]
        operator = semantic_operator(last)
        assert operator is not None
        counted = attribute_value(last, "counted", 0)
        operands = [value for node in nodes for value in node.inputs[: len(node.inputs) - counted]]
        results = operator.emit(
            *Builder(graph, before=last).tensors([*operands, *last.inputs[len(last.inputs) - counted :]]),
            **{name: attribute_value(last, name, None) for name in ("purpose", "group", "workers", "counted")},
        )
        for node in nodes:
            own, results = results[: len(node.outputs)], results[len(node.outputs) :]
            replace_node(node, own)
    graph.sort()
    return bool(several)


def by_level(graph: ir.Graph, exchanges: Container[ir.Node]) -> dict[int, list[ir.Node]]:
    """Return exchanges in order, by the number of successive exchanges that their operands wait for."""
    found: dict[int, list[ir.Node]] = {}
    levels: dict[ir.Value, int] = {}
    for node in graph:
        level = max((levels.get(value, 0) for value in read_by(node)), default=0)
        if node in exchanges:
            found.setdefault(level, []).append(node)
            level += 1
        levels.update(dict.fromkeys(node.outputs, level))
    return found


def number_exchanges(graph: ir.Graph) -> bool:
    exchanges = [node for node in graph if is_exchange(node) or collectives.OWN_GRADIENTS.is_of(node)]
    for order, node in enumerate(exchanges):
        set_order(node, order)
    return bool(exchanges)


def set_order(node: ir.Node, order: int) -> None:
    node.attributes["order"] = ir.AttrInt64("order", order)


def next_order(graph: ir.Graph) -> int:
    return 1 + max((attribute_value(node, "order", -1) for node in graph if node.domain == BURNISH_DOMAIN), default=-1)


def replace_by_exchanged(values: Sequence[ir.Value], results: Sequence[Tensor], order: int) -> None:
    exchange = results[0].value.producer()
    assert exchange is not None
    set_order(exchange, order)
    for value, result in zip(values, results, strict=True):
        replace_value(value, result.value, but=exchange)


def bucket_gradients(graph: ir.Graph, bucket_size: int, accumulating: bool = False) -> bool:
    """Replace, in place, the exchanges of gradients by one per bucket, or with ``accumulating`` by one ``OwnGradients`` per
    bucket.
    """
    nodes = list(graph)
    position: dict[ir.Node | None, int] = {None: -1, **{node: index for index, node in enumerate(nodes)}}

    def ready(exchange: ir.Node) -> int:
        return max((position[value.producer()] for value in exchange.inputs if value is not None), default=-1)

    exchanges = [node for node in nodes if node.domain == BURNISH_DOMAIN and attribute_value(node, "purpose", "") == "gradient"]
    buckets: list[list[ir.Node]] = []
    size, dtype = bucket_size, None
    for node in sorted(exchanges, key=ready):
        value = node.inputs[0]
        assert value is not None
        if size >= bucket_size or dtype != value.dtype:
            buckets.append([])
            size, dtype = 0, value.dtype
        buckets[-1].append(node)
        size += int(math.prod(static_shape(value) or ()) * (4 if dtype is None else dtype.itemsize))
    operator, purpose = (collectives.OWN_GRADIENTS, None) if accumulating else (collectives.ALL_REDUCE_START, "gradient")
    begun = []
    for bucket in buckets:
        builder = Builder(graph, before=nodes[max(map(ready, bucket)) + 1])
        gradients, samples = builder.tensors(node.inputs[0] for node in bucket), builder.tensors(bucket[0].inputs[1:])
        begun.append(operator.emit(*gradients, *samples, purpose=purpose, counted=attribute_value(bucket[0], "counted", None)))
    for bucket, results in zip(buckets, begun, strict=True):
        if not accumulating:
            builder = Builder(graph, before=max(bucket, key=position.__getitem__))
            results = collectives.ALL_REDUCE_FINISH.emit(
                *builder.tensors([results[0].value, *(node.inputs[0] for node in bucket)])
            )
        for node, result in zip(bucket, results, strict=True):
            replace_node(node, result)
    return bool(buckets)


def check_replicated(graph: ir.Graph, own: Collection[str], outputs: Mapping[str, Entry]) -> None:
    """Raise ConfigurationError if one of ``outputs`` depends, without an exchange, on a worker's ``own`` inputs."""
    differing = {value for value in graph.inputs if value.name in own}
    for node in graph:
        if semantic_operator(node) in JOINING and not attribute_value(node, "group", 0):
            continue
        if collectives.WORKER_RANK.is_of(node) or any(value in differing for value in read_by(node)):
            differing.update(node.outputs)
    for entry in [outputs[value.name or ""] for value in graph.outputs if value in differing and value.name in outputs]:
        if entry.role is Role.METRIC:
            raise ConfigurationError(
                f"parallel=...: the metric '{entry.name}' of a batch is no function of sums over its samples, and workers cannot "
                "add it up: leave it out of burnish.compile(metrics=...), and evaluate it with a session of one worker"
            )
        raise ConfigurationError(
            f"parallel=...: '{entry.name}' would differ between workers: it is computed from each worker's own part of the "
            "batch. Train this program with one worker"
        )

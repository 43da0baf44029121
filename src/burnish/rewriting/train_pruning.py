"""Pruning during training for models from ``burnish.surgery.prune``: masks that grow by a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from burnish.graph import Builder, Tensor, static_shape
from burnish.graph.annotations import PruningMark, masked_weights


def train_pruning(graph: ir.Graph, step: Callable[[], ir.Value]) -> dict[ir.Value, ir.Value]:
    """Emit the next mask of each weight with a pruning schedule, in place.

    At step t from ``begin`` to ``end`` the fraction ``s = sparsity * (1 - (1 - (t - begin) / (end - begin)) ** 3)`` of the
    weights nearest to zero is masked (Zhu and Gupta 2017, equation 1, starting without sparsity). Masked weights stay masked.

    Args:
        graph: graph of a canonical model.
        step: returns the step counter, an int64 scalar; called only if a mask changes.

    Returns:
        The next value of each mask that a step updates.
    """
    groups: dict[object, list[tuple[ir.Node, PruningMark]]] = {}
    for node, mark in masked_weights(graph):
        if mark.changes:
            groups.setdefault(mark if mark.scope == "global" else node, []).append((node, mark))
    updated: dict[ir.Value, ir.Value] = {}
    for members in groups.values():
        _update(graph, [node for node, _ in members], members[0][1], step, updated)
    return updated


def _update(
    graph: ir.Graph, nodes: Sequence[ir.Node], mark: PruningMark, step: Callable[[], ir.Value], updated: dict[ir.Value, ir.Value]
) -> None:
    builder = Builder(graph)
    sizes = [builder.op("Abs", builder.tensor(node.outputs[0])) for node in nodes]
    flat = [builder.op("Reshape", size, builder.integers([-1])) for size in sizes]
    every = flat[0] if len(flat) == 1 else builder.op("Concat", *flat, axis=0)
    count = sum(math.prod(static_shape(node.outputs[0]) or ()) for node in nodes)
    now = builder.tensor(step())
    changes = _changes(now, mark)
    # If nothing changes, TopK finds only the largest, which is fast.
    kept = builder.op("Where", changes, _kept(now, mark, count), builder.scalar(1, now))
    largest, _ = builder.op("TopK", every, builder.op("Reshape", kept, builder.integers([1])), outputs=2, axis=0, sorted=0)
    threshold = builder.op("ReduceMin", largest, keepdims=0)
    for node, size in zip(nodes, sizes, strict=True):
        mask = node.inputs[1]
        assert mask is not None
        before = builder.tensor(mask)
        following = before * builder.cast(builder.op("GreaterOrEqual", size, threshold), before.dtype)
        updated[mask] = builder.op("Where", changes, following, before).value


def _changes(now: Tensor, mark: PruningMark) -> Tensor:
    builder = now.builder
    inside = builder.op("And", builder.op("GreaterOrEqual", now, mark.begin), builder.op("LessOrEqual", now, mark.end))
    turn = builder.op("Equal", builder.op("Mod", now - mark.begin, mark.every), 0)
    return builder.op("And", inside, builder.op("Or", turn, builder.op("Equal", now, mark.end)))


def _kept(now: Tensor, mark: PruningMark, count: int) -> Tensor:
    builder = now.builder
    left = builder.cast(mark.end - now, ir.DataType.DOUBLE) / float(mark.end - mark.begin)
    part = (1.0 - left * left * left) * mark.sparsity
    kept = builder.op("Round", (1.0 - part) * float(count))
    return builder.op("Min", builder.op("Max", builder.cast(kept, ir.DataType.INT64), 1), count)

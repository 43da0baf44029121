"""Accumulation of several workers: each adds up the gradients of its own parts, and one exchange sums them for the update.

A sum over micro-batches and one over workers may be taken in either order. In between, what a worker has accumulated is its own:
the state of the run is the sum over the workers (``runners.accumulating``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from burnish import optim
from burnish.compiler.executable import Executable
from burnish.distributed.graphs.replication import check_replicated
from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node
from burnish.ops.collectives import (
    ALL_REDUCE,
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    ALL_REDUCE_WHERE,
    OWN_GRADIENTS,
    PARTS_OF,
    all_reduce,
)
from burnish.ops.semantic import SemanticOperator
from burnish.optim.accumulate import COUNT, Accumulate
from burnish.optim.average import ParameterAverage
from burnish.optim.slots import slot_of
from burnish.optim.wrapper import layers_of
from burnish.program import Role
from burnish.program.signature import Entry

MARKS = (ALL_REDUCE_WHERE, PARTS_OF)
COUNT_ENTRY = COUNT.entry()


def accumulates(executable: Executable) -> bool:
    """Whether gradients are accumulated as the reverse pass leaves them: nothing around the accumulation reads them.

    A transform in a chain around it needs the gradient of each whole micro-batch.
    """
    for layer in layers_of(optim.get(executable.options["optimizer"])):
        if isinstance(layer, Accumulate):
            return layer.every > 1
        if not isinstance(layer, ParameterAverage):
            return False
    return False


def accumulated_entries(executable: Executable) -> tuple[str, ...]:
    """The state entries of which each worker has its own part."""
    slots = optim.slots_by_options(executable.options["optimizer"])
    return tuple(entry.name for entry in executable.signature.state if slot_of(entry.name, slots).is_partial)


def exchanging_for_updates(executable: Executable) -> Executable:
    """Return an executable of several workers, with ``OwnGradients``, that exchanges what was accumulated of them."""
    signature = executable.signature["step"]
    own = {entry.name for entry in signature.inputs_of(Role.DATA, Role.LABEL, Role.SAMPLES)}
    accumulated = set(accumulated_entries(executable))
    outputs = {entry.name: entry for entry in signature.outputs if entry.updates not in accumulated}
    return executable.rewritten(lambda model: exchange_accumulated(model, own, outputs), "step", marks=MARKS)


def exchange_accumulated(model: ir.Model, own: Collection[str], outputs: Mapping[str, Entry]) -> None:
    """Exchange, in place, the accumulated gradients of a step's graph, in the buckets of the gradients.

    A bucket is begun as soon as its gradients are added: what adds them is moved behind what computes them.

    Args:
        model: a step with the optimizer's marks in it.
        own: names of inputs of which each worker has its own.
        outputs: what is the same on every worker, by name.
    """
    graph = model.graph
    for node in _nodes(graph, PARTS_OF):
        assert node.inputs[0] is not None
        builder = Builder(graph, before=node)
        replace_node(node, all_reduce((builder.tensor(node.inputs[0]),), "count"))
    marks = _nodes(graph, ALL_REDUCE_WHERE)
    buckets = _nodes(graph, OWN_GRADIENTS)
    needed = {mark: _behind(mark, buckets) for mark in marks}
    for bucket in buckets:
        members = [mark for mark in marks if bucket in needed[mark]]
        if members:
            _exchange(graph, bucket, members, {node for mark in members for node in needed[mark]})
    _number(graph, buckets)
    check_replicated(graph, own, outputs)


def _nodes(graph: ir.Graph, operator: SemanticOperator) -> list[ir.Node]:
    return [node for node in graph if operator.is_of(node)]


def _behind(mark: ir.Node, buckets: Sequence[ir.Node]) -> set[ir.Node]:
    """The nodes that a mark's operands are computed by, back to the bucket that its gradient is of, which is among them."""
    found: set[ir.Node] = set()
    pending = [mark]
    while pending:
        for value in pending.pop().inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in found:
                found.add(producer)
                if producer not in buckets:
                    pending.append(producer)
    return found


def _exchange(graph: ir.Graph, bucket: ir.Node, marks: Sequence[ir.Node], needed: set[ir.Node]) -> None:
    """Put one exchange of the operands of some marks behind a bucket, and wait for it where the last mark stands."""
    position = {node: index for index, node in enumerate(graph)}
    moved = sorted((node for node in needed if position[node] > position[bucket]), key=position.__getitem__)
    graph.remove(moved)
    graph.insert_after(bucket, moved)
    following = next(node for node in list(graph)[position[bucket] + len(moved) + 1 :])
    builder = Builder(graph, before=following)
    means = [builder.tensor(mark.inputs[0]) for mark in marks if mark.inputs[0] is not None]
    assert marks[0].inputs[1] is not None
    buffer = ALL_REDUCE_START(
        *means,
        builder.tensor(marks[0].inputs[1]),
        purpose="gradient",
        conditional=1,
        parameters=[f"param/{attribute_value(mark, 'parameter', '')}" for mark in marks],
        order=attribute_value(bucket, "order", 0),
    )
    builder = Builder(graph, before=max(marks, key=position.__getitem__))
    results = ALL_REDUCE_FINISH.emit(*(builder.tensor(tensor.value) for tensor in (buffer, *means)))
    for mark, result in zip(marks, results, strict=True):
        replace_node(mark, result)


def _number(graph: ir.Graph, buckets: Sequence[ir.Node]) -> None:
    """Let the exchanges of the update be the last, and buckets, whose numbers went to their exchanges, have none."""
    for bucket in buckets:
        bucket.attributes.pop("order", None)
    numbers = [attribute_value(node, "order", -1) for node in graph if node.domain == BURNISH_DOMAIN]
    for node in _nodes(graph, ALL_REDUCE):
        if "order" not in node.attributes:
            numbers.append(max(numbers) + 1)
            node.attributes["order"] = ir.AttrInt64("order", numbers[-1])

"""Accumulation of several workers: each adds up the gradients of its own parts, and one exchange sums them for the update.

A sum over micro-batches and one over workers may be taken in either order. In between, what a worker has accumulated is its own:
the state of the run is the sum over the workers (``runners.accumulating``).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish import optim
from burnish.compiler.executable import Executable
from burnish.distributed.graphs.merge_exchanges import next_order
from burnish.distributed.graphs.replication import check_replicated
from burnish.graph import Builder, attribute_value, replace_node
from burnish.graph.uses import ancestors_of
from burnish.operators.collectives import (
    ALL_REDUCE,
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    ALL_REDUCE_WHERE,
    OWN_GRADIENTS,
    PARTS_OF,
    all_reduce,
)
from burnish.optim.accumulate import COUNT, Accumulate
from burnish.optim.average import ParameterAverage
from burnish.optim.slots import slot_of
from burnish.optim.wrapper import layers_of
from burnish.program import Role

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

    def rewrite(model: ir.Model) -> None:
        exchange_accumulated(model.graph)
        check_replicated(model.graph, own, outputs)

    return executable.rewritten(rewrite, "step", marks=(ALL_REDUCE_WHERE, PARTS_OF))


def exchange_accumulated(graph: ir.Graph) -> None:
    """Exchange, in place, the accumulated gradients of a step's graph, in the buckets of the gradients.

    A bucket is begun as soon as its gradients are added: what adds them is moved to just after what computes them.
    """
    join_parts(graph, accumulating=True)
    needed = {mark: _needed_for(mark) for mark in graph if ALL_REDUCE_WHERE.is_of(mark)}
    for bucket in [node for node in graph if OWN_GRADIENTS.is_of(node)]:
        members = [mark for mark, nodes in needed.items() if bucket in nodes]
        if members:
            _exchange(graph, bucket, members, set[ir.Node]().union(*(needed[mark] for mark in members)))
        bucket.attributes.pop("order")  # which its exchange has now
    in_update = [node for node in graph if ALL_REDUCE.is_of(node) and "order" not in node.attributes]
    for order, node in enumerate(in_update, next_order(graph)):
        node.attributes["order"] = ir.AttrInt64("order", order)


def join_parts(graph: ir.Graph, accumulating: bool) -> None:
    """Exchange, in place, figures of gradients if these are each worker's own; leave those of whole gradients alone."""
    for node in [node for node in graph if PARTS_OF.is_of(node)]:
        own = Builder(graph, before=node).tensors(node.inputs)
        replace_node(node, all_reduce(own, "count") if accumulating else own)


def _needed_for(mark: ir.Node) -> set[ir.Node]:
    """The nodes that compute what a mark reads, back to the bucket of its gradient, which is among them."""
    operands = [value for value in mark.inputs if value is not None]
    values = set[ir.Value]().union(*(ancestors_of(operand, back_to=OWN_GRADIENTS.is_of) for operand in operands))
    return {producer for value in values if (producer := value.producer()) is not None}


def _exchange(graph: ir.Graph, bucket: ir.Node, marks: Sequence[ir.Node], needed: set[ir.Node]) -> None:
    """Put one exchange of the operands of some marks after a bucket, and wait for it at the last mark."""
    position = {node: index for index, node in enumerate(graph)}
    moved = sorted((node for node in needed if position[node] > position[bucket]), key=position.__getitem__)
    graph.remove(moved)
    graph.insert_after(bucket, moved)
    builder = Builder(graph, before=list(graph)[position[bucket] + len(moved) + 1])
    buffer = ALL_REDUCE_START(
        *builder.tensors([*(mark.inputs[0] for mark in marks), marks[0].inputs[1]]),
        purpose="gradient",
        conditional=1,
        parameters=[f"param/{attribute_value(mark, 'parameter', '')}" for mark in marks],
        order=attribute_value(bucket, "order", 0),
    )
    builder = Builder(graph, before=max(marks, key=position.__getitem__))
    results = ALL_REDUCE_FINISH.emit(*builder.tensors([buffer.value, *(mark.inputs[0] for mark in marks)]))
    for mark, result in zip(marks, results, strict=True):
        replace_node(mark, result)

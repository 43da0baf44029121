"""Gradient accumulation on several workers: each adds up its own gradients, and one exchange sums them for the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from burnish import optim
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.distributed.exchanges import check_replicated, next_order, set_order
from burnish.distributed.runner import SpreadRunner, summed
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator
from burnish.engines.split_graph import parted
from burnish.graph import Builder, attribute_value, replace_node
from burnish.graph.uses import ancestors_of
from burnish.operators import collectives
from burnish.optim.accumulate import COUNT, Accumulate
from burnish.optim.average import ParameterAverage
from burnish.optim.base import layers_of
from burnish.optim.slots import slot_of
from burnish.program import Role


def accumulates(graphs: LoweredGraphs) -> bool:
    """Return True if gradients accumulate in the form the reverse pass produces; a chain around needs summed ones."""
    for layer in layers_of(optim.get(graphs.options["optimizer"])):
        if isinstance(layer, Accumulate):
            return layer.every > 1
        if not isinstance(layer, ParameterAverage):
            return False
    return False


def accumulated_entries(graphs: LoweredGraphs) -> tuple[str, ...]:
    slots = optim.slots_by_options(graphs.options["optimizer"])
    return tuple(entry.name for entry in graphs.signature.state if slot_of(entry.name, slots).is_partial)


def exchanging_for_updates(graphs: LoweredGraphs) -> LoweredGraphs:
    signature, accumulated = graphs.signature["step"], accumulated_entries(graphs)
    own = {entry.name for entry in signature.inputs_of(Role.DATA, Role.LABEL, Role.SAMPLES)}
    outputs = {entry.name: entry for entry in signature.outputs if entry.updates not in accumulated}

    def rewrite(model: ir.Model) -> None:
        exchange_accumulated(model.graph)
        check_replicated(model.graph, own, outputs)

    return graphs.rewritten(rewrite, "step", marks=(collectives.ALL_REDUCE_WHERE, collectives.PARTS_OF))


def exchange_accumulated(graph: ir.Graph) -> None:
    """Exchange, in place, a step's accumulated gradients in buckets, each as soon as it is added up."""
    join_parts(graph, accumulating=True)
    needed: dict[ir.Node, set[ir.Node]] = {}
    for mark in [node for node in graph if collectives.ALL_REDUCE_WHERE.is_of(node)]:
        read = [ancestors_of(value, back_to=collectives.OWN_GRADIENTS.is_of) for value in mark.inputs if value is not None]
        needed[mark] = {node for value in set[ir.Value]().union(*read) if (node := value.producer()) is not None}
    for bucket in [node for node in graph if collectives.OWN_GRADIENTS.is_of(node)]:
        members = [mark for mark, nodes in needed.items() if bucket in nodes]
        if members:
            _exchange(graph, bucket, members, set[ir.Node]().union(*(needed[mark] for mark in members)))
        bucket.attributes.pop("order")  # the exchange has it now
    in_update = [node for node in graph if collectives.ALL_REDUCE.is_of(node) and "order" not in node.attributes]
    for order, node in enumerate(in_update, next_order(graph)):
        set_order(node, order)


def join_parts(graph: ir.Graph, accumulating: bool) -> bool:
    parts = [node for node in graph if collectives.PARTS_OF.is_of(node)]
    for node in parts:
        own = Builder(graph, before=node).tensors(node.inputs)
        replace_node(node, collectives.all_reduce(own, "count") if accumulating else own)
    return bool(parts)


def _exchange(graph: ir.Graph, bucket: ir.Node, marks: Sequence[ir.Node], needed: set[ir.Node]) -> None:
    position = {node: index for index, node in enumerate(graph)}
    moved = sorted((node for node in needed if position[node] > position[bucket]), key=position.__getitem__)
    graph.remove(moved)
    graph.insert_after(bucket, moved)
    builder = Builder(graph, before=list(graph)[position[bucket] + len(moved) + 1])
    buffer = collectives.ALL_REDUCE_START(
        *builder.tensors([*(mark.inputs[0] for mark in marks), marks[0].inputs[1]]),
        purpose="gradient",
        conditional=1,
        parameters=[f"param/{attribute_value(mark, 'parameter', '')}" for mark in marks],
        order=attribute_value(bucket, "order", 0),
    )
    builder = Builder(graph, before=max(marks, key=position.__getitem__))
    results = collectives.ALL_REDUCE_FINISH.emit(*builder.tensors([buffer.value, *(mark.inputs[0] for mark in marks)]))
    for mark, result in zip(marks, results, strict=True):
        replace_node(mark, result)


class AccumulatingRunner(SpreadRunner):
    """A runner that adds up the workers' accumulated gradients when the state is requested; ``runner`` was opened with
    ``part_of`` it.
    """

    def __init__(
        self, runner: ProgramRunner, communicator: Communicator, accumulated: Sequence[str], state: Mapping[str, np.ndarray]
    ):
        super().__init__(runner, communicator)
        self._accumulated = accumulated
        self._known = self._sums_of(state)

    def _spread(self) -> Sequence[str]:
        return self._accumulated if int(self._runner.state_entry(COUNT.entry())) else ()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(part_of(state, self._accumulated, self._communicator.rank))
        self._known = self._sums_of(state)

    def _sums_of(self, state: Mapping[str, np.ndarray]) -> Arrays:
        return {name: np.array(state[name]) for name in self._accumulated} if int(state[COUNT.entry()]) else {}

    def _whole(self, own: Arrays) -> Arrays:
        parts = [own[name] for name in self._accumulated]
        flat = np.concatenate([part.reshape(-1) for part in parts], dtype=np.float64)
        return dict(zip(self._accumulated, parted(summed(self._communicator, flat), parts), strict=True))


def part_of(state: Mapping[str, np.ndarray], accumulated: Sequence[str], rank: int) -> Mapping[str, np.ndarray]:
    """Return a worker's initial state: the first has everything accumulated so far, the others zeros."""
    return state if rank == 0 else {**state, **{name: np.zeros_like(state[name]) for name in accumulated}}

"""Sharded optimizer state (ZeRO, stage 1): each worker keeps and updates only its share of the parameters.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: memory optimizations toward training trillion parameter models", 2020. A gradient is
summed and used only on the worker that updates its parameter. For values that depend on several workers' gradients, such as their
norm, the workers exchange sums of squares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.distributed.exchanges import next_order, replace_by_exchanged
from burnish.distributed.runner import SpreadRunner, as_bytes, from_bytes, gathered
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator
from burnish.graph import Builder, attribute_value, constant_array, remove_node, replace_uses, static_shape, zeros_like
from burnish.graph.uses import ancestors_of, producer_of, read_by, remove_unused
from burnish.operators import collectives
from burnish.optim.slots import STATE, Slot, parameter_of, slot_of
from burnish.program.signature import Entry, Role, Signature

GRADIENT, NEXT = "grad:", "next:"
"""Prefixes of a training graph's outputs: gradients, and the next values of state entries."""


@dataclass(frozen=True)
class Shares:
    """The shares of the workers: rank by parameter (``owners``), and parameter by state entry held by one worker (``slots``)."""

    workers: int
    owners: Mapping[str, int]
    slots: Mapping[str, str]

    def of(self, rank: int) -> frozenset[str]:
        return frozenset(slot for slot, parameter in self.slots.items() if self.owners[parameter] == rank)


def shares_of(signature: Signature, workers: int, slots: Sequence[Slot], parts: Collection[str] = ()) -> Shares:
    """Divide parameters by bytes of gradients and state, except averages, tables updated by rows, and each worker's ``parts``."""
    by_rows = {entry.updates for entry in signature["step"].outputs if entry.by_rows}
    trained = {name for name in signature["step"].updates if name.startswith("param/") and name not in by_rows}
    shared: dict[str, str] = {}
    size = {entry.name: entry.bytes for entry in signature.state if entry.name in trained}
    for entry in signature.state:
        parameter = f"param/{parameter_of(entry.name)}"
        if entry.role is not Role.OPTIMIZER or parameter not in trained or entry.name in parts:
            continue
        if not slot_of(entry.name, slots).is_average:
            shared[entry.name] = parameter
            size[parameter] += entry.bytes
    owners, load = {}, [0] * workers
    for name in sorted(size, key=lambda name: (-size[name], name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += max(1, size[name])
    return Shares(workers, owners, shared)


def sharded(graphs: LoweredGraphs, shares: Shares, rank: int) -> LoweredGraphs:
    """Return the graphs of one worker; its step's signature leaves out the other workers' entries."""
    others = shares.slots.keys() - shares.of(rank)
    step = graphs.signature["step"]
    own = replace(
        step,
        inputs=tuple(entry for entry in step.inputs if entry.name not in others),
        outputs=tuple(entry for entry in step.outputs if entry.updates not in others),
    )
    grad = graphs.semantic["grad"].clone()
    name_gradients(grad.graph)

    def shard(model: ir.Model) -> None:
        plan = _Plan(model.graph, shares)
        plan.scatter()
        plan.gather()
        _leave_own(model.graph, rank, others)
        remove_unused(model)
        for value in [value for value in model.graph.inputs if value.name in others]:
            assert not value.uses(), f"'{value.name}' is read by a worker that does not keep it"
            model.graph.inputs.remove(value)

    signature = Signature({**graphs.signature.graphs, "step": own})
    return graphs.rewritten(shard, "step", signature=signature, semantic={**graphs.semantic, "grad": grad})


def name_gradients(graph: ir.Graph) -> None:
    names: dict[ir.Value, str] = {}
    for output in graph.outputs:
        if (output.name or "").startswith(GRADIENT):
            name = f"param/{(output.name or '').removeprefix(GRADIENT)}"
            names |= dict.fromkeys(ancestors_of(output, back_to=collectives.ALL_REDUCE_FINISH.is_of), name)
    for node in graph:
        if collectives.ALL_REDUCE_FINISH.is_of(node):
            parameters = [names.get(value, "") for value in node.outputs]
            _start_of(node).attributes["parameters"] = ir.AttrStrings("parameters", parameters)


def _start_of(finish: ir.Node) -> ir.Node:
    buffer = finish.inputs[0]
    start = None if buffer is None else buffer.producer()
    assert start is not None
    return start


class _Plan:
    """The division of a step's work, the same on all workers: each value is computed by all, or by one."""

    def __init__(self, graph: ir.Graph, shares: Shares):
        self._graph, self._shares = graph, shares
        # The only worker that computes a value, and the workers that need a value.
        self._places: dict[ir.Value, int] = {
            value: shares.owners[shares.slots[name]] for value in graph.inputs if (name := value.name or "") in shares.slots
        }
        self._wanted: defaultdict[ir.Value, frozenset[int]] = defaultdict(frozenset)
        for value in graph.outputs:
            owner = self._owner_of(value)
            self._wanted[value] |= frozenset(range(shares.workers)) if owner is None else {owner}
        for node in reversed(graph):
            by = self._wanted_of(node)
            for value in read_by(node) if by else ():
                self._wanted[value] |= by

    def _wanted_of(self, node: ir.Node) -> frozenset[int]:
        return frozenset().union(*(self._wanted[output] for output in node.outputs))

    def _owner_of(self, output: ir.Value) -> int | None:
        name = (output.name or "").removeprefix(NEXT)
        return self._shares.owners.get(self._shares.slots.get(name, name))

    def scatter(self) -> None:
        """Sum each gradient on the worker that updates its parameter; unneeded gradients are not exchanged."""
        for finish in [node for node in self._graph if collectives.ALL_REDUCE_FINISH.is_of(node)]:
            start = _start_of(finish)
            names = attribute_value(start, "parameters", ())
            # A gradient that is read but updates nothing still needs a worker to sum it.
            owners = [self._shares.owners.get(name, index % self._shares.workers) for index, name in enumerate(names)]
            wanted = [index for index, output in enumerate(finish.outputs) if self._wanted[output]]
            if kept := sorted(wanted, key=owners.__getitem__):
                gradients, beside = [start.inputs[index] for index in kept], start.inputs[len(owners) :]
                settings = {name: attribute.value for name, attribute in start.attributes.items() if name != "parameters"}
                settings["owners"] = by_part = [owners[index] for index in kept]
                operands = Builder(self._graph, before=start).tensors([*gradients, *beside])
                buffer = collectives.REDUCE_SCATTER_START(*operands, **settings)
                operands = Builder(self._graph, before=finish).tensors([buffer.value, *gradients])
                *sums, _ = collectives.REDUCE_SCATTER_FINISH.emit(*operands, owners=by_part)
                for index, owner, total in zip(kept, by_part, sums, strict=True):
                    output = finish.outputs[index]
                    self._wanted[total.value] = self._wanted[output]
                    self._places[total.value] = owner
                    replace_uses(output, total.value)
            remove_node(finish)
            remove_node(start)

    def gather(self) -> None:
        """Exchange values that one worker computes and others need, with one exchange per level of dependence on other
        exchanges.
        """
        conditions = self._conditions()
        exchanges: dict[tuple[int, int], list[ir.Value]] = {}
        for value, level in self._crossing().items():
            left_by = (index for index, condition in enumerate(conditions) if condition.leaves(value))
            exchanges.setdefault((level, next(left_by, -1)), []).append(value)
        for order, (level, index) in enumerate(sorted(exchanges), next_order(self._graph)):
            values = exchanges[level, index]
            builder = Builder(self._graph)
            when = builder.tensor(conditions[index].when) if index >= 0 else None
            results = collectives.gather_owned(builder.tensors(values), [self._places[value] for value in values], when)
            replace_by_exchanged(values, results, order)
        self._graph.sort()

    def _conditions(self) -> list[_Condition]:
        """Return the conditions of an update that depend only on the state, such as a full accumulation."""
        found: dict[ir.Value, None] = {}
        for output in self._graph.outputs:
            chosen: ir.Value | None = output if (output.name or "").startswith(f"{NEXT}param/") else None
            if (writer := producer_of(chosen, "ScatterND")) is not None:
                chosen = writer.inputs[0]
            while (node := producer_of(chosen, "Where")) is not None:
                when, chosen = node.inputs[:2]
                if when is not None and _is_scalar(when):
                    read = (value.name or "" for value in ancestors_of(when) if value.is_graph_input())
                    if all(name.startswith(STATE) for name in read):  # known before the step computes anything
                        found[when] = None
        return [_Condition(self._graph, when) for when in found]

    def _crossing(self) -> dict[ir.Value, int]:
        """Return the values that one worker computes and others need, each with the number of successive exchanges it takes."""
        crossing: dict[ir.Value, int] = {}
        levels: dict[ir.Value, int] = {}
        following = {value for value in self._graph.outputs if (value.name or "").startswith(f"{NEXT}param/")}
        for node in self._graph:
            by = self._wanted_of(node)
            read = list(dict.fromkeys(read_by(node)))
            placed = [value for value in read if value in self._places and value not in crossing]
            ranks = {self._places[value] for value in placed}
            level = max((crossing.get(value, levels.get(value, 0)) for value in read), default=0)
            if len(ranks) == 1 and (by <= ranks or not all(map(_is_scalar, placed))):
                self._places.update(dict.fromkeys(node.outputs, ranks.pop()))
            elif placed and by:
                crossing |= {value: levels.get(value, 0) + 1 for value in placed}
                level = max([level, *(crossing[value] for value in placed)])
            levels |= dict.fromkeys(node.outputs, level)
            crossing |= {value: level + 1 for value in node.outputs if value in following and value in self._places}
        for value in self._graph.outputs:
            if value in self._places and value not in crossing and self._owner_of(value) != self._places[value]:
                crossing[value] = levels.get(value, 0) + 1
        return crossing


class _Condition:
    """A boolean scalar ``when`` that all workers know; while it is false, some values are not needed or do not change."""

    def __init__(self, graph: ir.Graph, when: ir.Value):
        self.when = when
        self._present = {f"{NEXT}{value.name}": value for value in graph.inputs}
        self._needed = set(graph.outputs)
        for node in reversed(graph):
            if not self._needed.isdisjoint(node.outputs):
                self._needed.update(list(dict.fromkeys(read_by(node)))[2 * self._decides(node) :])

    def leaves(self, value: ir.Value) -> bool:
        return value not in self._needed or self._is_present(value, self._present.get(value.name or ""))

    def _decides(self, node: ir.Node) -> bool:
        return node.op_type == "Where" and node.domain == "" and node.inputs[0] is self.when

    def _is_present(self, value: ir.Value | None, present: ir.Value | None, rows: Sequence[int] | None = None) -> bool:
        """Return True if a value then equals the present one of a state entry, except in ``rows``, which do not matter."""
        if (node := producer_of(value, "ScatterND")) is not None:
            written, read = _rows_of(node), producer_of(node.inputs[2], "Gather")
            copies = read is not None and read.inputs[0] is present and _rows_of(read) == written
            return bool(written) and (copies or written == rows) and self._is_present(node.inputs[0], present, written)
        if (node := producer_of(value, "Where")) is not None:
            return all(self._is_present(chosen, present, rows) for chosen in node.inputs[2 if self._decides(node) else 1 :])
        return value is present and present is not None


def _rows_of(node: ir.Node) -> list[int]:
    array = constant_array(node.inputs[1])
    return [] if array is None else [int(row) for row in array.reshape(-1)]


def _leave_own(graph: ir.Graph, rank: int, others: Collection[str]) -> None:
    graph.outputs[:] = [value for value in graph.outputs if (value.name or "").removeprefix(NEXT) not in others]
    inputs = {value.name or "": value for value in graph.inputs if value.name not in others}
    gathers = [node for node in graph if collectives.GATHER_OWNED.is_of(node)]
    for node in gathers:
        for index, owner in enumerate(attribute_value(node, "owners", ())):
            if owner != rank:
                node.replace_input_with(index, _shape_giver(graph, node, node.outputs[index], inputs))
    ends = []
    for node in [node for node in graph if collectives.REDUCE_SCATTER_FINISH.is_of(node)]:
        own = [index for index, owner in enumerate(attribute_value(node, "owners", ())) if owner == rank]
        operands = Builder(graph, before=node).tensors(node.inputs[index] for index in (0, *(1 + index for index in own)))
        *sums, done = collectives.REDUCE_SCATTER_FINISH.emit(*operands)
        for index, total in zip(own, sums, strict=True):
            replace_uses(node.outputs[index], total.value)
        ends.append(done.value)
    if not gathers:
        return
    # A worker also takes part in exchanges whose results it does not read; it waits for its own sums in the last.
    last = max(gathers, key=lambda node: attribute_value(node, "order", 0))
    last.resize_inputs(len(last.inputs) + len(ends))
    for index, end in enumerate(ends, len(last.inputs) - len(ends)):
        last.replace_input_with(index, end)
    graph.sort()


def _shape_giver(graph: ir.Graph, node: ir.Node, result: ir.Value, inputs: Mapping[str, ir.Value]) -> ir.Value:
    present = inputs.get((result.name or "").removeprefix(NEXT))
    if present is not None and present.dtype == result.dtype:
        return present
    extents = static_shape(result)
    assert extents is not None, f"'{result.name}' has no known shape"
    tensor = Builder(graph, before=node).tensor(result)
    if _is_scalar(result):
        return tensor.builder.constant(np.zeros(extents, tensor.dtype.numpy())).value
    return zeros_like(tensor).value


def _is_scalar(value: ir.Value) -> bool:
    extents = static_shape(value)
    return extents is not None and math.prod(extents) == 1


class ShardedRunner(SpreadRunner):
    """A runner of one worker's share of the optimizer's state. After a step, ``state`` is an exchange."""

    def __init__(
        self,
        runner: ProgramRunner,
        communicator: Communicator,
        shares: Shares,
        entries: Sequence[Entry],
        state: Mapping[str, np.ndarray],
    ):
        super().__init__(runner, communicator)
        self._names, self._shares = [entry.name for entry in entries], shares
        kept = map(shares.of, range(communicator.size))
        self._kept = [[entry for entry in entries if entry.name in names] for names in kept]
        self._remember(state)

    def _spread(self) -> Mapping[str, str]:
        return self._shares.slots

    def state(self) -> Arrays:
        whole = super().state()
        return {name: whole[name] for name in self._names}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(state)
        self._remember(state)

    def _remember(self, state: Mapping[str, np.ndarray]) -> None:
        others = (kept for rank, kept in enumerate(self._kept) if rank != self._communicator.rank)
        self._known = {entry.name: np.array(state[entry.name]) for kept in others for entry in kept}

    def _whole(self, own: Arrays) -> Arrays:
        rank = self._communicator.rank
        share = {entry.name: own[entry.name] for entry in self._kept[rank]}
        size = max(1, *(sum(entry.bytes for entry in kept) for kept in self._kept))
        others: Arrays = {}
        for other, content in enumerate(gathered(self._communicator, as_bytes(share, size))):
            if other != rank:
                others |= from_bytes(content, {entry.name: (entry.numpy_dtype, entry.extents) for entry in self._kept[other]})
        return others

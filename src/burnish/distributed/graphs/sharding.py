"""Optimizer state in shares: each worker keeps and computes that of its parameters alone, and gives the others what they become.

Rajbhandari, Rasley, Ruwase and He, "ZeRO: memory optimizations toward training trillion parameter models", 2020, stage 1. A
gradient is added up on the worker that updates its parameter, and what the update computes of it is computed there. Where
something is computed of what different workers have, such as the norm of all gradients, each gives the others what enters it:
the sums of squares, not the gradients. So the numbers are those of workers that have all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.compiler.executable import Executable
from burnish.graph import (
    BURNISH_DOMAIN,
    Builder,
    attribute_value,
    constant_array,
    remove_node,
    static_shape,
)
from burnish.graph.uses import read_by
from burnish.ops.collectives import (
    ALL_REDUCE_FINISH,
    GATHER_OWNED,
    REDUCE_SCATTER_FINISH,
    REDUCE_SCATTER_START,
    gather_owned,
)
from burnish.optim.slots import STATE, Slot, parameter_of, slot_of
from burnish.passes import remove_unused
from burnish.program.signature import Entry, Role, Signature

GRADIENT, NEXT = "grad:", "next:"
"""What the outputs of a training graph that are gradients, and the next values of state entries, begin with."""


@dataclass(frozen=True)
class Shares:
    """Who keeps what.

    Attributes:
        workers: how many there are.
        owners: rank by parameter, named as in the state.
        slots: for every state entry that one worker alone keeps, its parameter.
    """

    workers: int
    owners: Mapping[str, int]
    slots: Mapping[str, str]

    def of(self, rank: int) -> frozenset[str]:
        """The state entries that this worker alone keeps."""
        return frozenset(slot for slot, parameter in self.slots.items() if self.owners[parameter] == rank)

    def not_of(self, rank: int) -> frozenset[str]:
        """The state entries that others keep."""
        return frozenset(self.slots) - self.of(rank)


def shares_of(signature: Signature, workers: int, slots: Sequence[Slot], parts: Collection[str] = ()) -> Shares:
    """Divide the parameters that train among workers, so that each has about as many bytes of gradients and optimizer state.

    Args:
        signature: of the program.
        workers: how many there are.
        slots: what the optimizer declares; averages of parameters, which are evaluated with, stay on all workers, and so do
            tables of which a step writes some rows: all workers get those.
        parts: state entries of which each worker has its own part.
    """
    by_rows = {entry.updates for entry in signature["step"].outputs if entry.by_rows}
    trained = {name for name in signature["step"].updates if name.startswith("param/") and name not in by_rows}
    shared: dict[str, str] = {}
    size = {entry.name: bytes_of(entry) for entry in signature.state if entry.name in trained}
    for entry in signature.state:
        parameter = f"param/{parameter_of(entry.name)}"
        if entry.role is not Role.OPTIMIZER or parameter not in trained or entry.name in parts:
            continue
        if not slot_of(entry.name, slots).is_average:
            shared[entry.name] = parameter
            size[parameter] += bytes_of(entry)
    owners, load = {}, [0] * workers
    for name in sorted(size, key=lambda name: (-size[name], name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += max(1, size[name])
    return Shares(workers, owners, shared)


def bytes_of(entry: Entry) -> int:
    """The size of a state entry."""
    return int(math.prod(extent for extent in entry.extents if isinstance(extent, int)) * entry.dtype.itemsize)


def sharded(executable: Executable, shares: Shares, rank: int) -> Executable:
    """Return what one worker runs of an executable; the signature of its step has no state that others keep."""
    others = shares.not_of(rank)
    step = executable.signature["step"]
    own = replace(
        step,
        inputs=tuple(entry for entry in step.inputs if entry.name not in others),
        outputs=tuple(entry for entry in step.outputs if entry.updates not in others),
    )
    grad = executable.semantic["grad"].clone()
    name_gradients(grad.graph)
    return executable.rewritten(
        lambda model: shard_step(model, shares, rank),
        "step",
        signature=Signature({**executable.signature.graphs, "step": own}),
        semantic={**executable.semantic, "grad": grad},
    )


def name_gradients(graph: ir.Graph) -> None:
    """Let every exchange of a bucket say, in place, the gradients of which parameters it exchanges."""
    names: dict[ir.Value, str] = {}
    for output in graph.outputs:
        if not (output.name or "").startswith(GRADIENT):
            continue
        seen: set[ir.Value] = set()
        pending = [output]
        while pending:
            value = pending.pop()
            producer = value.producer()
            if value in seen or producer is None:
                continue
            seen.add(value)
            if ALL_REDUCE_FINISH.is_of(producer):
                names[value] = f"param/{(output.name or '').removeprefix(GRADIENT)}"
            else:
                pending.extend(operand for operand in producer.inputs if operand is not None)
    for node in graph:
        if ALL_REDUCE_FINISH.is_of(node):
            start = node.inputs[0].producer()  # type: ignore[union-attr]
            assert start is not None
            start.attributes["parameters"] = ir.AttrStrings("parameters", [names.get(value, "") for value in node.outputs])


def shard_step(model: ir.Model, shares: Shares, rank: int) -> None:
    """Leave, in place, the updates of one worker's share in a step's graph, with the exchanges that they take."""
    graph = model.graph
    plan = _Plan(graph, shares)
    plan.scatter()
    plan.gather()
    _leave_own(graph, shares, rank)
    remove_unused(model)
    others = shares.not_of(rank)
    for value in list(graph.inputs):
        if value.name in others:
            assert not value.uses(), f"'{value.name}' is read by a worker that does not keep it"
            graph.inputs.remove(value)


class _Plan:
    """Who computes what of a step, the same on all workers: each value is computed by all, or by one.

    Args:
        graph: a step's, rewritten in place.
        shares: who keeps what.
    """

    def __init__(self, graph: ir.Graph, shares: Shares):
        self._graph, self._shares = graph, shares
        self._everyone = frozenset(range(shares.workers))
        self._places: dict[ir.Value, int] = {
            value: shares.owners[shares.slots[name]] for value in graph.inputs if (name := value.name or "") in shares.slots
        }
        """Who computes a value that not all do."""
        self._wanted = self._wanting()

    def _wanting(self) -> dict[ir.Value, frozenset[int]]:
        """Who needs a value, for what it returns."""
        wanted: dict[ir.Value, frozenset[int]] = {}
        for value in self._graph.outputs:
            owner = self._owner_of(value)
            wanted[value] = wanted.get(value, frozenset()) | (self._everyone if owner is None else {owner})
        for node in reversed(self._graph):
            by = self._wanted_of(node, wanted)
            if by:
                for value in read_by(node):
                    wanted[value] = wanted.get(value, frozenset()) | by
        return wanted

    @staticmethod
    def _wanted_of(node: ir.Node, wanted: Mapping[ir.Value, frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*(wanted.get(output, frozenset()) for output in node.outputs))

    def _owner_of(self, output: ir.Value) -> int | None:
        """Who updates the parameter that an output of the graph belongs to; None for what all compute."""
        name = (output.name or "").removeprefix(NEXT)
        return self._shares.owners.get(self._shares.slots.get(name, name))

    def scatter(self) -> None:
        """Let each gradient be added up on the worker that updates its parameter; one that nobody needs is not exchanged."""
        for finish in [node for node in self._graph if ALL_REDUCE_FINISH.is_of(node)]:
            start = finish.inputs[0].producer()  # type: ignore[union-attr]
            assert start is not None
            names = attribute_value(start, "parameters", ())
            # Of what is not updated, but looked at, somebody has to have the sum.
            owners = [self._shares.owners.get(name, index % self._shares.workers) for index, name in enumerate(names)]
            kept = [index for index, output in enumerate(finish.outputs) if self._wanted.get(output)]
            kept.sort(key=owners.__getitem__)
            if kept:
                self._scatter(start, finish, kept, [owners[index] for index in kept], len(names))
            else:
                remove_node(finish)
                remove_node(start)

    def _scatter(self, start: ir.Node, finish: ir.Node, kept: Sequence[int], owners: Sequence[int], count: int) -> None:
        builder = Builder(self._graph, before=start)
        gradients = [builder.tensor(value) for index in kept if (value := start.inputs[index]) is not None]
        beside = [builder.tensor(value) for value in start.inputs[count:] if value is not None]
        settings = {name: attribute.value for name, attribute in start.attributes.items() if name != "parameters"}
        buffer = REDUCE_SCATTER_START(*gradients, *beside, owners=list(owners), **settings)
        builder = Builder(self._graph, before=finish)
        terms = [builder.tensor(tensor.value) for tensor in (buffer, *gradients)]
        sums = REDUCE_SCATTER_FINISH.emit(*terms, owners=list(owners))
        for index, owner, total in zip(kept, owners, sums[:-1], strict=True):
            output = finish.outputs[index]
            self._wanted[total.value] = self._wanted[output]
            self._places[total.value] = owner
            output.replace_all_uses_with(total.value)
        remove_node(finish)
        remove_node(start)

    def gather(self) -> None:
        """Put in the exchanges of what one worker computes and others need: those that wait for as many others are one."""
        gathered = self._crossing()
        conditions = self._conditions()
        numbers = [attribute_value(node, "order", -1) for node in self._graph if node.domain == BURNISH_DOMAIN]
        following = max(numbers, default=-1) + 1
        exchanges: dict[tuple[int, int], list[ir.Value]] = {}
        for value, level in gathered.items():
            held_by = (index for index, condition in enumerate(conditions) if condition.leaves(value))
            exchanges.setdefault((level, next(held_by, -1)), []).append(value)
        for order, (level, index) in enumerate(sorted(exchanges), following):
            values = exchanges[level, index]
            builder = Builder(self._graph)
            when = builder.tensor(conditions[index].when) if index >= 0 else None
            results = gather_owned(tuple(map(builder.tensor, values)), [self._places[value] for value in values], when)
            node = results[0].value.producer()
            assert node is not None
            node.attributes["order"] = ir.AttrInt64("order", order)
            for value, result in zip(values, results, strict=True):
                self._replace(value, result.value, node)
        self._graph.sort()

    def _conditions(self) -> list[_Condition]:
        """What the next parameters wait for and the state alone decides, such as that enough micro-batches have been added up."""
        found: dict[ir.Value, None] = {}
        for value in self._graph.outputs:
            node = value.producer() if (value.name or "").startswith(f"{NEXT}param/") else None
            if node is not None and _writes_rows(node):
                node = node.inputs[0].producer()  # type: ignore[union-attr]
            while node is not None and node.op_type == "Where":
                when, chosen = node.inputs[:2]
                assert when is not None
                assert chosen is not None
                if _is_scalar(when) and _is_of_state(when):
                    found[when] = None
                node = chosen.producer()
        return [_Condition(self._graph, when) for when in found]

    def _crossing(self) -> dict[ir.Value, int]:
        """What one worker computes and others need; each with the number of exchanges of such values, one behind the other, that
        it is had by."""
        gathered: dict[ir.Value, int] = {}
        levels: dict[ir.Value, int] = {}
        following = {value for value in self._graph.outputs if (value.name or "").startswith(f"{NEXT}param/")}
        for node in self._graph:
            by = self._wanted_of(node, self._wanted)
            read = list(dict.fromkeys(read_by(node)))
            placed = [value for value in read if value in self._places and value not in gathered]
            ranks = {self._places[value] for value in placed}
            level = max((gathered.get(value, levels.get(value, 0)) for value in read), default=0)
            if len(ranks) == 1 and (by <= ranks or not all(map(_is_scalar, placed))):
                self._places.update(dict.fromkeys(node.outputs, ranks.pop()))
            elif placed and by:
                gathered |= {value: levels.get(value, 0) + 1 for value in placed}
                level = max([level, *(gathered[value] for value in placed)])
            levels |= dict.fromkeys(node.outputs, level)
            gathered |= {value: level + 1 for value in node.outputs if value in following and value in self._places}
        for value in self._graph.outputs:
            if value in self._places and value not in gathered and self._owner_of(value) != self._places[value]:
                gathered[value] = levels.get(value, 0) + 1
        return gathered

    def _replace(self, value: ir.Value, result: ir.Value, gather: ir.Node) -> None:
        """Let what all have been given stand in the place of what one has."""
        for node, index in list(value.uses()):
            if node is not gather:
                node.replace_input_with(index, result)
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                name = value.name
                self._graph.outputs[index] = result
                value.name, result.name = None, name


class _Condition:
    """A boolean scalar that all workers know, and what of a step is not needed, or stays as it is, where it is false.

    Args:
        graph: a step's, in order.
        when: the scalar.
    """

    def __init__(self, graph: ir.Graph, when: ir.Value):
        self.when = when
        self._present = {f"{NEXT}{value.name}": value for value in graph.inputs}
        self._needed = set(graph.outputs)
        for node in reversed(graph):
            if not self._needed.isdisjoint(node.outputs):
                self._needed.update(list(dict.fromkeys(read_by(node)))[2 * self._decides(node) :])

    def leaves(self, value: ir.Value) -> bool:
        """Whether a value is one that workers need not be given where the scalar is false."""
        return value not in self._needed or self._is_present(value, self._present.get(value.name or ""))

    def _decides(self, node: ir.Node) -> bool:
        return node.op_type == "Where" and node.domain == "" and node.inputs[0] is self.when

    def _is_present(self, value: ir.Value | None, present: ir.Value | None, rows: Sequence[int] | None = None) -> bool:
        """Whether a value is then what a state entry is at present; of ``rows`` it does not matter what they are."""
        node = None if value is None or value is present else value.producer()
        if node is not None and _writes_rows(node):
            written = _indices(node, 1)
            read = None if node.inputs[2] is None else node.inputs[2].producer()
            copies = read is not None and read.op_type == "Gather" and read.inputs[0] is present and _indices(read, 1) == written
            return bool(written) and (copies or written == rows) and self._is_present(node.inputs[0], present, written)
        if node is None or node.op_type != "Where":
            return value is present and present is not None
        return all(self._is_present(chosen, present, rows) for chosen in node.inputs[2 if self._decides(node) else 1 :])


def _writes_rows(node: ir.Node) -> bool:
    return node.op_type == "ScatterND" and node.domain == ""


def _indices(node: ir.Node, operand: int) -> list[int]:
    """The rows that a node reads or writes, where they are constant."""
    array = constant_array(node.inputs[operand])
    return [] if array is None else [int(row) for row in array.reshape(-1)]


def _is_of_state(value: ir.Value) -> bool:
    """Whether a value is computed of the optimizer's counters alone, and known before the step computes anything."""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = pending.pop()
        producer = current.producer()
        if current.is_graph_input() and not (current.name or "").startswith(STATE):
            return False
        if current not in seen and producer is not None:
            pending.extend(read_by(producer))
        seen.add(current)
    return True


def _leave_own(graph: ir.Graph, shares: Shares, rank: int) -> None:
    """Take away what other workers compute, from a graph of all of them."""
    others = shares.not_of(rank)
    kept = [value for value in graph.outputs if (value.name or "").removeprefix(NEXT) not in others]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    inputs = {value.name or "": value for value in graph.inputs if value.name not in others}
    gathers = [node for node in graph if GATHER_OWNED.is_of(node)]
    for node in gathers:
        for index, owner in enumerate(attribute_value(node, "owners", ())):
            if owner != rank:
                node.replace_input_with(index, _shape_giver(graph, node, node.outputs[index], inputs))
    ends = [_finish_own(graph, node, rank) for node in list(graph) if REDUCE_SCATTER_FINISH.is_of(node)]
    if not gathers:
        return
    # A worker takes part in exchanges of which it reads nothing.
    last = max(gathers, key=lambda node: attribute_value(node, "order", 0))
    last.resize_inputs(len(last.inputs) + len(ends))
    for index, end in enumerate(ends, len(last.inputs) - len(ends)):
        last.replace_input_with(index, end)
    graph.sort()


def _finish_own(graph: ir.Graph, node: ir.Node, rank: int) -> ir.Value:
    """Let a worker wait for the sums of its own gradients; returns what says that it has."""
    own = [index for index, owner in enumerate(attribute_value(node, "owners", ())) if owner == rank]
    builder = Builder(graph, before=node)
    given = [builder.tensor(value) for index in (0, *(1 + index for index in own)) if (value := node.inputs[index]) is not None]
    results = REDUCE_SCATTER_FINISH.emit(*given)
    for index, result in zip(own, results[:-1], strict=True):
        output = node.outputs[index]
        output.replace_all_uses_with(result.value)
    return results[-1].value


def _shape_giver(graph: ir.Graph, node: ir.Node, result: ir.Value, inputs: Mapping[str, ir.Value]) -> ir.Value:
    """A value of the dtype and shape of what another worker computes."""
    present = inputs.get((result.name or "").removeprefix(NEXT))
    if present is not None and present.dtype == result.dtype:
        return present
    extents, dtype = static_shape(result), result.dtype
    assert extents is not None, f"'{result.name}' has no known shape"
    assert dtype is not None, f"'{result.name}' has no known dtype"
    builder = Builder(graph, before=node)
    if math.prod(extents) == 1:
        return builder.constant(np.zeros(extents, dtype.numpy())).value
    zero = ir.tensor(np.zeros(1, dtype.numpy()))
    return builder.op("ConstantOfShape", builder.integers(extents), value=zero, shape=list(extents), dtype=dtype).value


def _is_scalar(value: ir.Value) -> bool:
    extents = static_shape(value)
    return extents is not None and math.prod(extents) == 1

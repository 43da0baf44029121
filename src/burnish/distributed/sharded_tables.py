"""Sharded embedding tables: each worker holds some rows of a table and of its slots, and looks up the others' rows.

Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", 2019. Worker ``r % workers``
holds row ``r``, so that the rows read most, often the first ones, are spread out. A step requests each row that its samples look
up once, and sends its gradient to the holder, which adds the incoming ones in rank order.

Evaluation and requests for the state involve all workers: each first announces its action. A worker that wants nothing evaluates
on an earlier batch, or sends the requested rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.compiler.sparse_tables import AUTO
from burnish.distributed.exchanges import by_level, next_order, replace_by_exchanged
from burnish.distributed.runner import SpreadRunner, gathered
from burnish.engines import ProgramRunner
from burnish.engines.base import NOTHING, Arrays, HandedOver
from burnish.engines.communicator import Communicator
from burnish.errors import ConfigurationError, WorkerError
from burnish.graph import Builder, Tensor, attribute_value, describe_node, replace_node, source_of, static_shape
from burnish.graph.uses import is_used, read_by, remove_unused
from burnish.operators.collectives import ALL_REDUCE, LOOK_UP_ROWS, SCATTER_ROWS, all_reduce
from burnish.operators.indexing import from_the_front
from burnish.optim.slots import parameter_of
from burnish.program import Role
from burnish.program.layout import stand_in
from burnish.program.signature import Entry, Signature
from burnish.settings import matches_pattern, nearest

PARAMETER = "param/"
SUMMED = ("ReduceSum", "ReduceSumSquare")
"""Reductions that equal the sum of the workers' results."""
SIZES = ("Shape", "Size")
BLOCK_BYTES = 2**26
INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class TableShards:
    """The number of rows of each sharded table (``extents``), and of each state entry with it (``entries``)."""

    workers: int
    extents: Mapping[str, int]
    entries: Mapping[str, int]

    @classmethod
    def of(cls, signature: Signature, option: str | Sequence[str], workers: int) -> TableShards:
        entries = {entry.name: entry for entry in signature.state}
        by_rows = [entry.updates for entry in signature["step"].outputs if entry.by_rows and entry.updates is not None]
        tables = [name.removeprefix(PARAMETER) for name in by_rows if name.startswith(PARAMETER)]
        if not tables:
            raise ConfigurationError(
                "shard_tables: this program updates no table by rows, as a table is that workers hold in parts: compile it with "
                "sparse='auto' or the names of embedding tables, or leave shard_tables out"
            )
        if option != AUTO:
            parameters = [name.removeprefix(PARAMETER) for name in entries if name.startswith(PARAMETER)]
            chosen: list[str] = []
            for pattern in [option] if isinstance(option, str) else option:
                matching = [name for name in parameters if matches_pattern(name, pattern)]
                if not matching:
                    raise ConfigurationError(
                        f"shard_tables: the pattern '{pattern}' matches no parameter; did you mean {nearest(pattern, tables)}?"
                    )
                for other in [name for name in matching if name not in tables]:
                    raise ConfigurationError(
                        f"shard_tables: '{other}' cannot be held in parts: its gradient is of every row. Compile with "
                        f"sparse=['{other}'] where it is an embedding table that is looked up alone; this program updates by "
                        f"rows: {nearest(other, tables)}"
                    )
                chosen += [name for name in matching if name not in chosen]
            tables = chosen
        rows: dict[str, int] = {}
        for name in by_rows:
            if name.removeprefix(PARAMETER) in tables or parameter_of(name) in tables:
                extent = entries[name].extents[0]
                assert isinstance(extent, int), f"'{name}' has no known number of rows"
                rows[name] = extent
        return cls(workers, {name: rows[f"{PARAMETER}{name}"] for name in tables}, rows)

    def rows_of(self, rank: int, entry: str) -> int | None:
        return len(range(rank, self.entries[entry], self.workers)) if entry in self.entries else None

    def part(self, array: np.ndarray, rank: int) -> np.ndarray:
        return array[rank :: self.workers]


def look_up_rows(model: ir.Model, shards: TableShards) -> bool:
    """Let a graph, in place, request rows from the workers; independent lookups share an exchange."""
    graph = model.graph
    tables = _lookups(graph, shards)
    for nodes in by_level(graph, tables).values():
        builder = Builder(graph, before=nodes[-1])
        operands: list[Tensor] = []
        places: list[Tensor] = []
        extents = [shards.extents[tables[node]] for node in nodes]
        for node, extent in zip(nodes, extents, strict=True):
            part, indices = builder.tensors(node.inputs[:2])
            if node.op_type == "GatherND":
                indices = builder.op("Squeeze", indices, builder.integers([-1]))
            wanted = from_the_front(indices, builder.integers([extent]))
            distinct, _, inverse = builder.op("Unique", wanted, sorted=1, outputs=3)
            for vector in (distinct, inverse):
                vector.value.dtype, vector.value.shape = INT64, ir.Shape([None])
            operands += [part, distinct]
            places.append(builder.op("Reshape", inverse, builder.op("Shape", indices)))
        rows = LOOK_UP_ROWS.emit(*operands, tables=[tables[node] for node in nodes], extents=extents)
        for node, found, place in zip(nodes, rows, places, strict=True):
            replace_node(node, builder.op("Gather", found, place, axis=0, like=builder.tensor(node.outputs[0])))
    if tables:
        graph.sort()
        remove_unused(model)
    return bool(tables)


def _lookups(graph: ir.Graph, shards: TableShards) -> dict[ir.Node, str]:
    """Return the nodes that look up rows, with their tables; replace nodes that read a size by the whole table's."""
    found: dict[ir.Node, str] = {}
    tables = {f"{PARAMETER}{name}": name for name in shards.extents}
    for value in [value for value in graph.inputs if value.name in tables]:
        name, shape = tables[value.name or ""], static_shape(value)
        for node, index in list(value.uses()):
            if node.op_type in SIZES and node.domain == "" and node.graph is graph and shape is not None:
                start, end = attribute_value(node, "start", 0), attribute_value(node, "end", None)
                extents, builder = [shards.extents[name], *shape[1:]], Builder(graph, before=node)
                is_size = node.op_type == "Size"
                replace_node(node, builder.scalar(math.prod(extents), INT64) if is_size else builder.integers(extents[start:end]))
            elif index == 0 and node.graph is graph and _reads_rows(node):
                found[node] = name
            else:
                raise ConfigurationError(
                    f"shard_tables: '{name}' cannot be held in parts: {source_of(node) or describe_node(node)} of the graph "
                    f"'{graph.name}' reads it otherwise than by rows, in the main graph. Leave it out of shard_tables"
                )
    return found


def _reads_rows(node: ir.Node) -> bool:
    if node.domain != "" or node.op_type not in ("Gather", "GatherND"):
        return False
    data, indices = node.inputs[:2]
    if node.op_type == "Gather":
        axis = attribute_value(node, "axis", 0)
        return axis == 0 or (data is not None and data.shape is not None and axis == -len(data.shape))
    shape = None if indices is None else indices.shape
    return not attribute_value(node, "batch_dims", 0) and shape is not None and len(shape) > 0 and shape[-1] == 1


def sum_over_workers(graph: ir.Graph, shards: TableShards) -> bool:
    """Sum over the workers, in place, sums over all rows of a sharded gradient, such as norms for clipping."""
    partial: set[ir.Value] = set()
    sums: set[ir.Node] = set()
    for node in graph:
        if SCATTER_ROWS.is_of(node):
            partial.update(node.outputs)
        elif node.op_type == "ScatterND" and node.inputs[0] is not None and node.inputs[0].name in shards.entries:
            continue  # the next value of a table's or slot's part
        elif any(value in partial for value in read_by(node)) and node.op_type not in SIZES:
            # A value with one entry per row has an open first extent.
            if all(value.shape and not isinstance(value.shape[0], int) for value in filter(is_used, node.outputs)):
                partial.update(node.outputs)
            elif node.op_type not in SUMMED or node.domain != "" or static_shape(node.outputs[0]) is None:
                raise ConfigurationError(
                    f"shard_tables: {describe_node(node)} is computed of all rows of a gradient that workers hold in parts, and "
                    "is no sum over them: leave shard_tables out, or train with another optimizer"
                )
            elif not _is_summed(node.outputs[0]):
                sums.add(node)
    levels = by_level(graph, sums)
    for order, level in enumerate(sorted(levels), next_order(graph)):
        values = [node.outputs[0] for node in levels[level]]
        replace_by_exchanged(values, all_reduce(Builder(graph).tensors(values), "rows"), order)
    graph.sort()
    return bool(sums)


def _is_summed(value: ir.Value) -> bool:
    return any(
        (ALL_REDUCE.is_of(node) and attribute_value(node, "purpose", "") == "rows")
        or (node.op_type == "Cast" and _is_summed(node.outputs[0]))
        for node, _ in value.uses()
    )


def holding_rows(graphs: LoweredGraphs, shards: TableShards, rank: int) -> LoweredGraphs:
    def own(entries: Iterable[Entry]) -> tuple[Entry, ...]:
        rows = [(entry, shards.rows_of(rank, entry.updates or entry.name)) for entry in entries]
        return tuple(entry if held is None else replace(entry, shape=(held, *entry.extents[1:])) for entry, held in rows)

    def set_extents(graph: ir.Graph) -> None:
        for value in graph.inputs:
            rows = shards.rows_of(rank, value.name or "")
            if rows is not None and value.shape is not None:
                value.shape = ir.Shape([rows, *value.shape.dims[1:]])

    def evaluate(model: ir.Model) -> None:
        look_up_rows(model, shards)
        set_extents(model.graph)

    entries = graphs.signature.graphs.items()
    signature = Signature({name: replace(graph, inputs=own(graph.inputs), outputs=own(graph.outputs)) for name, graph in entries})
    grad = graphs.semantic["grad"].clone()
    set_extents(grad.graph)
    return graphs.rewritten(
        lambda model: sum_over_workers(model.graph, shards),
        "step",
        signature=signature,
        semantic={**graphs.semantic, "grad": grad},
    ).rewritten(evaluate, "evaluate", "predict")


class _Request(IntEnum):
    NOTHING, END, STATE, ENTRY, EVALUATE, PREDICT = range(6)


DOING = ("takes part", "has all it wants of the state", "asks for the state", "asks for '{}'", "evaluates", "predicts")
"""Each request in words, with a placeholder for the entry."""


class SpreadTablesRunner(SpreadRunner):
    """A runner of one worker's rows of tables and their slots; ``runner`` was opened with ``held_by`` the state."""

    evaluates_together = True

    def __init__(self, runner: ProgramRunner, communicator: Communicator, shards: TableShards, signature: Signature):
        super().__init__(runner, communicator)
        self._shards, self._signature = shards, signature
        self._entries = {entry.name: entry for entry in signature.state}
        self._names = list(self._entries)
        self._batches: dict[str, Arrays] = {}
        self._asking = 0

    def _spread(self) -> Mapping[str, int]:
        return self._shards.entries

    @property
    def gives_entries(self) -> bool:
        return not self._runner.is_spread  # otherwise shares of the optimizer's state are exchanged too

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = super().step(inputs)
        self._remember(inputs, "evaluate", "predict")
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        self._remember(inputs, "evaluate")
        self._agree(_Request.EVALUATE)
        return self._runner.evaluate(inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        self._remember(inputs, "predict")
        self._agree(_Request.PREDICT)
        return self._runner.predict(inputs, instead)

    def take_part(self) -> None:
        """Serve another worker's requests: one evaluation or prediction, or entries of the state until it has all."""
        while True:
            request, place = self._agree(_Request.NOTHING)
            if request is _Request.STATE:
                self._runner.state()
            elif request is _Request.ENTRY:
                self._all_rows(self._names[place], wanted=False)
            else:
                break
        if request is _Request.EVALUATE:
            self._runner.evaluate(self._stand_in("evaluate"))
        elif request is _Request.PREDICT:
            self._runner.predict(self._stand_in("predict"))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Keep the other participating workers waiting for requests, and tell them at the end."""
        self._asking += 1
        others_wait = True
        try:
            yield
        except WorkerError:  # nobody is left to tell
            others_wait = False
            raise
        finally:
            self._asking -= 1
            if others_wait and not self._asking:
                self._agree(_Request.END)

    def state(self) -> Arrays:
        with self.asking():
            self._agree(_Request.STATE)
            state = self._runner.state()
            return {name: self.state_entry(name) if name in self._shards.entries else state[name] for name in self._names}

    def state_entry(self, name: str) -> np.ndarray:
        if name not in self._shards.entries:
            return self._runner.state_entry(name)
        with self.asking():
            self._agree(_Request.ENTRY, self._names.index(name))
            whole = self._all_rows(name)
        assert whole is not None
        return whole

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        whole = {name: state[name] for name in state}
        rank = self._communicator.rank
        self._runner.load_state(held_by(whole, self._shards, rank))
        self._known = {name: whole[name] for name in self._shards.entries} if rank == 0 else None

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> None:
        """Take over, together, the state that the first worker loaded; ``given`` returns its array for a name and form."""
        held = HandedOver()
        for name, entry in sorted(self._entries.items()):
            own = (self._known or {}).get(name)
            if own is None and name in self._shards.entries:
                own = np.zeros(_shape_of(entry), entry.numpy_dtype)
            elif own is None:
                own = self._runner.state_entry(name)
            held |= held_by({name: given(name, own)}, self._shards, self._communicator.rank)
        self._known = None
        self._runner.load_state(held)

    def _remember(self, inputs: Mapping[str, np.ndarray], *graphs: str) -> None:
        for graph in graphs:
            names = [entry.name for entry in self._signature[graph].inputs_of(Role.DATA, Role.LABEL)]
            if all(name in inputs and inputs[name].size for name in names):
                self._batches[graph] = {name: inputs[name] for name in names}

    def _stand_in(self, graph: str) -> Arrays:
        signature = self._signature[graph]
        return self._batches.get(graph) or {
            entry.name: stand_in(entry, _shape_of(entry), signature) for entry in signature.inputs_of(Role.DATA, Role.LABEL)
        }

    def _agree(self, request: _Request, place: int = 0) -> tuple[_Request, int]:
        told = gathered(self._communicator, np.array([request, place], np.int64)).tolist()
        asked = {(kind, where) for kind, where in told if kind != _Request.NOTHING}
        if len(asked) > 1:
            doing = ", ".join(f"rank {rank} {DOING[kind].format(self._names[where])}" for rank, (kind, where) in enumerate(told))
            raise WorkerError(
                f"Workers that hold tables in parts do different things at the same time: {doing}. Let all of them call the "
                "same, or the others session.take_part()",
                comes_again=True,
            )
        kind, where = asked.pop() if asked else (_Request.NOTHING, 0)
        return _Request(kind), where

    def _all_rows(self, name: str, wanted: bool = True) -> np.ndarray | None:
        own = self._runner.state_entry(name)
        most = self._shards.rows_of(0, name) or 0
        whole = np.empty((self._shards.entries[name], *own.shape[1:]), own.dtype) if wanted else None
        block = max(1, BLOCK_BYTES // max(1, own.dtype.itemsize * math.prod(own.shape[1:])))
        for first in range(0, most, block):
            buffer, part = np.zeros((min(block, most - first), *own.shape[1:]), own.dtype), own[first : first + block]
            buffer[: len(part)] = part
            parts = gathered(self._communicator, buffer.reshape(-1).view(np.uint8))
            if whole is not None:
                for rank, rows in enumerate(parts):
                    held = self._shards.part(whole, rank)[first : first + block]
                    held[...] = rows.view(own.dtype).reshape(buffer.shape)[: len(held)]
        return whole


def _shape_of(entry: Entry) -> tuple[int, ...]:
    return tuple(extent if isinstance(extent, int) else 1 for extent in entry.extents)


def held_by(state: Mapping[str, np.ndarray], shards: TableShards, rank: int) -> HandedOver:
    """Return a worker's part of a state; a ``HandedOver`` state is emptied in the process."""
    held = HandedOver()
    take = state.pop if isinstance(state, HandedOver) else state.__getitem__
    for name in list(state):
        array = take(name)
        held[name] = np.ascontiguousarray(shards.part(array, rank)) if name in shards.entries else array
    return held

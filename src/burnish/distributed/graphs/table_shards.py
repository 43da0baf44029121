"""Tables that are spread over the workers by row: each holds some rows of a table and of its slots, and looks up those of others.

Naumov et al., "Deep learning recommendation model for personalization and recommendation systems", 2019: dense layers are
replicated and tables divided. Here a table is divided by row: row ``r`` lies with worker ``r % workers``, at place
``r // workers`` of its part, so that those that are read most, which tend to have the lowest indices, lie with all workers
alike. A step asks the holders for the rows that its samples look up, each once, and gives them the gradients of these rows; the
holder adds up what comes for a row, in the order of the ranks, and updates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.compiler.executable import Executable
from burnish.compiler.sparse_tables import AUTO
from burnish.distributed.graphs.merge_exchanges import by_level, next_order
from burnish.errors import ConfigurationError
from burnish.graph import (
    BURNISH_DOMAIN,
    Builder,
    Tensor,
    attribute_value,
    describe_node,
    replace_node,
    replace_value,
    source_of,
    static_shape,
)
from burnish.graph.uses import is_used, read_by
from burnish.operators.collectives import ALL_REDUCE, LOOK_UP_ROWS, SCATTER_ROWS, all_reduce
from burnish.operators.indexing import from_the_front
from burnish.optim.slots import parameter_of
from burnish.program.signature import Entry, Signature
from burnish.rewriting.remove_unused import remove_unused
from burnish.settings import matches_pattern, nearest

PARAMETER = "param/"
SUMMED = ("ReduceSum", "ReduceSumSquare")
"""Reductions that are the sum of what the workers have of them."""
SIZES = ("Shape", "Size")
INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class TableShards:
    """Which tables are spread, and which state entries with them.

    Attributes:
        workers: how many there are.
        extents: table, as initializer -> its number of rows.
        entries: state entry -> its number of rows: the tables and their slots.
    """

    workers: int
    extents: Mapping[str, int]
    entries: Mapping[str, int]

    @classmethod
    def of(cls, signature: Signature, option: str | Sequence[str], workers: int) -> TableShards:
        """Read ``DataParallel(shard_tables=...)`` for a program.

        Raises:
            ConfigurationError: a table that is named is not updated by rows, or there is none.
        """
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
            tables = _named([option] if isinstance(option, str) else option, tables, parameters)
        rows: dict[str, int] = {}
        for name in by_rows:
            if name.removeprefix(PARAMETER) in tables or parameter_of(name) in tables:
                extent = entries[name].extents[0]
                assert isinstance(extent, int), f"'{name}' has no known number of rows"
                rows[name] = extent
        return cls(workers, {name: rows[f"{PARAMETER}{name}"] for name in tables}, rows)

    def rows_of(self, rank: int, entry: str) -> int | None:
        """How many rows of a state entry a worker holds; None if the entry is not spread."""
        rows = self.entries.get(entry)
        return None if rows is None else max(0, -(-(rows - rank) // self.workers))

    def part(self, array: np.ndarray, rank: int) -> np.ndarray:
        """The rows of a table that a worker holds: a view."""
        return array[rank :: self.workers]


def _named(patterns: Iterable[str], tables: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """The tables that patterns name; each has to name some, and nothing that is no table by rows."""
    chosen: list[str] = []
    for pattern in patterns:
        matching = [name for name in parameters if matches_pattern(name, pattern)]
        other = next((name for name in matching if name not in tables), None)
        if not matching:
            raise ConfigurationError(
                f"shard_tables: the pattern '{pattern}' matches no parameter; did you mean {nearest(pattern, tables)}?"
            )
        if other is not None:
            raise ConfigurationError(
                f"shard_tables: '{other}' cannot be held in parts: its gradient is of every row. Compile with sparse=['{other}'] "
                f"where it is an embedding table that is looked up alone; this program updates by rows: {nearest(other, tables)}"
            )
        chosen += [name for name in matching if name not in chosen]
    return chosen


def look_up_rows(model: ir.Model, shards: TableShards) -> None:
    """Let a graph ask the workers for the rows that it looks up, in place: one before its update, or that evaluates or predicts.

    Lookups whose indices do not depend on each other's rows are one exchange.

    Raises:
        ConfigurationError: something else than a lookup reads a table that is spread.
    """
    graph = model.graph
    lookups = _lookups(graph, shards)
    if not lookups:
        return
    graph.opset_imports.setdefault(BURNISH_DOMAIN, 1)
    for nodes in by_level(graph, lookups).values():
        _look_up(graph, nodes, [lookups[node] for node in nodes], shards)
    graph.sort()
    remove_unused(model)


def _lookups(graph: ir.Graph, shards: TableShards) -> dict[ir.Node, str]:
    """The nodes that look up rows, with the table of each; what asks for the size of a table gets that of the whole."""
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
    """Whether a node gathers whole rows of its first operand."""
    if node.domain != "" or node.op_type not in ("Gather", "GatherND"):
        return False
    data, indices = node.inputs[:2]
    if node.op_type == "Gather":
        axis = attribute_value(node, "axis", 0)
        return axis == 0 or (data is not None and data.shape is not None and axis == -len(data.shape))
    shape = None if indices is None else indices.shape
    return not attribute_value(node, "batch_dims", 0) and shape is not None and len(shape) > 0 and shape[-1] == 1


def _look_up(graph: ir.Graph, nodes: Sequence[ir.Node], tables: Sequence[str], shards: TableShards) -> None:
    builder = Builder(graph, before=nodes[-1])
    operands: list[Tensor] = []
    places: list[Tensor] = []
    for node, table in zip(nodes, tables, strict=True):
        part, indices = builder.tensors(node.inputs[:2])
        if node.op_type == "GatherND":
            indices = builder.op("Squeeze", indices, builder.integers([-1]))
        wanted = from_the_front(indices, builder.integers([shards.extents[table]]))
        distinct, _, inverse = builder.op("Unique", wanted, sorted=1, outputs=3)
        for vector in (distinct, inverse):
            vector.value.dtype, vector.value.shape = INT64, ir.Shape([None])
        operands += [part, distinct]
        places.append(builder.op("Reshape", inverse, builder.op("Shape", indices)))
    extents = [shards.extents[table] for table in tables]
    rows = LOOK_UP_ROWS.emit(*operands, tables=list(tables), extents=extents)
    for node, found, place in zip(nodes, rows, places, strict=True):
        replace_node(node, builder.op("Gather", found, place, axis=0, like=builder.tensor(node.outputs[0])))


def sum_over_workers(graph: ir.Graph, shards: TableShards) -> None:
    """Sum over the workers, in place, what is summed over all rows of gradients of which each holds some: norms, for clipping.

    Raises:
        ConfigurationError: something else than a sum is computed of all rows.
    """
    partial: set[ir.Value] = set()
    sums: set[ir.Node] = set()
    for node in graph:
        if SCATTER_ROWS.is_of(node):
            partial.update(node.outputs)
        elif any(value in partial for value in read_by(node)) and node.op_type not in SIZES and not _writes(node, shards):
            if all(map(_has_rows, filter(is_used, node.outputs))):
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
        builder, values = Builder(graph), [node.outputs[0] for node in levels[level]]
        results = all_reduce(builder.tensors(values), "rows")
        exchange = results[0].value.producer()
        assert exchange is not None
        exchange.attributes["order"] = ir.AttrInt64("order", order)
        for value, result in zip(values, results, strict=True):
            replace_value(value, result.value, but=exchange)
    graph.sort()


def _writes(node: ir.Node, shards: TableShards) -> bool:
    """Whether a node gives the next value of the part of a table or of a slot."""
    return node.op_type == "ScatterND" and node.inputs[0] is not None and node.inputs[0].name in shards.entries


def _has_rows(value: ir.Value) -> bool:
    """Whether a value has as many entries along its first axis as there are rows, which only a run tells."""
    return value.shape is not None and len(value.shape) > 0 and not isinstance(value.shape[0], int)


def _is_summed(value: ir.Value) -> bool:
    """Whether the sum over the workers is taken of a value already."""
    readers = [node for node, _ in value.uses()]
    return any(
        (ALL_REDUCE.is_of(node) and attribute_value(node, "purpose", "") == "rows")
        or (node.op_type == "Cast" and _is_summed(node.outputs[0]))
        for node in readers
    )


def holding_rows(executable: Executable, shards: TableShards, rank: int) -> Executable:
    """Return what one worker runs of an executable whose training graph exchanges rows: its state has the rows that it holds."""

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

    graphs = executable.signature.graphs.items()
    signature = Signature({name: replace(graph, inputs=own(graph.inputs), outputs=own(graph.outputs)) for name, graph in graphs})
    grad = executable.semantic["grad"].clone()
    set_extents(grad.graph)
    return executable.rewritten(
        lambda model: sum_over_workers(model.graph, shards),
        "step",
        signature=signature,
        semantic={**executable.semantic, "grad": grad},
    ).rewritten(evaluate, "evaluate", "predict")

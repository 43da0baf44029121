"""Derivation of the graphs of several workers from one worker's: marks of whole-batch values become exchanges."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.compiler.update import joined_signature
from burnish.distributed.accumulation import accumulates, exchanging_for_updates, join_parts
from burnish.distributed.batch_normalization import synchronize
from burnish.distributed.exchanges import bucket_gradients, check_replicated, number_exchanges, share_exchanges
from burnish.distributed.samples import place_samples, samples_entry
from burnish.distributed.sharded_tables import TableShards, look_up_rows, sum_over_workers
from burnish.errors import ConfigurationError
from burnish.graph import Builder, attribute_value, replace_node
from burnish.graph.stage import Pass, Stage, rewrite, rewrite_graph
from burnish.graph.uses import remove_unused
from burnish.norms import NormPolicy
from burnish.operators.collectives import ALL_GATHER_ROWS, ALL_REDUCE, ALL_REDUCE_ROWS, SCATTER_ROWS
from burnish.operators.row_gradients import COALESCE_ROWS
from burnish.program import Role
from burnish.program.signature import Entry, GraphSignature, Signature


@dataclass(frozen=True)
class Distribution:
    """The context of DISTRIBUTED; with ``accumulating``, gradients remain each worker's own in this graph."""

    entries: GraphSignature
    workers: int
    norm: NormPolicy
    of_rank0: bool
    accumulating: bool
    share: bool
    bucket_size: int
    shards: TableShards | None

    @property
    def spread(self) -> Collection[str]:
        return () if self.shards is None else self.shards.extents

    def counts(self, graph: ir.Graph) -> Entry | None:
        known = {entry.name for entry in self.entries.inputs}
        return next((samples_entry(value) for value in graph.inputs if value.name not in known), None)


def _synchronize(model: ir.Model, context: Distribution) -> bool:
    updates = {entry.name: entry.updates for entry in context.entries.outputs_of(Role.STATISTIC) if entry.updates is not None}
    spare = not context.accumulating
    return synchronize(model.graph, context.norm, context.workers, updates, of_rank0=context.of_rank0, spare=spare)


def _place_samples(model: ir.Model, context: Distribution) -> bool:
    return place_samples(model.graph, context.entries.inputs_of(Role.DATA), context.workers)


def _look_up_rows(model: ir.Model, context: Distribution) -> bool:
    assert context.shards is not None
    looked_up = look_up_rows(model, context.shards)
    return sum_over_workers(model.graph, context.shards) or looked_up


def _check_replicated(model: ir.Model, context: Distribution) -> bool:
    counts = context.counts(model.graph)
    own = {entry.name for entry in context.entries.inputs_of(Role.DATA, Role.LABEL)} | ({counts.name} if counts else set())
    apart = {f"{kind}:{table}" for table in context.spread for kind in ("indices", "rows")}
    check_replicated(model.graph, own, {entry.name: entry for entry in context.entries.outputs if entry.name not in apart})
    return False


def derive(
    graphs: LoweredGraphs,
    workers: int,
    norm: NormPolicy,
    *,
    bucket_size: int,
    share: bool,
    statistics: str = "mean",
    shards: TableShards | None = None,
) -> LoweredGraphs:
    """Return graphs with a training graph that has the exchanges of this many workers; the given graphs are unchanged.

    They must be lowered to ``Target.among_workers``. ``shards`` are the divided tables.
    """
    if not graphs.semantic:
        raise ConfigurationError(
            "parallel=...: this program was written by another tool, and has no graph that exchanges between workers can be put "
            "into: compile the model with burnish"
        )
    model, signature = graphs.semantic["grad"].clone(), graphs.signature
    graph, entries = model.graph, signature["grad"]
    rows = sum(ALL_REDUCE_ROWS.is_of(node) for node in graph)
    if not any(ALL_REDUCE.is_of(node) for node in graph) or rows < len(entries.outputs_of(Role.INDICES)):
        raise ConfigurationError(
            "parallel=...: this program was compiled by an earlier version, which did not say what workers exchange: compile it "
            "again"
        )
    accumulating = workers > 1 and accumulates(graphs)
    context = Distribution(entries, workers, norm, statistics == "rank0", accumulating, share, bucket_size, shards)
    DISTRIBUTED.run(model, context)
    if (counts := context.counts(graph)) is not None:
        entries = replace(entries, inputs=(*entries.inputs, counts))
        signature = Signature({**signature.graphs, "grad": entries, "step": joined_signature(entries, signature["apply"])})
    derived = replace(graphs, semantic={**graphs.semantic, "grad": model}, signature=signature)
    return exchanging_for_updates(derived) if accumulating else derived


def exchange_rows(graph: ir.Graph, workers: int, spread: Collection[str]) -> bool:
    """Exchange, in place, the gradients of tables that are kept as rows; the workers' parts of a row are added in rank order.

    Each worker gets all rows, except that of tables in ``spread`` it gets only the rows it holds.
    """
    marks = [node for node in graph if ALL_REDUCE_ROWS.is_of(node)]
    held = [node for node in marks if attribute_value(node, "table", "") in spread]
    for operator, nodes in ((ALL_GATHER_ROWS, [node for node in marks if node not in held]), (SCATTER_ROWS, held)):
        if nodes:
            builder = Builder(graph, before=nodes[-1])
            every = operator.emit(*builder.tensors(value for node in nodes for value in node.inputs))
            for node, pair in zip(nodes, zip(every[::2], every[1::2], strict=True), strict=True):
                replace_node(node, pair if workers == 1 else COALESCE_ROWS.emit(*pair))
    graph.sort()
    return bool(marks)


DISTRIBUTED: Stage[Distribution] = Stage(
    "DISTRIBUTED",
    (
        Pass("synchronize_batch_normalization", _synchronize),
        Pass("join_parts", lambda model, context: join_parts(model.graph, context.accumulating)),
        Pass("exchange_rows", lambda model, context: exchange_rows(model.graph, context.workers, context.spread)),
        Pass("look_up_rows", _look_up_rows, when=lambda _, context: context.shards is not None),
        rewrite(remove_unused),
        Pass("place_samples", _place_samples),
        rewrite(remove_unused),
        Pass("check_replicated", _check_replicated),
        Pass("share_exchanges", lambda model, _: share_exchanges(model.graph), when=lambda _, context: context.share),
        Pass("bucket_gradients", lambda model, context: bucket_gradients(model.graph, context.bucket_size, context.accumulating)),
        rewrite_graph(number_exchanges),
    ),
    settles=False,
)
"""Turns one worker's gradient graph into that of several: marks become exchanges."""

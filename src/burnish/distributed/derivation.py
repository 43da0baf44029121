"""From the executable of one worker to that of several: the same for all of them, with the exchanges in it.

A training graph is compiled with marks where a value of the whole batch is needed (``burnish.operators.collectives``). Here the
marks become exchanges for a number of workers, and batch normalization takes its statistics over them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from burnish.compiler.executable import Executable
from burnish.compiler.update import joined_signature
from burnish.distributed.accumulation import accumulates, exchanging_for_updates, join_parts
from burnish.distributed.batch_normalization import synchronize
from burnish.distributed.exchanges import bucket_gradients, check_replicated, number_exchanges, share_exchanges
from burnish.distributed.samples import place_samples
from burnish.distributed.sharded_tables import TableShards, look_up_rows, sum_over_workers
from burnish.errors import ConfigurationError
from burnish.graph import Builder, attribute_value, replace_node
from burnish.norms import NormPolicy
from burnish.operators.collectives import ALL_GATHER_ROWS, ALL_REDUCE, ALL_REDUCE_ROWS, SCATTER_ROWS
from burnish.operators.row_gradients import COALESCE_ROWS
from burnish.program import Role
from burnish.program.signature import Signature
from burnish.rewriting.remove_unused import remove_unused


def derive(
    executable: Executable,
    workers: int,
    norm: NormPolicy,
    *,
    bucket_size: int,
    share: bool,
    statistics: str = "mean",
    shards: TableShards | None = None,
) -> Executable:
    """Return an executable with the exchanges of this many workers in its training graph; the given one is left as it is.

    It was lowered to a target that keeps collectives (``Target.among_workers``). The options are those of ``DataParallel``, with
    the tables of which each worker holds a part as ``shards``: ``sharded_tables.holding_rows`` makes of the result what one
    worker runs.
    """
    if not executable.semantic:
        raise ConfigurationError(
            "parallel=...: this program was written by another tool, and has no graph that exchanges between workers can be put "
            "into: compile the model with burnish"
        )
    model, signature = executable.semantic["grad"].clone(), executable.signature
    graph, entries = model.graph, signature["grad"]
    rows = sum(ALL_REDUCE_ROWS.is_of(node) for node in graph)
    if not any(ALL_REDUCE.is_of(node) for node in graph) or rows < len(entries.outputs_of(Role.INDICES)):
        raise ConfigurationError(
            "parallel=...: this program was compiled by an earlier version, which did not say what workers exchange: compile it "
            "again"
        )
    accumulating = workers > 1 and accumulates(executable)
    updates = {entry.name: entry.updates for entry in entries.outputs_of(Role.STATISTIC) if entry.updates is not None}
    # Gradients that accumulate stay each worker's own: no sums of them are taken here.
    synchronize(graph, norm, workers, updates, of_rank0=statistics == "rank0", spare=not accumulating)
    join_parts(graph, accumulating)
    spread = () if shards is None else shards.extents
    exchange_rows(graph, workers, spread)
    if shards is not None:
        look_up_rows(model, shards)
        sum_over_workers(graph, shards)
    remove_unused(model)
    counts = place_samples(graph, entries.inputs_of(Role.DATA), workers)
    remove_unused(model)
    if counts is not None:
        entries = replace(entries, inputs=(*entries.inputs, counts))
        signature = Signature({**signature.graphs, "grad": entries, "step": joined_signature(entries, signature["apply"])})
    own = {entry.name for entry in entries.inputs_of(Role.DATA, Role.LABEL, Role.SAMPLES)}
    apart = {f"{kind}:{table}" for table in spread for kind in ("indices", "rows")}
    check_replicated(graph, own, {entry.name: entry for entry in entries.outputs if entry.name not in apart})

    if share:
        share_exchanges(graph)
    bucket_gradients(graph, bucket_size, accumulating)
    number_exchanges(graph)
    # The program's own step and gradients are those of one worker.
    finished = {name: executable.finished[name] for name in ("predict", "evaluate")}
    derived = replace(executable, semantic={**executable.semantic, "grad": model}, finished=finished, signature=signature)
    return exchanging_for_updates(derived) if accumulating else derived


def exchange_rows(graph: ir.Graph, workers: int, spread: Collection[str]) -> None:
    """Exchange, in place, the gradients of tables that are kept as rows: those of all tables in one exchange.

    A worker adds up its own rows first, so that each travels once, however many of its samples read it. What the workers have of
    one row is added up in the order of their ranks. Every worker gets the rows of all, and one worker its own back; of the tables
    in ``spread``, those of the part that it holds, in a second exchange.
    """
    marks = [node for node in graph if ALL_REDUCE_ROWS.is_of(node)]
    held = [node for node in marks if attribute_value(node, "table", "") in spread]
    for operator, nodes in ((ALL_GATHER_ROWS, [node for node in marks if node not in held]), (SCATTER_ROWS, held)):
        if nodes:
            builder = Builder(graph, before=nodes[-1])
            every = operator.emit(*builder.tensors(value for node in nodes for value in node.inputs))
            for place, node in enumerate(nodes):
                pair = every[2 * place : 2 * place + 2]
                replace_node(node, pair if workers == 1 else COALESCE_ROWS.emit(*pair))
    graph.sort()

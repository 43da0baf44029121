"""Gradients of tables that are kept as rows: every worker gets the rows of all, and adds them up in the order of the ranks.

A worker adds up its own rows first, so that each travels once, whatever number of its samples read it.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, replace_node
from burnish.ops.collectives import ALL_GATHER_ROWS, ALL_REDUCE_ROWS
from burnish.ops.row_gradients import COALESCE_ROWS


def exchange_rows(graph: ir.Graph, workers: int) -> None:
    """Put in, in place, one exchange of the rows of all tables; for one worker its own are all there are."""
    marks = [node for node in graph if ALL_REDUCE_ROWS.is_of(node)]
    if not marks:
        return
    builder = Builder(graph, before=marks[-1])
    own = [builder.tensor(value) for node in marks for value in node.inputs if value is not None]
    every = own if workers == 1 else ALL_GATHER_ROWS.emit(*own)
    for place, node in enumerate(marks):
        indices, rows = every[2 * place : 2 * place + 2]
        replace_node(node, (indices, rows) if workers == 1 else COALESCE_ROWS.emit(indices, rows))
    graph.sort()

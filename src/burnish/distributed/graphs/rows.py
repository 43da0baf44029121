"""Gradients of tables that are kept as rows, exchanged: every worker gets the rows of all, or those of the table that it holds.

A worker adds up its own rows first, so that each travels once, whatever number of its samples read it. What comes from the
workers for one row is added up in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, replace_node
from burnish.ops.collectives import ALL_GATHER_ROWS, ALL_REDUCE_ROWS, SCATTER_ROWS
from burnish.ops.row_gradients import COALESCE_ROWS
from burnish.ops.semantic import SemanticOperator


def exchange_rows(graph: ir.Graph, workers: int, spread: Collection[str] = ()) -> None:
    """Put in, in place, one exchange of the rows of all tables; one worker gets its own back.

    Args:
        graph: a training graph.
        workers: how many there are.
        spread: tables of which each worker holds a part; a second exchange is of the rows of these.
    """
    marks = [node for node in graph if ALL_REDUCE_ROWS.is_of(node)]
    held = [node for node in marks if attribute_value(node, "table", "") in spread]
    _exchange(graph, ALL_GATHER_ROWS, [node for node in marks if node not in held], workers)
    _exchange(graph, SCATTER_ROWS, held, workers)
    graph.sort()


def _exchange(graph: ir.Graph, operator: SemanticOperator, marks: list[ir.Node], workers: int) -> None:
    if not marks:
        return
    builder = Builder(graph, before=marks[-1])
    every = operator.emit(*(tensor for node in marks for tensor in _operands(node, builder)))
    for place, node in enumerate(marks):
        indices, rows = every[2 * place : 2 * place + 2]
        replace_node(node, (indices, rows) if workers == 1 else COALESCE_ROWS.emit(indices, rows))


def _operands(node: ir.Node, builder: Builder) -> tuple[Tensor, ...]:
    return tuple(builder.tensor(value) for value in node.inputs if value is not None)

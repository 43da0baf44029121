"""The order in which a graph of several workers exchanges, kept through an engine's own rewrites.

Exchanges are numbered when a program is prepared for several workers, and all workers have to run them in that order: one that
begins another exchange first waits for the others as they wait for it. An engine that fuses operators and sorts its graph anew
may come to another order than a worker that has other kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from burnish.errors import EngineError
from burnish.graph import BURNISH_DOMAIN, attribute_value
from burnish.graph.uses import read_by


def keep_exchange_order(graph: ir.Graph) -> None:
    """Let the nodes of a graph stand so that its exchanges are in the order of their numbers, in place.

    A graph in which they are is left as it is. Otherwise whatever an exchange needs is moved before it, and the rest follows.

    Args:
        graph: in order, each node behind those that it reads from.

    Raises:
        EngineError: an exchange needs the result of one with a higher number.
    """
    exchanges = [node for node in graph if _number(node) is not None]
    ordered = sorted(exchanges, key=lambda node: _number(node) or 0)
    if exchanges == ordered:
        return
    placed: dict[ir.Node, None] = {}
    for exchange in ordered:
        for node in _with_what_it_needs(exchange, placed):
            number = _number(node)
            if number is not None and node is not exchange:
                raise EngineError(
                    f"Exchange {_number(exchange)} between workers ('{exchange.name}') needs the result of exchange "
                    f"{number} ('{node.name}'), which comes after it: open the session with DataParallel(share=False), and "
                    "report the model"
                )
            placed[node] = None
    rest = [node for node in graph if node not in placed]
    nodes = [*placed, *rest]
    graph.remove(nodes)
    graph.extend(nodes)


def _number(node: ir.Node) -> int | None:
    """The number of an exchange; None for other nodes."""
    return attribute_value(node, "order", None) if node.domain == BURNISH_DOMAIN else None


def _with_what_it_needs(node: ir.Node, placed: dict[ir.Node, None]) -> Iterator[ir.Node]:
    """The nodes that a node needs and that are not placed yet, each behind those that it reads from; the node last."""
    seen: set[ir.Node] = set()
    stack: list[tuple[ir.Node, bool]] = [(node, False)]
    while stack:
        current, complete = stack.pop()
        if complete:
            yield current
            continue
        if current in seen or current in placed:
            continue
        seen.add(current)
        stack.append((current, True))
        stack += [(producer, False) for producer in _producers(current) if producer.graph is node.graph]


def _producers(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes whose results a node reads, by its inputs or within its bodies."""
    return (producer for value in read_by(node) if (producer := value.producer()) is not None)

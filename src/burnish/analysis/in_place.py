"""Which next values of the state may be written over the present ones, so that a step needs no second set of buffers.

A runtime takes one buffer as input and as output without a word, and runs nodes in any order that their values allow. It is
safe where every node that reads the present value has run when the next one is written, whatever the order: where each is an
ancestor of the node that writes, or is that node, and reads each element before it writes it.

In ``apply`` nearly everything passes: the next value of a parameter is computed from the present one. In ``step`` weights do
not, which the backward pass reads beside their update. So a large state is updated by two graphs, ``grad`` and then
``apply``, between which the loss is looked at. All gradients are there at once, as in PyTorch. A small state has two sets of
buffers that change roles: one graph runs faster than two.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN
from burnish.graph.uses import read_by

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Standard operators whose output may lie in the memory of their first operand."""
ELEMENTWISE = frozenset({"Add", "Div", "Identity", "Mul", "Sub", "Where"})
"""Standard operators that may write over an operand of their output's shape, as ONNX Runtime computes them."""


def written_in_place(graph: ir.Graph, updates: Mapping[str, str], elementwise: Collection[str] = ()) -> frozenset[str]:
    """Return the state entries whose next values a runtime may write over the present ones, whatever order it runs nodes in.

    Args:
        graph: what is run; it is not to be rewritten afterwards. Its inputs have the names of the state entries that they are.
        updates: for state entries, the output that is their next value.
        elementwise: operators of the domain ``burnish`` that read each element of their operands before they write it.
    """
    present = {value.name: value for value in graph.inputs}
    following = {value.name: value for value in graph.outputs}
    place = {node: number for number, node in enumerate(graph)}
    ancestors = _ancestors(graph, place)
    readers = _readers(graph)

    def may_be_written(entry: str, output: str) -> bool:
        writer = following[output].producer()
        if writer is None or entry not in present:
            return False
        own = ELEMENTWISE if writer.domain == "" else elementwise if writer.domain == BURNISH_DOMAIN else ()
        allowed = ancestors[writer] | (1 << place[writer] if writer.op_type in own else 0)
        return all(allowed >> place[reader] & 1 for reader in readers.get(present[entry], ()))

    return frozenset(entry for entry, output in updates.items() if output in following and may_be_written(entry, output))


def _ancestors(graph: ir.Graph, place: Mapping[ir.Node, int]) -> dict[ir.Node, int]:
    """For each node, the bits of those that it waits for."""
    ancestors: dict[ir.Node, int] = {}
    for node in graph:
        bits = 0
        for value in read_by(node):
            producer = value.producer()
            if producer is not None:
                bits |= ancestors[producer] | 1 << place[producer]
        ancestors[node] = bits
    return ancestors


def _readers(graph: ir.Graph) -> dict[ir.Value, set[ir.Node]]:
    """The nodes that read the memory of each input of the graph: of itself, or of what may lie in it."""
    origins = {value: value for value in graph.inputs}
    readers: dict[ir.Value, set[ir.Node]] = {}
    for node in graph:
        read = [origins[value] for value in read_by(node) if value in origins]
        for origin in read:
            readers.setdefault(origin, set()).add(node)
        if node.domain == "" and node.op_type in VIEWS and node.inputs[0] in origins:
            origins[node.outputs[0]] = origins[node.inputs[0]]
    return readers

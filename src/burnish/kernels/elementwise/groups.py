"""Updates of small tensors in one call: nodes of one program, each over a shape of its own, become groups of one node."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, SOURCE_METADATA, replace_uses, source_of
from burnish.kernels.elementwise import FUSED_ELEMENTWISE, FUSED_ELEMENTWISE_GROUPS

MOST_ELEMENTS = 1 << 16
"""Of a result up to which a node is joined to others: a larger one fills a call by itself, and frees what it reads early."""


def join_groups(graph: ir.Graph) -> None:
    """Join the nodes ``burnish.FusedElementwise`` over few elements whose results are outputs of the graph alone, in place.

    Nothing waits for these, so that all of one program may run at the end, as one ``burnish.FusedElementwiseGroups``: the updates
    of hundreds of biases and scales, each too small to be worth a call of its own.
    """
    alike: dict[tuple[object, ...], list[ir.Node]] = {}
    for node in graph:
        if FUSED_ELEMENTWISE.is_of(node) and all(_is_small_output(value) for value in node.outputs):
            alike.setdefault(tuple(_program(node)), []).append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _join(graph, nodes)


def _is_small_output(value: ir.Value) -> bool:
    if value.uses() or not value.is_graph_output() or value.shape is None or not value.shape.is_static():
        return False
    return math.prod(value.shape.numpy()) <= MOST_ELEMENTS


def _program(node: ir.Node) -> Iterator[object]:
    """What two nodes have in common that one program serves."""
    yield len(node.inputs)
    for name in ("program", "constants", "constant_count", "dtypes"):
        yield str(node.attributes[name].value)
    for value in node.inputs:
        yield None if value is None else value.dtype


def _join(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    joined = ir.node(
        FUSED_ELEMENTWISE_GROUPS.name,
        [value for node in nodes for value in node.inputs],
        {"operands": len(nodes[0].inputs)},
        domain=BURNISH_DOMAIN,
        num_outputs=sum(len(node.outputs) for node in nodes),
    )
    for attribute in nodes[0].attributes.values():
        joined.attributes.add(attribute)
    ((source, _),) = Counter(map(source_of, nodes)).most_common(1)
    if source is not None:  # of several that of the most, whose time it is for the greater part
        joined.metadata_props[SOURCE_METADATA] = source
    graph.append(joined)
    for value, replacement in zip((value for node in nodes for value in node.outputs), joined.outputs, strict=True):
        replacement.type, replacement.shape = value.type, value.shape
        name = value.name
        replace_uses(value, replacement)
        value.name, replacement.name = None, name
    graph.remove(nodes, safe=True)

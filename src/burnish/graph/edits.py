"""Copying and removing a node and replacing a value, in time that does not grow with the graph.

``onnx_ir`` walks over all outputs of a graph for either, and a training graph has an output for each parameter: a rewrite
of every layer would take time with the square of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

OUTPUT_POSITIONS = "burnish.output_positions"
"""Where ``Graph.meta`` holds the positions of outputs by the identity of the value: they are hints, to be checked."""


def remove_node(node: ir.Node) -> None:
    """Take a node out of its graph, and out of the uses of what it reads.

    Raises:
        ValueError: something reads an output of the node, or it is an output of the graph.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    for output in node.outputs:
        if output.uses() or output.is_graph_output():
            raise ValueError(f"{node!r} cannot be removed: '{output.name}' is still read")
    for index in range(len(node.inputs)):
        node.replace_input_with(index, None)
    # Graph.remove does the same after a look at every output of the graph.
    graph._nodes.remove(node)
    node.graph = None


def copy_of(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a node of the same operator and attributes over other inputs; its outputs have the same dtypes and shapes."""
    copy = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs))
    for output, copied in zip(node.outputs, copy.outputs, strict=True):
        copied.type, copied.shape = output.type, None if output.shape is None else ir.Shape(output.shape.dims)
    return copy


def replace_uses(value: ir.Value, replacement: ir.Value, but: ir.Node | None = None) -> None:
    """Let ``replacement`` stand wherever ``value`` is read, as an output of the graph too; both keep their names.

    The node ``but`` goes on to read ``value``: the one that makes the replacement of it.
    """
    for reader, index in tuple(value.uses()):
        if reader is not but:
            reader.replace_input_with(index, replacement)
    replace_output(value, replacement)


def replace_output(value: ir.Value, replacement: ir.Value) -> None:
    """Let ``replacement`` be an output of the graph wherever ``value`` is one; both keep their names."""
    while value is not replacement and value.is_graph_output():
        graph = value.graph
        assert graph is not None
        positions = _output_positions(graph, value)
        for position in positions:
            graph.outputs[position] = replacement
        graph.meta[OUTPUT_POSITIONS].setdefault(id(replacement), []).extend(positions)


def _output_positions(graph: ir.Graph, value: ir.Value) -> list[int]:
    """Positions at which a value, which is an output of a graph, is one: at least one, and all as far as outputs were indexed."""
    outputs = graph.outputs
    hints: dict[int, list[int]] = graph.meta.get(OUTPUT_POSITIONS, {})
    positions = [position for position in hints.get(id(value), ()) if position < len(outputs) and outputs[position] is value]
    if positions:
        return positions
    hints = {}
    for position, output in enumerate(outputs):
        hints.setdefault(id(output), []).append(position)
    graph.meta[OUTPUT_POSITIONS] = hints
    return hints[id(value)]

"""Replacing values while the names a graph shows to the outside stay."""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph.builder import Builder, Tensor
from burnish.graph.describe import describe_node
from burnish.graph.edits import remove_node, replace_output, replace_uses
from burnish.graph.names import Names


def replace_value(output: ir.Value, replacement: ir.Value, but: ir.Node | None = None) -> None:
    """Let ``replacement`` stand wherever ``output``, a node's output, stood, except in what the node ``but`` reads.

    A graph output keeps its name: the replacement takes it over, behind an Identity where it has a name of its own to keep.
    """
    if not output.is_graph_output():
        replace_uses(output, replacement, but)
        return
    producer = output.producer()
    assert producer is not None
    graph = producer.graph
    assert isinstance(graph, ir.Graph)
    name = output.name
    maker = replacement.producer()
    if maker is None or maker.graph is not graph or replacement.is_graph_output():
        builder = Builder(graph, before=producer)
        replacement = builder.op("Identity", Tensor(builder, replacement)).value
    replace_uses(output, replacement, but)
    output.name = None
    replacement.name = name


def replace_node(node: ir.Node, replacements: Tensor | tuple[Tensor | None, ...]) -> None:
    """Let ``replacements`` stand for the outputs of a node, and remove the node.

    A replacement keeps the output's shape where that is known. None stands for an output that nothing reads, and so does one that
    is left out at the end; there may be more than the node has outputs.

    Raises:
        UnsupportedOperatorError: an output is read, and nothing stands for it.
    """
    results = replacements if isinstance(replacements, tuple) else (replacements,)
    for index, output in enumerate(node.outputs):
        replacement = results[index] if index < len(results) else None
        if replacement is None:
            if output.uses() or output.is_graph_output():
                raise UnsupportedOperatorError(
                    f"what replaces {describe_node(node)} has {len(results)} of {len(node.outputs)} outputs, and none for its "
                    f"output {index}, '{output.name}', which is read: let its lowering or training form return one for each"
                )
            continue
        new = replacement.value
        if new.type is None:
            new.type = output.type
        if output.shape is not None:
            new.shape = output.shape
        replace_value(output, new)
    remove_node(node)


def insert_behind(node: ir.Node, following: ir.Node, names: Names) -> None:
    """Put a node that reads another's first output after it: whatever else read that output reads the new node's.

    A graph output keeps its name, which goes to the new node; the value before it gets another, out of ``names``.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    before, behind = node.outputs[0], following.outputs[0]
    behind.type, behind.shape = before.type, None if before.shape is None else ir.Shape(before.shape.dims)
    graph.insert_after(node, following)
    for reader, index in list(before.uses()):
        if reader is not following:
            reader.replace_input_with(index, behind)
    if before.is_graph_output():
        name = before.name
        replace_output(before, behind)
        before.name = names.take(f"{name}:before")
        behind.name = name

"""How a node is named: by operator, node name and first output; and by the node of the model that it computes a part of."""

from __future__ import annotations

import onnx_ir as ir

SOURCE_METADATA = "burnish.source"
"""Where a node of a program says, for a reader, what it computes a part of: ``gradient of Conv 'stem'``."""


def describe_node(node: ir.Node) -> str:
    """Return ``Conv 'layer1/conv' (output 'layer1_out')``: what a reader needs to find the node in a viewer."""
    operator = node.op_type if node.domain == "" else f"{node.domain}.{node.op_type}"
    name = f" '{node.name}'" if node.name else ""
    output = next((value.name for value in node.outputs if value.name), None)
    return f"{operator}{name}" + (f" (output '{output}')" if output else "")


def describe_place(node: ir.Node) -> str:
    """Return how a node of a program is named, and after it the node of the model that it computes a part of."""
    return place(describe_node(node), source_of(node))


def describe_lookup(node: ir.Node) -> str:
    """Return how the place of a node is described, and of one that looks rows up which state entry they are rows of."""
    table = table_of(node)
    return describe_place(node) + ("" if table is None else f", which looks up rows of '{table}'")


def table_of(node: ir.Node) -> str | None:
    """Return the name of what a Gather reads rows of, where nothing computes it."""
    data = node.inputs[0] if (node.domain, node.op_type) == ("", "Gather") else None
    return data.name if data is not None and data.producer() is None else None


def place(node: str, source: str | None) -> str:
    """Return ``MatMul 'scores' (output 'y') of the gradient of Gemm 'fc' (output 'logits')``, from the two descriptions."""
    if source is None or source == node:
        return node
    return f"{node} of {source}" if source.startswith("the ") else f"{node} of the {source}"


def name_sources(graph: ir.Graph) -> None:
    """Let every node of a model, and what replaces it, say which node of the model it is; see ``source_of``."""
    for node in graph.all_nodes():
        node.metadata_props[SOURCE_METADATA] = describe_node(node)


def source_of(node: ir.Node) -> str | None:
    """Return what a node of a program computes a part of, or None where nobody noted it.

    That is a node of the model (``Conv 'stem' (output 'stem_out')``), ``gradient of`` one, ``the loss``, ``the metrics``,
    ``the optimizer`` or ``the random key``.
    """
    return node.metadata_props.get(SOURCE_METADATA)

"""Parameters that an exporter merged because they were equal become separate again.

At initialization many parameters are equal (scales of one, biases of zero). The TorchScript exporter then writes one
initializer, and ``Identity`` nodes on it whose outputs carry the names of the others. A model that shares a weight on purpose
has one initializer with several consumers, and no Identity.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph.initializers import replace_by_initializer


def untie_parameters(model: ir.Model) -> bool:
    """Replace, in place, ``Identity(initializer)`` nodes whose output has a name of its own by initializers of that name.

    Returns:
        Whether there was any.
    """
    graph = model.graph
    untied = False
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Identity" and node.domain == "" else None
        output = node.outputs[0]
        if source is None or source.const_value is None or not source.is_initializer() or output.is_graph_output():
            continue
        if source.graph is graph and not _names_the_operation(node):
            tensor = source.const_value
            replace_by_initializer(graph, node, ir.Tensor(tensor.numpy().copy(), tensor.dtype))
            untied = True
    return untied


def _names_the_operation(node: ir.Node) -> bool:
    """Whether the output is named after the node, as a computation's is, and not after a parameter."""
    output = node.outputs[0].name or ""
    return bool(node.name) and output.startswith((f"{node.name}_output_", f"{node.name}:"))

"""An If whose condition is a constant becomes the branch that it takes.

Exporters write an If where they do not know a shape: PyTorch's TorchScript exporter for ``squeeze(dim)`` of a value whose
shape it has lost. Where shape inference decides it after all, the branch stands for it, and gradients flow through.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import constant_array, remove_node, replace_value


def take_decided_branches(model: ir.Model) -> bool:
    """Replace, in place, every If of the main graph that has a constant condition by the nodes of its branch; whether any was.

    Names have to be unique across graphs and bodies, as they are once everything has a name.
    """
    graph = model.graph
    taken = False
    for node in list(graph):
        if node.op_type != "If" or node.domain != "" or node.inputs[0] is None:
            continue
        condition = constant_array(node.inputs[0])
        if condition is None or condition.size != 1:
            continue
        _inline(graph, node, node.attributes["then_branch" if condition.item() else "else_branch"].as_graph())
        taken = True
    return taken


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    results = list(branch.outputs)
    branch.outputs.clear()
    for value in list(branch.initializers.values()):
        del branch.initializers[value.name or ""]
        graph.register_initializer(value)
    nodes = list(branch)
    branch.remove(nodes)
    graph.insert_before(node, nodes)
    for output, result in zip(node.outputs, results, strict=True):
        replace_value(output, result)
    remove_node(node)

"""An If whose condition is a constant becomes the branch that it takes.

Exporters write an If where they do not know a shape: PyTorch's TorchScript exporter for ``squeeze(dim)`` of a value whose
shape it has lost. Where shape inference decides it after all, the branch stands for it, and gradients flow through. So it is
with an If that depends on an input which is fixed to a value (``bind_inputs``).
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import FLOATING, Names, constant_array, describe_node, remove_node, replace_value
from burnish.graph.uses import is_used
from burnish.importer.initializers import NAME_IN_BODY
from burnish.importer.operands import WEIGHT_OPERANDS

LEFT_OUT = "burnish.weights_of_branches"
BRANCH_OF = "burnish.branch_of"
"""Where the main graph's ``meta`` holds weights that no branch reads any more, and theirs, which If it was."""


def take_decided_branches(model: ir.Model) -> bool:
    """Replace, in place, every If of the main graph with a constant condition by its branch; return whether there was any.

    Weights that only the other branch read go with it. Those that were called otherwise than in their branch, because the other
    one had that name, have it back.

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
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        branch, other = branches if condition.item() else reversed(branches)
        described = describe_node(node)
        _inline(graph, node, branch)
        _let_go(other, graph, described)
        taken = True
    if taken:
        _restore_names(graph)
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


def weights_of_branches(graph: ir.Graph) -> dict[str, ir.Value]:
    """Return the weights that went with branches that are never taken, by name; ``BRANCH_OF`` in their ``meta`` says whose."""
    weights: dict[str, ir.Value] = graph.meta.get(LEFT_OUT, {})
    return weights


def _let_go(branch: ir.Graph, around: ir.Graph, described: str) -> None:
    """Let a branch that is in no graph any more read nothing, and remove the initializers that nothing else reads.

    The graph ``around`` notes the weights among them, and the If, which is ``described``.
    """
    initializers: dict[ir.Value, None] = {}
    weights: set[ir.Value] = set()
    for node in branch.all_nodes():
        for index, value in enumerate(node.inputs):
            if value is not None:
                node.replace_input_with(index, None)
                if value.is_initializer():
                    initializers[value] = None
                    if value.dtype in FLOATING and node.domain == "" and index in WEIGHT_OPERANDS.get(node.op_type, ()):
                        weights.add(value)
    branch.outputs.clear()
    for value in initializers:
        graph = value.graph
        if not is_used(value) and graph is not None:
            del graph.initializers[value.name or ""]
            if value in weights:
                value.meta[BRANCH_OF] = described
                around.meta.setdefault(LEFT_OUT, {})[value.meta.get(NAME_IN_BODY, value.name) or ""] = value


def _restore_names(graph: ir.Graph) -> None:
    """Give weights out of bodies the names that they had there, where these are free now."""
    renamed = [value for value in graph.initializers.values() if value.meta.get(NAME_IN_BODY, value.name) != value.name]
    if not renamed:
        return
    names = Names.of(graph)
    for value in renamed:
        name = value.meta[NAME_IN_BODY]
        if name not in names:
            names.release(value.name)
            value.name = names.take(name)

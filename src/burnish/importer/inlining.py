"""Inlining of model-local functions and of If nodes with a constant condition.

Exporters write an If for unknown shapes: PyTorch's TorchScript exporter for ``squeeze(dim)`` of a value whose shape it has lost.
If shape inference or a fixed input (``bind_inputs``) decides the condition, the branch replaces the If, and gradients pass.
"""

from __future__ import annotations

import graphlib
from collections import Counter
from collections.abc import Iterable

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import FLOATING, Names, bodies, constant_array, describe_node, remove_node, replace_value
from burnish.graph.annotations import BRANCH_OF, LEFT_OUT, NAME_IN_BODY
from burnish.graph.function_bodies import bind_operands, settle_attributes
from burnish.graph.uses import is_used
from burnish.importer.operands import WEIGHT_OPERANDS

EXPANSION = 100
"""Largest average number of nodes that a written node may expand to. Exported models stay below ten."""
SMALL_EXPANSION = 50_000
"""Number of nodes that any model may expand to."""

_REMEDY = "Inline them when the model is exported"


def inline_functions(model: ir.Model) -> bool:
    """Inline, in place, every call of a model-local function.

    Raises:
        ModelError: the functions expand to too many nodes; or a function reads a value from outside, has graph attributes, has
            fewer inputs or outputs than a call, lacks a value for a model output, or uses another version of a custom domain.
    """
    _check_expansion(model)
    _check_scopes(model)
    expansion = _Expansion(model)
    pending = [model.graph]
    while pending:
        for node in pending.pop():  # includes nodes inserted during the loop
            if node.op_identifier() in model.functions:
                expansion.expand(node)
            else:
                pending.extend(bodies(node))
    model.functions.clear()
    return True


def _check_expansion(model: ir.Model) -> None:
    calls = {name: _calls(function.all_nodes(), model) for name, function in model.functions.items()}
    lengths = {name: sum(1 for _ in function.all_nodes()) for name, function in model.functions.items()}
    try:
        order = list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as error:
        circle = " -> ".join(f"'{_title(name)}'" for name in error.args[1])
        raise ModelError(f"the functions of the model call each other in a circle: {circle}. {_REMEDY}") from error
    sizes: dict[ir.OperatorIdentifier, int] = {}
    for name in order:
        sizes[name] = lengths[name] + sum(count * sizes[called] for called, count in calls[name].items())
    in_graph = _calls(model.graph.all_nodes(), model)
    written = sum(1 for _ in model.graph.all_nodes())
    expanded = written + sum(count * sizes[name] for name, count in in_graph.items())
    written += sum(lengths.values())
    most = max(SMALL_EXPANSION, EXPANSION * written)
    if expanded > most:
        worst = max(in_graph, key=lambda name: in_graph[name] * sizes[name])
        raise ModelError(
            f"the function '{_title(worst)}' of the model stands, with the functions that it calls, for {sizes[worst]:,} nodes: "
            f"from {written:,} nodes that are written the model would grow to {expanded:,}, and {most:,} are the most. If it is "
            "meant to be that large, write it without functions, as onnx.inliner.inline_local_functions does"
        )


def _check_scopes(model: ir.Model) -> None:
    """Check that functions read only their own values: the standard's checks resolve unknown names in the caller."""
    for name, function in model.functions.items():
        for node in function.all_nodes():
            for value in node.inputs:
                if value is not None and value.producer() is None and not (value.is_graph_input() or value.is_initializer()):
                    raise ModelError(
                        f"{describe_node(node)} in the function '{_title(name)}' reads '{value.name}', which is neither an "
                        "input of the function nor computed in it. Export the model again"
                    )


def _calls(nodes: Iterable[ir.Node], model: ir.Model) -> Counter[ir.OperatorIdentifier]:
    return Counter(name for node in nodes if (name := node.op_identifier()) in model.functions)


def _title(name: ir.OperatorIdentifier) -> str:
    domain, operator, overload = name
    return ".".join(filter(None, (domain, operator, overload)))


class _Expansion:
    """Expands calls one by one; calls inside a function then become calls of the graph."""

    def __init__(self, model: ir.Model):
        self._model = model
        graph = model.graph
        self._value_names = Names.of(graph)
        self._node_names = Names(node.name for node in graph.all_nodes())

    def expand(self, call: ir.Node) -> None:
        function = self._model.functions[call.op_identifier()]
        self._check(call, function)
        copy = function.clone()
        self._name(copy)
        defaults = {name: attribute for name, attribute in copy.attributes.items() if attribute.value is not None}
        settle_attributes(copy, {**defaults, **call.attributes})
        for node in copy.all_nodes():
            for key, text in call.metadata_props.items():
                node.metadata_props.setdefault(key, text)
        results = bind_operands(copy, call)
        nodes = list(copy)
        copy.outputs.clear()
        copy.remove(nodes)
        graph = call.graph
        assert isinstance(graph, ir.Graph)
        graph.insert_after(call, nodes)
        for output, result in zip(call.outputs, results, strict=False):
            self._replace(call, output, result)
        remove_node(call)

    def _check(self, call: ir.Node, function: ir.Function) -> None:
        imports = self._model.opset_imports
        for domain, version in function.opset_imports.items():
            # Standard operators of another version were refused before; only the label may differ.
            if domain != "" and imports.setdefault(domain, version) != version:
                raise ModelError(
                    f"the functions of the model cannot be inlined: {describe_node(call)} uses version {version} of the domain "
                    f"'{domain}', and the model {imports[domain]}. {_REMEDY}"
                )
        if bodies(call):
            raise ModelError(
                f"the functions of the model cannot be inlined: {describe_node(call)} takes graphs as attributes. {_REMEDY}"
            )
        if len(call.inputs) > len(function.inputs):
            raise ModelError(
                f"the functions of the model cannot be inlined: {describe_node(call)} has {len(call.inputs)} inputs, and the "
                f"function takes {len(function.inputs)}. {_REMEDY}"
            )
        if len(call.outputs) > len(function.outputs):
            raise ModelError(
                f"{describe_node(call)} takes {len(call.outputs)} outputs of a function that has {len(function.outputs)}: "
                "export the model again"
            )

    def _name(self, copy: ir.Function) -> None:
        for node in copy.all_nodes():
            node.name = self._node_names.take(node.name or node.op_type)
            for output in node.outputs:
                if output.name:
                    output.name = self._value_names.take(output.name)

    def _replace(self, call: ir.Node, output: ir.Value, result: ir.Value | None) -> None:
        if result is None:
            if output.is_graph_output():
                raise ModelError(
                    f"the functions of the model cannot be inlined: {describe_node(call)} gives its output '{output.name}' from "
                    f"an input that the call leaves out. {_REMEDY}"
                )
            for reader, index in tuple(output.uses()):
                reader.replace_input_with(index, None)
            return
        if output.type is not None and result.type is None:
            result.type = output.type
        if output.shape is not None and result.shape is None:
            result.shape = output.shape
        is_named_here = output.name and not output.is_graph_output() and result.producer() is not None
        name = output.name
        replace_value(output, result)
        if is_named_here and result not in call.inputs and not result.is_graph_output():
            output.name, result.name = None, name


def take_decided_branches(model: ir.Model) -> bool:
    """Replace, in place, every main-graph If with a constant condition by its branch; return True if there were any.

    Weights that only the other branch read are removed. Weights that were renamed because of a name in the other branch get their
    name back. Names must be unique across graphs and bodies.
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


def _let_go(branch: ir.Graph, around: ir.Graph, described: str) -> None:
    """Disconnect a removed branch and remove initializers that nothing else reads.

    The graph ``around`` records the weights among them and the If (``described``).
    """
    initializers: dict[ir.Value, None] = {}
    weights: set[ir.Value] = set()
    left_out = LEFT_OUT.get(around) or {}
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
                BRANCH_OF.set(value, described)
                left_out[NAME_IN_BODY.get(value) or value.name or ""] = value
    if left_out:
        LEFT_OUT.set(around, left_out)


def _restore_names(graph: ir.Graph) -> None:
    renamed = [value for value in graph.initializers.values() if NAME_IN_BODY.get(value) not in (None, value.name)]
    if not renamed:
        return
    names = Names.of(graph)
    for value in renamed:
        name = NAME_IN_BODY.get(value) or ""
        if name not in names:
            names.release(value.name)
            value.name = names.take(name)

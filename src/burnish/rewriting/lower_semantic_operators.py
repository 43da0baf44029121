"""Lowering of semantic operators and recurrent layers to standard operators."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, TRAINING_DOMAIN, Builder, Names, bodies, describe_node, replace_node
from burnish.graph.function_bodies import standard_function, write_out
from burnish.graph.names import separate_names
from burnish.graph.versions import oldest_opset
from burnish.modes import put_training_forms
from burnish.operators import Operation, find_lowering
from burnish.operators.recurrent_layer import is_recurrent
from burnish.targets import OLDEST_OPSET, STANDARD_DOMAINS, Target

SEMANTIC_DOMAINS = (BURNISH_DOMAIN, TRAINING_DOMAIN)


def lower_semantic_operators(model: ir.Model, keep: Collection[str] = (), domains: Collection[str] = SEMANTIC_DOMAINS) -> bool:
    """Replace, in place, semantic operators and the standard's optimizers by operators that every runtime has.

    Args:
        model: the model to rewrite.
        keep: semantic operators to keep because the engine has kernels for them; in branches and loop bodies all are lowered.
        domains: domains of the operators to lower.

    Returns:
        True if anything changed. Semantic operators emitted by a lowering are lowered too.

    Raises:
        UnsupportedOperatorError: a semantic operator has no lowering.
    """
    changed, graphs = False, [model.graph]
    for graph in graphs:
        kept_here = keep if graph is model.graph else ()
        while pending := [node for node in graph if node.domain in domains and not _is_kept(node, kept_here)]:
            for node in pending:
                _lower(graph, node)
                changed = True
        for domain in domains:
            if not any(node.domain == domain for node in graph):
                graph.opset_imports.pop(domain, None)
        graphs.extend(body for node in graph for body in bodies(node))
    separate_names(model.graph)
    return changed


def _is_kept(node: ir.Node, keep: Collection[str]) -> bool:
    return node.domain == BURNISH_DOMAIN and node.op_type in keep


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    rule = find_lowering(node)
    if rule is None:
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has no lowering to standard ONNX operators: register one with burnish.operators.lowering, "
            "or run the program on an engine that has this operator"
        )
    replace_node(node, rule(Operation(node, Builder(graph, before=node))))


def write_out_newer(model: ir.Model, target: Target) -> bool:
    """Inline, in place, operators newer than the target's opset if the standard defines functions of older operators for them.

    Functions within functions are inlined too. An operator without a function stays; ``settle_opset`` reports it.
    """
    opset = model.opset_imports[""]
    if opset <= target.newest_opset:
        return False
    names, node_names = Names.of(model.graph), Names(node.name for node in model.graph.all_nodes())
    changed, left = False, set[ir.Node]()
    while newer := [node for node in model.graph.all_nodes() if node not in left and _is_newer(node, opset, target)]:
        for node in newer:
            function = standard_function(node, opset)
            if function is None:
                left.add(node)
                continue
            assert isinstance(node.graph, ir.Graph)
            node.graph.opset_imports.setdefault("", opset)
            write_out(node, function, names, node_names)
            changed = True
    return changed


def _is_newer(node: ir.Node, opset: int, target: Target) -> bool:
    return node.domain in STANDARD_DOMAINS and oldest_opset(node, opset, OLDEST_OPSET) > target.newest_opset


def expand_recurrent_layers(model: ir.Model) -> ir.Model:
    """Return a copy with recurrent layers replaced by standard operators; the model itself if it has none.

    Args:
        model: a model whose values have dtypes. Recurrent layers that have no gradient stay.
    """
    if not any(map(is_recurrent, model.graph.all_nodes())):
        return model
    copy = model.clone()
    put_training_forms(copy.graph, is_recurrent)
    lower_semantic_operators(copy)
    return copy

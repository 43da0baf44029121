"""The walk that replaces semantic operators by the standard operators their lowering emits."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, TRAINING_DOMAIN, Builder, bodies, describe_node, replace_node
from burnish.graph.names import separate_names
from burnish.ops import Operation, find_lowering

SEMANTIC_DOMAINS = (BURNISH_DOMAIN, TRAINING_DOMAIN)


def lower_semantic_operators(
    model: ir.Model, keep: Collection[str] = (), domains: Collection[str] = SEMANTIC_DOMAINS
) -> ir.Model:
    """Replace, in place, semantic operators and the standard's own optimizers by operators that every runtime has.

    Args:
        model: the model to rewrite.
        keep: semantic operators to leave as they are, because the engine has a kernel of its own for them; in branches and loop
            bodies all are lowered.
        domains: where the operators to lower are from.

    Returns:
        The same model. A lowering may emit semantic operators again; they are lowered in turn.

    Raises:
        UnsupportedOperatorError: a semantic operator without a lowering.
    """
    graphs = [model.graph]
    for graph in graphs:
        kept_here = keep if graph is model.graph else ()
        while pending := [node for node in graph if node.domain in domains and not _is_kept(node, kept_here)]:
            for node in pending:
                _lower(graph, node)
        for domain in domains:
            if not any(node.domain == domain for node in graph):
                graph.opset_imports.pop(domain, None)
        graphs.extend(body for node in graph for body in bodies(node))
    separate_names(model.graph)
    return model


def _is_kept(node: ir.Node, keep: Collection[str]) -> bool:
    return node.domain == BURNISH_DOMAIN and node.op_type in keep


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    rule = find_lowering(node)
    if rule is None:
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has no lowering to standard ONNX operators: register one with burnish.ops.lowering, "
            "or run the program on an engine that has this operator"
        )
    replace_node(node, rule(Operation(node, Builder(graph, before=node))))

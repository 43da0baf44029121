"""The walk that replaces semantic operators by the standard operators their lowering emits."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, Builder, describe_node, replace_node
from burnish.ops import Operation, find_lowering


def lower_semantic_operators(model: ir.Model, keep: Collection[str] = ()) -> ir.Model:
    """Replace, in place, every operator of the ``burnish`` domain by standard operators.

    Args:
        model: the model to rewrite.
        keep: semantic operators to leave as they are, because the engine has a kernel of its own for them.

    Returns:
        The same model. A lowering may emit semantic operators again; they are lowered in turn.

    Raises:
        UnsupportedOperatorError: a semantic operator without a lowering.
    """
    graph = model.graph
    pending = [node for node in graph if node.domain == BURNISH_DOMAIN and node.op_type not in keep]
    while pending:
        for node in pending:
            _lower(graph, node)
        pending = [node for node in graph if node.domain == BURNISH_DOMAIN and node.op_type not in keep]
    if not any(node.domain == BURNISH_DOMAIN for node in graph):
        graph.opset_imports.pop(BURNISH_DOMAIN, None)
    return model


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    rule = find_lowering(node)
    if rule is None:
        raise UnsupportedOperatorError(
            f"{describe_node(node)} has no lowering to standard ONNX operators: register one with burnish.ops.lowering, "
            "or run the program on an engine that has this operator"
        )
    replace_node(node, rule(Operation(node, Builder(graph, before=node))))

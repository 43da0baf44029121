"""The walk that puts standard operators in the place of those of ``ai.onnx.ml``."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, replace_node
from burnish.importer.classical.attributes import CLASSICAL_DOMAIN
from burnish.importer.classical.features import FEATURES
from burnish.importer.classical.linear import LinearModels


def replace_classical_operators(model: ir.Model) -> bool:
    """Replace, in place, the operators of ``ai.onnx.ml`` that standard operators can say; return whether there was any.

    For a model of opset 18 or newer whose dtypes and shapes are inferred and whose nodes have names. Graphs inside of nodes are
    looked through too.

    Raises:
        ModelError: a node whose attributes do not fit together, or do not fit its input.
        UnsupportedOperatorError: a node in a form that runtimes give different meanings.
    """
    linear = LinearModels(model.graph)
    rules = {**FEATURES, "LinearClassifier": linear.classifier, "LinearRegressor": linear.regressor}
    replaced = False
    for graph in list(model.graphs()):
        for node in list(graph):
            rule = rules.get(node.op_type) if node.domain == CLASSICAL_DOMAIN else None
            result = None if rule is None else rule(node, Builder(graph, before=node))
            if result is not None:
                replace_node(node, result)
                replaced = True
    if replaced and not any(node.domain == CLASSICAL_DOMAIN for node in model.graph.all_nodes()):
        for graph in model.graphs():
            graph.opset_imports.pop(CLASSICAL_DOMAIN, None)
    return replaced

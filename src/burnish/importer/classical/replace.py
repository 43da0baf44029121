"""The walk that puts standard operators in the place of those of ``ai.onnx.ml``."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, Tensor, replace_node
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
    replaced = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.domain == CLASSICAL_DOMAIN:
                replaced |= _replace(graph, node, linear)
    if replaced and not any(node.domain == CLASSICAL_DOMAIN for node in model.graph.all_nodes()):
        for graph in model.graphs():
            graph.opset_imports.pop(CLASSICAL_DOMAIN, None)
    return replaced


def _replace(graph: ir.Graph, node: ir.Node, linear: LinearModels) -> bool:
    builder = Builder(graph, before=node)
    result: Tensor | tuple[Tensor | None, ...] | None = None
    if node.op_type == "LinearClassifier":
        result = linear.classifier(node, builder)
    elif node.op_type == "LinearRegressor":
        result = linear.regressor(node, builder)
    elif node.op_type in FEATURES:
        result = FEATURES[node.op_type](node, builder)
    if result is not None:
        replace_node(node, result)
    return result is not None

"""Operators of classical toolkits, the domain ``ai.onnx.ml`` that skl2onnx and its kin write, as standard operators.

``features`` has what prepares data, ``linear`` the linear models and what is done to their scores, ``inference`` the attributes,
dtypes and shapes of these operators, ``outputs`` what a classifier calls its classes, and the dictionaries at its end. This file
has the walk over a model, and says which constants of such a file are no weights. What has no equal among standard operators,
such as trees and tables of strings, stays as it is: ONNX Runtime runs it, and no gradient passes through.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import FLOATING, Builder, constant_array, replace_node
from burnish.importer.classical.features import FEATURES
from burnish.importer.classical.inference import CLASSICAL_DOMAIN, declare_outputs, stand_in_for_classical
from burnish.importer.classical.linear import LinearModels
from burnish.importer.classical.outputs import note_class_labels, restore_zip_maps, without_zip_maps

__all__ = [
    "CLASSICAL_DOMAIN",
    "CONVERTERS",
    "declare_outputs",
    "hold_preprocessing",
    "note_class_labels",
    "replace_classical_operators",
    "restore_zip_maps",
    "stand_in_for_classical",
    "without_zip_maps",
]


CONVERTERS = frozenset({"skl2onnx", "OnnxMLTools"})
"""Producers of files in which fitted steps stand beside each other, and which write every number as an initializer."""
PRODUCTS = frozenset({"Gemm", "MatMul"})


def hold_preprocessing(model: ir.Model) -> bool:
    """Make, in place, Constant nodes of the initializers that are no weights, in a file of one of the ``CONVERTERS``.

    In such a file the weights are the matrices of products, and what is added to a product. Every other number is what a step of
    the pipeline was fitted to, such as the means of a scaler or the quantiles of a table, or a constant such as the 1 of
    ``1 - p``.
    """
    changed = False
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if value.dtype not in FLOATING or not value.uses() or value.is_graph_output():
            continue
        array = constant_array(value)
        if array is None or any(_trains(node, value) for node, _ in value.uses()):
            continue
        constant = ir.node("Constant", [], {"value": ir.AttrTensor("value", ir.Tensor(array))})
        output = constant.outputs[0]
        output.type, output.shape = value.type, value.shape
        graph.insert_before(graph[0], constant)
        value.replace_all_uses_with(output)
        del graph.initializers[name]
        value.name, output.name = None, name
        changed = True
    return changed


def _trains(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node multiplies by a value, or adds it to such a product."""
    if node.domain != "" or node.op_type in PRODUCTS:
        return node.domain == ""
    others = [operand.producer() for operand in node.inputs if operand is not None and operand is not value]
    return node.op_type == "Add" and any(other is not None and other.op_type in PRODUCTS for other in others)


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

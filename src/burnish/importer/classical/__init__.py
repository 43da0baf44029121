"""Operators of classical toolkits (domain ``ai.onnx.ml``, written by skl2onnx and similar tools) as standard operators.

``features`` holds data preparation, ``linear`` linear models and transforms of their scores, ``inference`` attributes, dtypes and
shapes of these operators, and ``outputs`` class names and ZipMap dictionaries. This module walks over a model and finds constants
that are no weights. Operators without a standard equivalent, such as trees and tables of strings, stay: ONNX Runtime runs them,
without gradients.
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
"""Producers that combine fitted steps and write every number as an initializer."""
PRODUCTS = frozenset({"Gemm", "MatMul"})


def hold_preprocessing(model: ir.Model) -> bool:
    """Turn initializers that are no weights into Constants, in place, in a file of one of the ``CONVERTERS``.

    In such a file the weights are the matrices of products and the numbers added to a product. All others were fitted by a step
    of the pipeline, such as the means of a scaler or the quantiles of a table, or are constants such as the 1 of ``1 - p``.
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
    if node.domain != "" or node.op_type in PRODUCTS:
        return node.domain == ""
    others = [operand.producer() for operand in node.inputs if operand is not None and operand is not value]
    return node.op_type == "Add" and any(other is not None and other.op_type in PRODUCTS for other in others)


def replace_classical_operators(model: ir.Model) -> bool:
    """Replace, in place, operators of ``ai.onnx.ml`` that standard operators can express; return True if there were any.

    For a model of opset 18 or newer with inferred dtypes and shapes and named nodes. Includes graphs nested in nodes.

    Raises:
        ModelError: a node's attributes contradict each other or its input.
        UnsupportedOperatorError: runtimes disagree about the meaning of a node.
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

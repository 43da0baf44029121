"""Dtypes and shapes of the operators of ``ai.onnx.ml`` for which the standard has no inference."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import attribute_value
from burnish.importer.classical.attributes import CLASSICAL_DOMAIN, integers

_TO_FLOAT = frozenset({"Normalizer", "Scaler"})
"""Operators that give the shape of what they read in float32, whatever that is of."""
OF_FLOATS = {
    "FeatureVectorizer": 0,
    "LinearRegressor": 0,
    "SVMClassifier": 1,
    "SVMRegressor": 0,
    "TreeEnsembleClassifier": 1,
    "TreeEnsembleRegressor": 0,
}
"""Operators without inference, in some version, that give float32 whatever they read, and which output that is."""


def declare_outputs(model: ir.Model) -> None:
    """Give, in place, dtype and rank to outputs of such operators whose dtype the file does not tell.

    Their other outputs, which are labels, have what the standard infers, or what the file declares.
    """
    for node in model.graph.all_nodes():
        index = OF_FLOATS.get(node.op_type) if node.domain == CLASSICAL_DOMAIN else None
        if index is None or index >= len(node.outputs) or node.outputs[index].type is not None:
            continue
        node.outputs[index].type = ir.TensorType(ir.DataType.FLOAT)
        node.outputs[index].shape = ir.Shape([None, _columns(node)])


def _columns(node: ir.Node) -> int | None:
    if node.op_type == "FeatureVectorizer":
        return int(integers(node, "inputdimensions").sum()) or None
    return int(attribute_value(node, "targets", 1)) if node.op_type == "LinearRegressor" else None


def stand_in_for_classical(graph: ir.Graph) -> None:
    """Put, in place, standard operators of the same dtype and shape for those without inference, in a copy that is inferred."""
    for node in graph.all_nodes():
        if node.domain != CLASSICAL_DOMAIN:
            continue
        if node.op_type in _TO_FLOAT:
            _become(node, "Cast", [ir.AttrInt64("to", ir.DataType.FLOAT.value)])
        elif node.op_type == "Imputer":
            _become(node, "Identity", [])


def _become(node: ir.Node, op_type: str, attributes: list[ir.Attr]) -> None:
    node.domain, node.op_type = "", op_type
    node.attributes.clear()
    node.attributes.update({attribute.name: attribute for attribute in attributes})

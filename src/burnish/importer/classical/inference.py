"""Attributes of ``ai.onnx.ml`` operators with defaults, and dtypes and shapes that the standard does not infer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value

CLASSICAL_DOMAIN = "ai.onnx.ml"


def numbers(node: ir.Node, name: str) -> np.ndarray:
    """Return a list of floating-point numbers as float32; empty if omitted."""
    attribute = node.attributes.get(name)
    return np.asarray([] if attribute is None else attribute.as_floats(), dtype=np.float32)


def integers(node: ir.Node, name: str) -> np.ndarray:
    """Return a list of integers as int64; empty if omitted."""
    attribute = node.attributes.get(name)
    return np.asarray([] if attribute is None else attribute.as_ints(), dtype=np.int64)


def strings(node: ir.Node, name: str) -> np.ndarray:
    """Return a list of texts as UTF-8 bytes, as in string tensors; empty if omitted."""
    attribute = node.attributes.get(name)
    return np.asarray([] if attribute is None else [text.encode() for text in attribute.as_strings()], dtype=object)


_TO_FLOAT = frozenset({"Normalizer", "Scaler"})
"""Operators with a float32 output of the input's shape, for any input dtype."""
OF_FLOATS = {
    "FeatureVectorizer": 0,
    "LinearRegressor": 0,
    "SVMClassifier": 1,
    "SVMRegressor": 0,
    "TreeEnsembleClassifier": 1,
    "TreeEnsembleRegressor": 0,
}
"""Operators without inference in some version -> index of the float32 output."""


def declare_outputs(model: ir.Model) -> bool:
    """Set, in place, the dtype and rank of such outputs if the file does not declare them.

    Other outputs, the labels, have their inferred or declared types.
    """
    changed = False
    for node in model.graph.all_nodes():
        index = OF_FLOATS.get(node.op_type) if node.domain == CLASSICAL_DOMAIN else None
        if index is None or index >= len(node.outputs) or node.outputs[index].type is not None:
            continue
        node.outputs[index].type = ir.TensorType(ir.DataType.FLOAT)
        node.outputs[index].shape = ir.Shape([None, _columns(node)])
        changed = True
    return changed


def _columns(node: ir.Node) -> int | None:
    if node.op_type == "FeatureVectorizer":
        return int(integers(node, "inputdimensions").sum()) or None
    return int(attribute_value(node, "targets", 1)) if node.op_type == "LinearRegressor" else None


def stand_in_for_classical(graph: ir.Graph) -> None:
    """Replace operators without inference by standard operators of equal dtype and shape, in place, in a temporary copy."""
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

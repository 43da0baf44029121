"""Reading and making node attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir


def attribute_value(node: ir.Node, name: str, default: Any) -> Any:
    """Return the value of an attribute, or ``default`` (the standard's) if the node omits it."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


_HOLD_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def bodies(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs inside a node: branches and loop bodies."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        kind = attribute.type
        if kind not in _HOLD_GRAPHS or attribute.is_ref():
            continue
        if kind == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        else:
            graphs.extend(attribute.as_graphs())
    return graphs


def typed_attribute(name: str, value: Any) -> Any:
    """Return a list of numbers, or a tensor, as an attribute; other values unchanged, for ``onnx_ir`` to convert.

    ``onnx_ir`` finds the type by testing one protocol after the other, which takes longer than making the node.
    """
    if isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
        return ir.AttrInt64s(name, value)
    if isinstance(value, list | tuple) and value and all(type(item) is float for item in value):
        return ir.AttrFloat32s(name, value)
    if isinstance(value, ir.Tensor):
        return ir.AttrTensor(name, value)
    return value


def hold_single_precision(model: ir.Model) -> None:
    """Round float attributes to float32, in place, since files store them as float32.

    The model in memory and its file then give identical results.
    """
    for node in model.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.FLOAT:
                node.attributes[name] = ir.AttrFloat32(name, float(np.float32(attribute.as_float())))
            elif attribute.type == ir.AttributeType.FLOATS:
                node.attributes[name] = ir.AttrFloat32s(name, [float(np.float32(number)) for number in attribute.as_floats()])

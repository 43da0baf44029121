"""A graph that computes in float64 what another computes in fewer digits."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

NARROW = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
# Attributes that hold an element type, of operators whose output has it.
ELEMENT_TYPES = ("to", "dtype")


def compute_in_float64(model: ir.Model) -> ir.Model:
    """Return a copy of a model in which every value of a narrower floating-point type is float64, inputs and constants too.

    It is for the reference engine, which runs every operator in every dtype. What else runs it may refuse operands that the
    standard declares as float32, such as the scales of Resize. Constants keep the values that they were rounded to.

    Args:
        model: a model of standard operators; left as it is.
    """
    copy = model.clone()
    _widen_values(copy.graph.inputs)
    for value in copy.graph.initializers.values():
        if value.const_value is not None and value.dtype in NARROW:
            value.const_value = ir.tensor(_widened(value.const_value), name=value.name)
    _widen_values(copy.graph.initializers.values())
    for node in copy.graph.all_nodes():
        _widen_node(node)
    return copy


def _widen_node(node: ir.Node) -> None:
    _widen_values(node.outputs)
    for attribute in list(node.attributes.values()):
        if attribute.type == ir.AttributeType.GRAPH:
            body = attribute.as_graph()
            _widen_values(body.inputs)
            for value in body.initializers.values():
                if value.const_value is not None and value.dtype in NARROW:
                    value.const_value = ir.tensor(_widened(value.const_value), name=value.name)
            _widen_values(body.initializers.values())
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in NARROW:
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, ir.tensor(_widened(attribute.as_tensor())))
        elif attribute.name in ELEMENT_TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in NARROW:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.DOUBLE))
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            number = attribute.as_float() if attribute.name == "value_float" else attribute.as_floats()
            node.attributes.pop(attribute.name)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(number, np.float64)))
    if node.op_type == "ConstantOfShape" and node.domain == "" and "value" not in node.attributes:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float64)))


def _widen_values(values: Iterable[ir.Value]) -> None:
    for value in values:
        if value.dtype in NARROW:
            value.type = ir.TensorType(ir.DataType.DOUBLE)


def _widened(tensor: ir.TensorProtocol) -> np.ndarray:
    return tensor.numpy().astype(np.float64)

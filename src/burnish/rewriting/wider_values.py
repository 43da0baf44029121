"""Giving values of a graph a wider floating-point type: types, constants, and attributes that hold an element type."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx_ir as ir

from burnish.graph import bodies

ELEMENT_TYPES = ("to", "dtype", "precision", "softmax_precision", "stash_type")
"""Attributes that hold an element type, of operators whose output has it, or that compute in it."""

STASHING = frozenset({"LayerNormalization", "RMSNormalization"})
"""Operators that compute statistics in float32 where ``stash_type`` says nothing."""

READ_AT_ONCE = 1024
"""Elements up to which a tensor is widened right away; a larger one, whenever it is read."""


def widen_node(node: ir.Node, narrow: Collection[ir.DataType], wide: ir.DataType) -> None:
    """Let a node, and the inputs and initializers of its bodies, give ``wide`` for every type of ``narrow``; not their nodes."""
    widen_values(node.outputs, narrow, wide)
    for body in bodies(node):
        widen_values(body.inputs, narrow, wide)
        widen_initializers(body, narrow, wide)
    for attribute in list(node.attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in narrow:
            node.attributes[attribute.name] = ir.AttrTensor(attribute.name, widened(attribute.as_tensor(), wide))
        elif attribute.name in ELEMENT_TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in narrow:
            node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(wide))
        elif ir.DataType.FLOAT in narrow and node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            number = attribute.as_float() if attribute.name == "value_float" else attribute.as_floats()
            node.attributes.pop(attribute.name)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(number, wide.numpy())))
    if ir.DataType.FLOAT in narrow and node.op_type in STASHING and node.domain == "":
        node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(wide))
    is_zeros = node.op_type == "ConstantOfShape" and node.domain == "" and "value" not in node.attributes
    if is_zeros and ir.DataType.FLOAT in narrow:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, wide.numpy())))


def has_values_of(model: ir.Model, dtypes: Collection[ir.DataType]) -> bool:
    """Whether a model holds any value of one of these dtypes."""
    graphs = (model.graph, *model.graph.subgraphs())
    held = (value for graph in graphs for value in (*graph.inputs, *graph.initializers.values()))
    computed = (value for node in model.graph.all_nodes() for value in node.outputs)
    return any(value.dtype in dtypes for values in (held, computed) for value in values)


def widen_values(values: Iterable[ir.Value], narrow: Collection[ir.DataType], wide: ir.DataType) -> None:
    """Change the type of values, also of sequences of tensors and of optional ones."""
    for value in values:
        if value.dtype in narrow:
            assert value.type is not None
            value.type = _wider(value.type, wide)


def widen_initializers(graph: ir.Graph, narrow: Collection[ir.DataType], wide: ir.DataType) -> None:
    """Change the type of a graph's initializers, and give them wider tensors."""
    for value in graph.initializers.values():
        if value.const_value is not None and value.dtype in narrow:
            value.const_value = widened(value.const_value, wide)
    widen_values(graph.initializers.values(), narrow, wide)


def widened(tensor: ir.TensorProtocol, wide: ir.DataType) -> ir.TensorProtocol:
    """Return a tensor of the same numbers in another type; a large one takes memory only while it is read."""

    def read() -> ir.Tensor:
        return ir.Tensor(tensor.numpy().astype(wide.numpy()), name=tensor.name)

    if tensor.size <= READ_AT_ONCE:
        return read()
    return ir.LazyTensor(read, wide, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _wider(kind: ir.TypeProtocol, wide: ir.DataType) -> ir.TypeProtocol:
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return type(kind)(_wider(kind.elem_type, wide))
    return type(kind)(wide)  # type: ignore[call-arg]

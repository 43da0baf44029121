"""Copies of a model without its weights, for the functions of ``onnx`` that serialize what they are given.

A serialized proto ends at 2 GB, and none of those functions reads a weight: weights become graph inputs of their dtype and
shape in the copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx
import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import remove_node

SMALL = 1024
"""Payloads up to this many bytes stay: shapes, axes and scales that inference reads."""

SERIALIZABLE = 2**31 - 1
"""The most bytes a serialized proto can have."""


def without_payloads(proto: onnx.ModelProto, apart: Collection[str] = ()) -> onnx.ModelProto:
    """Return a copy of a proto in which the initializers that are large or external are graph inputs.

    Args:
        proto: the model.
        apart: the initializers whose data is not in the proto.

    Raises:
        ModelError: what is left does not fit into one proto.
    """
    light = without_initializers(proto)
    inputs = {value.name for value in proto.graph.input}
    for tensor in proto.graph.initializer:
        elsewhere = tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.name in apart
        if not elsewhere and tensor.ByteSize() <= SMALL:
            light.graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    size = light.ByteSize()
    if size > SERIALIZABLE:
        raise ModelError(
            f"the model holds {size / 2**30:.1f} GiB beside its initializers, more than one ONNX proto can: "
            "store the weights that are in Constant nodes as initializers, with external data"
        )
    return light


def without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a proto but for the initializers of its graph."""
    copy = onnx.ModelProto()
    for descriptor, value in proto.ListFields():
        if descriptor.name != "graph":
            _copy_field(copy, descriptor.name, value)
    for descriptor, value in proto.graph.ListFields():
        if descriptor.name != "initializer":
            _copy_field(copy.graph, descriptor.name, value)
    copy.graph.SetInParent()
    return copy


def light_copy(model: ir.Model) -> ir.Model:
    """Return a copy of a model in which initializers and Constant nodes that are large are graph inputs."""
    light = model.clone()
    graph = light.graph
    inputs = set(graph.inputs)
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or _is_large(tensor):
            graph.initializers.pop(value.name or "")
            value.const_value = None
            if value not in inputs:
                graph.inputs.append(value)
    for node in list(graph):
        tensor = large_constant(node)
        if tensor is not None and not node.outputs[0].is_graph_output():
            _replace_by_input(graph, node, tensor)
    return light


def large_constant(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the tensor of a Constant node when it is large."""
    attribute = node.attributes.get("value") if node.op_type == "Constant" else None
    if attribute is None or attribute.type != ir.AttributeType.TENSOR or attribute.is_ref():
        return None
    tensor: ir.TensorProtocol = attribute.value  # as_tensor() counts the bytes, which texts have not
    return tensor if _is_large(tensor) else None


def _is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a tensor has more bytes than inference reads; texts, whose bytes nothing counts, are small."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes > SMALL


def payload_bytes(dtype: ir.DataType, dimensions: list[int]) -> int:
    """Return how many bytes the elements of a tensor take, packed."""
    return -(-math.prod(dimensions) * dtype.bitwidth // 8)


def _replace_by_input(graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol) -> None:
    output = node.outputs[0]
    name, output.name = output.name, None
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    output.replace_all_uses_with(value)
    graph.inputs.append(value)
    remove_node(node)


def _copy_field(target: object, name: str, value: object) -> None:
    if isinstance(value, (bool, int, float, str, bytes)):
        setattr(target, name, value)
    elif hasattr(value, "CopyFrom"):
        getattr(target, name).CopyFrom(value)
    else:
        getattr(target, name).extend(value)

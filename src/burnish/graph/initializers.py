"""Adding initializers to a graph, reading and setting what they hold, and removing what nothing reads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph.edits import remove_node


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Add an initializer under a name that must be free."""
    tensor = ir.Tensor(array) if isinstance(array, np.ndarray) else array
    tensor.name = name
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace_by_initializer(graph: ir.Graph, node: ir.Node, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Let an initializer of a graph stand for the output of a node, under its name, and remove the node."""
    output = node.outputs[0]
    name, output.name = output.name, None
    value = add_initializer(graph, name or "weight", array)
    output.replace_all_uses_with(value)
    remove_node(node)
    return value


def initial_array(value: ir.Value) -> np.ndarray:
    """Return what an initializer holds; the array is not to be written to."""
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())


def set_initializer(value: ir.Value, array: np.ndarray) -> None:
    """Let an initializer hold another array, of any shape, in the dtype that it has."""
    assert value.dtype is not None
    stored = np.asarray(array, value.dtype.numpy(), order="C")
    value.const_value = ir.Tensor(stored, value.dtype, name=value.name)
    value.shape = ir.Shape(stored.shape)


def remove_unread_value(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer, or the node that made a value, unless something reads it."""
    if value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is not None:
        remove_node(producer)
    elif value.is_initializer():
        graph.initializers.pop(value.name or "")

"""Adding initializers to a graph under names that are free."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def unused_name(graph: ir.Graph, wanted: str) -> str:
    """Return ``wanted``, or with a number behind it where a value of the graph has that name."""
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken.update(output.name for node in graph.all_nodes() for output in node.outputs)
    name, counter = wanted, 0
    while name in taken:
        counter += 1
        name = f"{wanted}_{counter}"
    return name


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an initializer under a name that must be free."""
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer, or the node that made a value, unless something reads it."""
    if value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is not None:
        graph.remove(producer, safe=True)
    elif value.is_initializer():
        graph.initializers.pop(value.name)  # type: ignore[arg-type]

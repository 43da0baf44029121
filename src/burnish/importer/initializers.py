"""Weights in one place: the initializers of the main graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, Names, constant_array, remove_node
from burnish.importer.operands import WEIGHT_OPERANDS


def gather_initializers(model: ir.Model) -> None:
    """Make, in place, every weight an initializer of the main graph, and no initializer a graph input.

    An initializer that is also an input is a weight with a default a caller may override; in training it is state. Weights
    that an exporter wrote as Constant nodes are lifted under the name of the node's output. The ones and zeros that stand for
    the scale and bias that a normalization layer does not have stay constants: they were never weights.
    """
    graph = model.graph
    weights = set(graph.initializers.values())
    kept = [value for value in graph.inputs if value not in weights]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    subgraphs = [subgraph for subgraph in model.graphs() if subgraph is not graph]
    if subgraphs:
        values = (*graph.inputs, *graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs))
        names = Names(value.name for value in values)
        for subgraph in subgraphs:
            _lift_from_subgraph(graph, subgraph, names)
    # An exporter that writes all weights as Constant nodes writes a fresh scale and bias so, too.
    has_initializers = any(
        value.dtype in FLOATING and value.shape is not None and len(value.shape) > 1 for value in graph.initializers.values()
    )
    for node in list(graph):
        for index in WEIGHT_OPERANDS.get(node.op_type, ()) if node.domain == "" else ():
            operand = node.inputs[index] if index < len(node.inputs) else None
            if operand is not None and not (has_initializers and _stands_for_nothing(node, index, operand)):
                _lift(graph, operand)
        if node.op_type == "Add" and node.domain == "":
            _lift_bias(graph, node)


def _stands_for_nothing(node: ir.Node, index: int, operand: ir.Value) -> bool:
    """Whether a constant is the scale 1 or the bias 0 that a normalization layer without them is written with."""
    if not node.op_type.endswith("Normalization") or index not in (1, 2):
        return False
    array = constant_array(operand) if operand.producer() is not None else None
    return array is not None and bool(np.all(array == (1 if index == 1 else 0)))


def _lift_from_subgraph(graph: ir.Graph, subgraph: ir.Graph, names: Names) -> None:
    """Move the floating-point tensors of a branch or loop body; axes and shapes stay where inference sees them."""
    for name, value in list(subgraph.initializers.items()):
        if value.dtype not in FLOATING or value.shape is None or len(value.shape) == 0:
            continue
        if value.is_graph_input() or value.is_graph_output():
            continue
        del subgraph.initializers[name]
        value.name = names.take(name)
        graph.register_initializer(value)


def _lift_bias(graph: ir.Graph, node: ir.Node) -> None:
    """Lift the bias of a dense layer that is written as MatMul and Add."""
    for operand, other in (node.inputs, reversed(node.inputs)):
        producer = None if other is None else other.producer()
        if operand is not None and producer is not None and producer.op_type in ("MatMul", "Conv", "ConvTranspose", "Gemm"):
            _lift(graph, operand)


def _lift(graph: ir.Graph, value: ir.Value) -> None:
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.graph is not graph or value.is_graph_output() or not value.name:
        return
    array = constant_array(value)
    if array is None or array.ndim == 0:
        return
    attribute = node.attributes.get("value")
    tensor = ir.Tensor(array) if attribute is None else attribute.as_tensor()
    if tensor.dtype not in FLOATING:
        return
    name, value.name = value.name, None
    lifted = ir.Value(
        name=name,
        type=ir.TensorType(tensor.dtype),
        shape=ir.Shape(tensor.shape.numpy()),
        const_value=tensor if isinstance(tensor, ir.ExternalTensor) else ir.Tensor(array, tensor.dtype, name=name),
    )
    lifted.const_value.name = name  # type: ignore[union-attr]
    graph.register_initializer(lifted)
    value.replace_all_uses_with(lifted)
    remove_node(node)

"""Weights that a file holds by their shape alone: ``ConstantOfShape`` where a layer reads its weights.

The ``light`` models of the onnx package are written so, to keep the files small. Their weights train like others, from one value
that all elements have, or freshly initialized.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, constant_array, remove_node, static_shape

WEIGHTS = {"BatchNormalization": (1, 2, 3, 4), "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2)}
PASSED_ON = frozenset({"Identity", "Reshape", "Squeeze", "Unsqueeze"})
LARGEST = 1 << 31
"""Elements of a weight; above, a few bytes of a file would ask for more memory than there is."""


def hold_stripped_weights(model: ir.Model) -> None:
    """Make, in place, initializers of weights that are only filled with one value, in a model that reads no matrix otherwise.

    In a model with weights of its own such a fill is the zero or the one that stands for a bias or scale that a layer lacks.
    """
    graph = model.graph
    if any(map(_is_matrix, graph.initializers.values())):
        return
    scaled: set[ir.Value] = set()
    for node in list(graph):
        if node.domain != "":
            continue
        for index in WEIGHTS.get(node.op_type, ()):
            if index < len(node.inputs):
                _hold(graph, node.inputs[index])
        if node.op_type in ("Add", "Mul"):
            _hold_scale_or_shift(graph, node, scaled)


def _is_matrix(value: ir.Value) -> bool:
    shape = static_shape(value) or ()
    return value.dtype in FLOATING and len(shape) > 1 and math.prod(shape) > 1 and bool(value.uses())


def _hold_scale_or_shift(graph: ir.Graph, node: ir.Node, scaled: set[ir.Value]) -> None:
    """Hold the weight of a layer of its own that scales what batch normalization gives, and of one that then adds to it."""
    for operand, other in (node.inputs, reversed(node.inputs)):
        producer = None if other is None else other.producer()
        after_norm = producer is not None and producer.op_type == "BatchNormalization" and producer.domain == ""
        if (after_norm or other in scaled) and _hold(graph, operand):
            scaled.add(node.outputs[0])


def _hold(graph: ir.Graph, value: ir.Value | None) -> bool:
    """Make an initializer of what a value is, behind nodes that only pass it on, where that is a fill; whether it is one now."""
    while value is not None and (node := value.producer()) is not None and node.op_type in PASSED_ON and node.domain == "":
        value = node.inputs[0]
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != "ConstantOfShape" or node.domain != "" or node.graph is not graph:
        return value is not None and value.is_initializer()
    extents = constant_array(node.inputs[0])
    if extents is None or extents.ndim != 1 or not extents.size or (extents < 1).any() or value.is_graph_output():
        return False
    shape = [int(extent) for extent in extents]
    given = node.attributes.get("value")
    fill = np.zeros(1, np.float32) if given is None else given.as_tensor().numpy()
    dtype = ir.DataType.FLOAT if given is None else given.as_tensor().dtype
    if dtype not in FLOATING or fill.size != 1 or math.prod(shape) > LARGEST or not value.name:
        return False
    name, value.name = value.name, None
    tensor = ir.Tensor(np.broadcast_to(fill.reshape(()), shape), dtype, name=name)
    held = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape), const_value=tensor)
    graph.register_initializer(held)
    value.replace_all_uses_with(held)
    remove_node(node)
    return True

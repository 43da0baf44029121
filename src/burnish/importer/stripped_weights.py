"""Weights that a file holds by their shape alone: ``ConstantOfShape`` where a layer reads its weights.

The ``light`` models of the onnx package are written so, to keep the files small. Their weights train like others, from one value
that all elements have, or freshly initialized.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, attribute_value, constant_array, static_shape
from burnish.graph.constants import replace_by_initializer
from burnish.graph.uses import origin_of, producer_of

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
        after_norm = producer_of(other, "BatchNormalization") is not None
        if (after_norm or other in scaled) and _hold(graph, operand):
            scaled.add(node.outputs[0])


def _hold(graph: ir.Graph, value: ir.Value | None) -> bool:
    """Turn what a value is passed on from into an initializer, if it is a fill; return whether an initializer is there now."""
    if value is None:
        return False
    value = origin_of(value, PASSED_ON)
    node = producer_of(value, "ConstantOfShape")
    if node is None or node.graph is not graph:
        return value.is_initializer()
    extents = constant_array(node.inputs[0])
    if extents is None or extents.ndim != 1 or not extents.size or (extents < 1).any() or value.is_graph_output():
        return False
    shape = [int(extent) for extent in extents]
    fill: ir.TensorProtocol = attribute_value(node, "value", ir.Tensor(np.zeros(1, np.float32)))
    if fill.dtype not in FLOATING or fill.size != 1 or math.prod(shape) > LARGEST or not value.name:
        return False
    replace_by_initializer(graph, node, ir.Tensor(np.broadcast_to(fill.numpy().reshape(()), shape), fill.dtype))
    return True

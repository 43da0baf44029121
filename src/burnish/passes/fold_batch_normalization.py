"""Folding of inference-mode batch normalization into the layer before it, or the one behind it.

Batch normalization at inference is ``y = a * x + b`` per channel, with ``a = scale / sqrt(variance + epsilon)`` and
``b = bias - mean * a`` (Ioffe and Szegedy 2015, section 3.1). Behind a linear layer with output channels the same numbers
come from weights ``a * W`` and the bias ``a * c + b``. What is left is tried on the layer behind it (``fold_into_following``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.graph import Names, add_initializer, attribute_value, constant_array, remove_node, remove_unread_value, replace_value
from burnish.graph.uses import is_read_once
from burnish.passes.constant_operands import dtype_of, new_bias_name, put, rounded
from burnish.passes.fold_into_following import fold_into_following

EPSILON = 1e-5
"""The standard's default of the attribute ``epsilon``."""


def fold_batch_normalization(model: ir.Model) -> ir.Model:
    """Fold, in place, inference-mode BatchNormalization into a Conv, ConvTranspose, Gemm or MatMul with Add before it.

    A layer is folded when the normalization is the only reader of its output and every operand is an initializer or
    constant. What cannot be folded so is folded into the Conv, Gemm or MatMul behind it, where that is its only reader and the
    outputs stay the same up to rounding: a Conv without padding, unless the normalization shifts nothing.

    Computed in float64 and rounded once to the weight's dtype. Weights keep their names; one that other nodes read too is
    copied, and the copy gets a new name. A layer without a bias gets one: ``<layer>.bias`` for a weight ``<layer>.weight``,
    else the name of the normalization's bias. Initializers that nothing reads any more are removed.

    Returns:
        The same model.
    """
    names = Names.of(model.graph)
    for node in list(model.graph):
        if _is_inference_batch_normalization(node):
            _fold(model.graph, names, node, _into_preceding)
    for node in reversed(list(model.graph)):
        if _is_inference_batch_normalization(node):
            _fold(model.graph, names, node, fold_into_following)
    return model


def _is_inference_batch_normalization(node: ir.Node) -> bool:
    if node.op_type != "BatchNormalization" or node.domain != "":
        return False
    mode = node.attributes.get("training_mode")
    in_use = any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
    return not in_use and (mode is None or mode.value == 0)


def _fold(graph: ir.Graph, names: Names, normalization: ir.Node, into: _Fold) -> None:
    value = normalization.inputs[0]
    factors = _factors(normalization)
    if value is None or factors is None or not into(graph, names, normalization, *factors):
        return
    operands = [operand for operand in normalization.inputs[1:] if operand is not None]
    replace_value(normalization.outputs[0], value)
    remove_node(normalization)
    for operand in operands:
        remove_unread_value(graph, operand)


def _into_preceding(graph: ir.Graph, names: Names, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    value = normalization.inputs[0]
    layer = None if value is None else value.producer()
    if value is None or layer is None or layer.domain != "" or layer.graph is not graph or not is_read_once(value):
        return False
    rule = _RULES.get(layer.op_type)
    return rule is not None and rule(graph, names, layer, normalization, a, b)


def _factors(normalization: ir.Node) -> tuple[np.ndarray, np.ndarray] | None:
    """Return ``a`` and ``b`` of each channel in float64, or None when they are not constant and finite."""
    arrays = [constant_array(operand) for operand in normalization.inputs[1:5]]
    if any(array is None for array in arrays):
        return None
    scale, bias, mean, variance = (np.asarray(array, dtype=np.float64) for array in arrays)
    epsilon = float(attribute_value(normalization, "epsilon", EPSILON))
    with np.errstate(all="ignore"):
        a = scale / np.sqrt(variance + epsilon)
        b = bias - mean * a
    return (a, b) if np.isfinite(a).all() and np.isfinite(b).all() else None


def _fold_convolution(
    graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray
) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None:
        return False
    scaled = weight.astype(np.float64) * a.reshape(-1, *[1] * (weight.ndim - 1))
    return _fold_with_bias(graph, names, layer, normalization, scaled, a, b)


def _fold_transposed_convolution(
    graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray
) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None:
        return False
    # The weight is (channels in, channels out of a group, ...): output channel o of group g is g * (out of a group) + o.
    groups = layer.attributes["group"].as_int() if "group" in layer.attributes else 1
    grouped = weight.astype(np.float64).reshape(groups, -1, *weight.shape[1:])
    scaled = grouped * a.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
    return _fold_with_bias(graph, names, layer, normalization, scaled.reshape(weight.shape), a, b)


def _fold_with_bias(
    graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, scaled: np.ndarray, a: np.ndarray, b: np.ndarray
) -> bool:
    present = layer.inputs[2] if len(layer.inputs) > 2 else None
    bias = constant_array(present)
    if present is not None and bias is None:
        return False
    if bias is not None and bias.shape != a.shape:
        return False
    shifted = b if bias is None else bias.astype(np.float64) * a + b
    return _replace_weight_and_bias(graph, names, layer, normalization, scaled, shifted)


def _fold_gemm(graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    weight = constant_array(layer.inputs[1])
    present = layer.inputs[2] if len(layer.inputs) > 2 else None
    bias = constant_array(present)
    if weight is None or (present is not None and bias is None):
        return False
    transposed = "transB" in layer.attributes and layer.attributes["transB"].as_int() != 0
    beta = layer.attributes["beta"].as_float() if "beta" in layer.attributes else 1.0
    scaled = weight.astype(np.float64) * (a[:, None] if transposed else a[None, :])
    shifted = b if bias is None else beta * bias.astype(np.float64) * a + b
    if not _replace_weight_and_bias(graph, names, layer, normalization, scaled, shifted):
        return False
    layer.attributes.pop("beta", None)
    return True


def _replace_weight_and_bias(
    graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, scaled: np.ndarray, shifted: np.ndarray
) -> bool:
    dtype = dtype_of(layer.inputs[1])
    weight, bias = rounded(scaled, dtype), rounded(shifted, dtype)
    if weight is None or bias is None:
        return False
    put(graph, names, layer, 1, weight)
    if len(layer.inputs) > 2 and layer.inputs[2] is not None:
        put(graph, names, layer, 2, bias)
    else:
        layer.resize_inputs(3)
        layer.replace_input_with(2, add_initializer(graph, new_bias_name(graph, names, layer.inputs[1], normalization), bias))
    return True


def _fold_added_bias(graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    """MatMul and Add: a dense layer whose output is (batch, channels), the only case where channels are the last axis."""
    for position in (0, 1):
        product = layer.inputs[1 - position]
        bias = constant_array(layer.inputs[position])
        producer = None if product is None else product.producer()
        if bias is None or product is None or producer is None or producer.op_type != "MatMul" or producer.domain != "":
            continue
        weight = constant_array(producer.inputs[1])
        shape = layer.outputs[0].shape
        if weight is None or weight.ndim != 2 or shape is None or len(shape) != 2 or not is_read_once(product):
            continue
        if bias.ndim > 2 or producer.graph is not graph:
            continue
        dtype = dtype_of(producer.inputs[1])
        scaled = rounded(weight.astype(np.float64) * a[None, :], dtype)
        shifted = rounded(bias.astype(np.float64) * a + b, dtype)
        if scaled is None or shifted is None:
            return False
        put(graph, names, producer, 1, scaled)
        put(graph, names, layer, position, shifted)
        return True
    return False


_Fold = Callable[[ir.Graph, Names, ir.Node, np.ndarray, np.ndarray], bool]
_Rule = Callable[[ir.Graph, Names, ir.Node, ir.Node, np.ndarray, np.ndarray], bool]
_RULES: dict[str, _Rule] = {
    "Add": _fold_added_bias,
    "Conv": _fold_convolution,
    "ConvTranspose": _fold_transposed_convolution,
    "Gemm": _fold_gemm,
}

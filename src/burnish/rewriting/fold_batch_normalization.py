"""Folding of inference-mode batch normalization into the layer before it, or the one after it.

Batch normalization at inference is ``y = a * x + b`` per channel, with ``a = scale / sqrt(variance + epsilon)`` and
``b = bias - mean * a`` (Ioffe and Szegedy 2015, section 3.1). After a linear layer with output channels the same numbers
come from weights ``a * W`` and the bias ``a * c + b``. What is left is tried on the layer after it (``fold_into_following``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.graph import Names, attribute_value, constant_array, remove_node, remove_unread_value, replace_value
from burnish.graph.uses import is_read_once, is_used, producer_of
from burnish.rewriting.fold_into_following import fold_into_following
from burnish.rewriting.folding import Folding, rounded, wide

EPSILON = 1e-5
"""The standard's default of the attribute ``epsilon``."""


def fold_batch_normalization(model: ir.Model) -> bool:
    """Fold, in place, inference-mode BatchNormalization into a Conv, ConvTranspose, Gemm or MatMul with Add before it.

    A layer is folded when the normalization is the only reader of its output and every operand is an initializer or
    constant. What cannot be folded so is folded into the Conv, Gemm or MatMul after it, where that is its only reader and the
    outputs stay the same up to rounding: a Conv without padding, unless the normalization shifts nothing.

    Computed in float64 and rounded once to the weight's dtype. Weights keep their names; one that other nodes read too is
    copied, and the copy gets a new name. A layer without a bias gets one: ``<layer>.bias`` for a weight ``<layer>.weight``,
    else the name of the normalization's bias. Initializers that nothing reads any more are removed.
    """
    changed = False
    names = Names.of(model.graph)
    for node in list(model.graph):
        if _is_inference_batch_normalization(node):
            changed |= _fold(model.graph, names, node, _into_preceding)
    for node in reversed(list(model.graph)):
        if _is_inference_batch_normalization(node):
            changed |= _fold(model.graph, names, node, fold_into_following)
    return changed


def _is_inference_batch_normalization(node: ir.Node) -> bool:
    if node.op_type != "BatchNormalization" or node.domain != "":
        return False
    return not any(map(is_used, node.outputs[1:])) and attribute_value(node, "training_mode", 0) == 0


def _fold(graph: ir.Graph, names: Names, normalization: ir.Node, into: Callable[[Folding], bool]) -> bool:
    value = normalization.inputs[0]
    factors = _factors(normalization)
    if value is None or factors is None or not into(Folding(graph, names, normalization, *factors)):
        return False
    operands = [operand for operand in normalization.inputs[1:] if operand is not None]
    replace_value(normalization.outputs[0], value)
    remove_node(normalization)
    for operand in operands:
        remove_unread_value(graph, operand)
    return True


def _into_preceding(folding: Folding) -> bool:
    value = folding.normalization.inputs[0]
    layer = producer_of(value, *_RULES)
    if value is None or layer is None or layer.graph is not folding.graph or not is_read_once(value):
        return False
    return _RULES[layer.op_type](folding, layer)


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


def _fold_convolution(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None:
        return False
    scaled = wide(weight) * folding.a.reshape(-1, *[1] * (weight.ndim - 1))
    return folding.give(layer, scaled, folding.b, folding.a)


def _fold_transposed_convolution(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None:
        return False
    # The weight is (channels in, channels out of a group, ...): output channel o of group g is g * (out of a group) + o.
    groups = attribute_value(layer, "group", 1)
    scaled = wide(weight).reshape(groups, -1, *weight.shape[1:]) * folding.a.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))
    return folding.give(layer, scaled.reshape(weight.shape), folding.b, folding.a)


def _fold_gemm(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None:
        return False
    scaled = wide(weight) * (folding.a[:, None] if attribute_value(layer, "transB", 0) else folding.a[None, :])
    if not folding.give(layer, scaled, folding.b, attribute_value(layer, "beta", 1.0) * folding.a):
        return False
    layer.attributes.pop("beta", None)
    return True


def _fold_added_bias(folding: Folding, layer: ir.Node) -> bool:
    """MatMul and Add: a dense layer whose output is (batch, channels), the only case where channels are the last axis."""
    for position in (0, 1):
        product, bias = layer.inputs[1 - position], constant_array(layer.inputs[position])
        producer = producer_of(product, "MatMul")
        if bias is None or bias.ndim > 2 or product is None or producer is None or producer.graph is not folding.graph:
            continue
        weight = constant_array(producer.inputs[1])
        shape = layer.outputs[0].shape
        if weight is None or weight.ndim != 2 or shape is None or len(shape) != 2 or not is_read_once(product):
            continue
        scaled = rounded(wide(weight) * folding.a[None, :], weight.dtype)
        shifted = rounded(wide(bias) * folding.a + folding.b, weight.dtype)
        if scaled is None or shifted is None:
            return False
        folding.put(producer, 1, scaled)
        folding.put(layer, position, shifted)
        return True
    return False


_RULES: dict[str, Callable[[Folding, ir.Node], bool]] = {
    "Add": _fold_added_bias,
    "Conv": _fold_convolution,
    "ConvTranspose": _fold_transposed_convolution,
    "Gemm": _fold_gemm,
}

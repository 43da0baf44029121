"""Folding of inference-mode batch normalization into the layer before or after it.

Batch normalization at inference is ``y = a * x + b`` per channel, with ``a = scale / sqrt(variance + epsilon)`` and ``b = bias -
mean * a`` (Ioffe and Szegedy 2015, section 3.1). In a preceding linear layer this gives weights ``a * W`` and bias ``a * c + b``.
Otherwise the layer after it is tried: ``W y + c = (W a) x + (W b + c)``. A convolution with zero padding pads y and not x, so its
borders would differ unless b is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.graph import (
    Names,
    add_initializer,
    attribute_value,
    constant_array,
    insert_behind,
    remove_node,
    remove_unread_value,
    replace_value,
)
from burnish.graph.annotations import FOLDED
from burnish.graph.uses import is_read_once, is_used, producer_of


@dataclass(frozen=True)
class Folding:
    """A batch normalization, ``a * x + b`` per channel, to be folded into a layer.

    Attributes:
        graph: the graph of both.
        names: names in use in the graph.
        normalization: the node.
        a, b: float64 [C].
    """

    graph: ir.Graph
    names: Names
    normalization: ir.Node
    a: np.ndarray
    b: np.ndarray

    def give(self, layer: ir.Node, weight: np.ndarray, shift: np.ndarray, factor: np.ndarray | float = 1.0) -> bool:
        """Set a layer's weight, and its bias to ``factor`` times the old bias plus ``shift``, rounded to the weight's dtype.

        Returns:
            True if possible: any present bias is constant, and the dtype can hold the numbers.
        """
        present = layer.inputs[2] if len(layer.inputs) > 2 else None
        bias = constant_array(present)
        if present is not None and bias is None:
            return False
        if layer.op_type != "Gemm" and bias is not None and bias.shape != shift.shape:
            return False
        dtype = dtype_of(layer.inputs[1])
        scaled, shifted = rounded(weight, dtype), rounded(shift if bias is None else factor * wide(bias) + shift, dtype)
        if scaled is None or shifted is None:
            return False
        self.put(layer, 1, scaled)
        if present is not None:
            self.put(layer, 2, shifted)
        elif shift.any():
            layer.resize_inputs(3)
            layer.replace_input_with(2, self.new_bias(layer.inputs[1], shifted))
        FOLDED.set(layer, self.normalization.name or "")
        return True

    def put(self, node: ir.Node, index: int, array: np.ndarray) -> None:
        """Set a constant operand of a node; under the same name unless the old one has other readers."""
        old = node.inputs[index]
        assert old is not None
        if is_read_once(old) and old.is_initializer():
            old.const_value = ir.Tensor(array, name=old.name)
            old.shape = ir.Shape(array.shape)
            return
        node.replace_input_with(index, add_initializer(self.graph, self.names.take(old.name or "weight"), array))
        if not old.is_initializer():
            remove_unread_value(self.graph, old)

    def new_bias(self, weight: ir.Value | None, array: np.ndarray) -> ir.Value:
        """Add a bias: ``<layer>.bias`` for ``<layer>.weight``, else with the name of the normalization's bias."""
        bias = self.normalization.inputs[2]
        assert weight is not None
        assert bias is not None
        stem = (weight.name or "").removesuffix(".weight")
        name = bias.name or "bias"
        if stem != weight.name:
            name = f"{stem}.bias"
        elif is_read_once(bias) and bias.is_initializer():
            self.graph.initializers.pop(name)
            bias.name = None
            self.names.release(name)
        return add_initializer(self.graph, self.names.take(name), array)


def dtype_of(value: ir.Value | None) -> np.dtype:
    array = constant_array(value)
    assert array is not None
    return array.dtype


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Cast, or return None if the dtype cannot hold a number."""
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    return result if np.isfinite(wide(result)).all() else None


def fold_into_following(folding: Folding) -> bool:
    """Fold ``a * x + b``, in place, into the only reader of a normalization: Conv, Gemm or MatMul, possibly after a Flatten.

    Weights and biases keep their names. The layer still reads the normalization, which the caller must remove.

    Returns:
        True if it was folded.
    """
    use = _only_use(folding.normalization.outputs[0])
    if use is None:
        return False
    reader, index = use
    if reader.op_type in ("Flatten", "Reshape") and reader.domain == "" and index == 0:
        positions = _flattened_positions(reader)
        use = _only_use(reader.outputs[0])
        if positions is None or use is None:
            return False
        reader, index = use
        folding = replace(folding, a=np.repeat(folding.a, positions), b=np.repeat(folding.b, positions))
    rule = _FOLLOWING_RULES.get(reader.op_type) if reader.domain == "" and index == 0 and reader.graph is folding.graph else None
    return rule is not None and rule(folding, reader)


def _only_use(value: ir.Value) -> tuple[ir.Node, int] | None:
    if not is_read_once(value):
        return None
    reader, index = next(iter(value.uses()))
    return reader, index


def _flattened_positions(node: ir.Node) -> int | None:
    """Return the number of positions per channel for a node that flattens [N, C, ...] to [N, C * positions], else None."""
    before, behind = node.inputs[0], node.outputs[0]
    if before is None or before.shape is None or behind.shape is None or len(behind.shape) != 2 or len(before.shape) < 2:
        return None
    extents = [extent for extent in before.shape.dims[1:] if isinstance(extent, int)]
    if len(extents) != len(before.shape) - 1 or behind.shape.dims[1] != math.prod(extents):
        return None
    return math.prod(extents[1:])


def _convolution(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None or (folding.b.any() and _pads(layer)):
        return False
    groups = attribute_value(layer, "group", 1)
    # Output channel o of group g reads input channels from g * (channels per group) on.
    grouped = wide(weight).reshape(groups, -1, *weight.shape[1:])
    shape = (groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
    shift = (grouped * folding.b.reshape(shape)).sum(axis=tuple(range(2, grouped.ndim))).reshape(-1)
    return folding.give(layer, (grouped * folding.a.reshape(shape)).reshape(weight.shape), shift)


def _pads(layer: ir.Node) -> bool:
    return attribute_value(layer, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or any(attribute_value(layer, "pads", ()))


def _gemm(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None or attribute_value(layer, "transA", 0):
        return False
    alpha, beta = (attribute_value(layer, name, 1.0) for name in ("alpha", "beta"))
    matrix, a, b = wide(weight), folding.a, folding.b
    if attribute_value(layer, "transB", 0):
        scaled, shift = matrix * a[None, :], matrix @ b
    else:
        scaled, shift = matrix * a[:, None], b @ matrix
    if not folding.give(layer, scaled, alpha * shift, beta):
        return False
    layer.attributes.pop("beta", None)
    return True


def _matmul(folding: Folding, layer: ir.Node) -> bool:
    """Only for input [N, C], in which the channels are the summed axis."""
    weight = constant_array(layer.inputs[1])
    x = layer.inputs[0]
    if weight is None or weight.ndim != 2 or x is None or x.shape is None or len(x.shape) != 2:
        return False
    scaled, shift = rounded(wide(weight) * folding.a[:, None], weight.dtype), folding.b @ wide(weight)
    product = layer.outputs[0]
    use = _only_use(product)
    added = None if use is None or use[0].op_type != "Add" or use[0].domain != "" else constant_array(use[0].inputs[1 - use[1]])
    shifted = rounded(shift if added is None else wide(added) + shift, weight.dtype)
    if scaled is None or shifted is None:
        return False
    if use is not None and added is not None:
        folding.put(use[0], 1 - use[1], shifted)
    elif shift.any():
        insert_behind(layer, ir.node("Add", [product, folding.new_bias(layer.inputs[1], shifted)]), folding.names)
    folding.put(layer, 1, scaled)
    return True


_FOLLOWING_RULES: dict[str, Callable[[Folding, ir.Node], bool]] = {"Conv": _convolution, "Gemm": _gemm, "MatMul": _matmul}


EPSILON = 1e-5
"""The standard's default of the attribute ``epsilon``."""


def fold_batch_normalization(model: ir.Model) -> bool:
    """Fold, in place, inference-mode BatchNormalization into a Conv, ConvTranspose, Gemm or MatMul with Add before it.

    The normalization must be the only reader of the layer's output, and all operands constant. Otherwise it is folded into the
    Conv, Gemm or MatMul after it if that is its only reader and the outputs stay equal up to rounding: a Conv must have no
    padding unless the normalization shifts nothing.

    The numbers are computed in float64 and rounded once to the weight's dtype. Weights keep their names; a weight with other
    readers is copied under a new name. A layer without a bias gets one: ``<layer>.bias`` for a weight ``<layer>.weight``, else
    named after the normalization's bias. Unread initializers are removed.
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
    """Return ``a`` and ``b`` per channel in float64, or None if they are not constant and finite."""
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
    # The weight is (channels in, channels out per group, ...): output channel o of group g is g * (out per group) + o.
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
    """Fold into MatMul and Add with an output (batch, channels), the only case with channels on the last axis."""
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

"""Recognition of group normalization (Wu and He 2018) written as Reshape, normalization and Reshape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, constant_array, same_dimension, static_shape
from burnish.graph.matching import Either, Match, Node, Pattern, Variable, find_match
from burnish.graph.uses import is_used
from burnish.graph.versions import raise_opset
from burnish.rewriting.normalization_patterns import is_valid_epsilon, replace_pieces

OPSET = 21
"""First opset with a scale and bias per channel in GroupNormalization."""

EPSILON = 1e-5
"""The standard's default of the attribute ``epsilon``."""


def recognize_group_normalization(model: ir.Model) -> bool:
    """Replace, in place, written-out group normalization by GroupNormalization of opset 21.

    Matches InstanceNormalization without an affine part of its own, and LayerNormalization, which
    ``recognize_layer_normalization`` makes of ReduceMean and similar forms. The opset is raised to 21 if every other node keeps
    its meaning; otherwise nothing is replaced. Scale and bias keep their names.

    Only for training graphs, in which the operator gets a training form: ONNX Runtime has no CPU kernel for it and expands a
    function with E[x²] - E[x]², which is less precise than the original nodes.
    """
    changed = False
    for node in reversed(list(model.graph)):
        if node.graph is None or node.domain != "" or node.op_type not in ("Add", "Mul", "Reshape"):
            continue
        match = find_match(_LAYER, node.outputs[0], _is_layer)
        if match is None:
            continue
        if not raise_opset(model.graph, OPSET):
            break
        builder = Builder(model.graph, before=node)
        x = builder.tensor(match["x"])
        scale = _per_channel(builder, x, match.get("scale"), 1.0)
        bias = _per_channel(builder, x, match.get("bias"), 0.0)
        layer = builder.op("GroupNormalization", x, scale, bias, like=x, num_groups=match["groups"], epsilon=match["epsilon"])
        replace_pieces(model.graph, node.outputs[0], layer)
        changed = True
    return changed


def hold_group_normalization_constants(model: ir.Model) -> bool:
    """Turn, in place, the ones and zeros inside written-out group normalization into constants.

    As initializers of InstanceNormalization they would be weights, but exporters only add them as placeholders.
    """
    changed = False
    for node in model.graph:
        if node.op_type != "Reshape" or node.domain != "":
            continue
        match = find_match(_RESTORED, node.outputs[0], _is_layer)
        for normalization in () if match is None else match.nodes:
            if normalization.op_type == "InstanceNormalization":
                for index in (1, 2):
                    changed |= _hold_constant(model.graph, normalization, index)
    return changed


def _hold_constant(graph: ir.Graph, node: ir.Node, index: int) -> bool:
    value = node.inputs[index]
    array = constant_array(value)
    if value is None or array is None or not value.is_initializer():
        return False
    node.replace_input_with(index, Builder(graph, before=node).constant(array).value)
    if not is_used(value):
        graph.initializers.pop(value.name or "")
    return True


def _is_layer(match: Match) -> bool:
    x: ir.Value = match["x"]
    restored: ir.Value = match["restored"]
    if x.dtype != ir.DataType.FLOAT or not is_valid_epsilon(match) or not _has_shape_of(restored, x):
        return False
    assert x.shape is not None
    channels = x.shape.dims[1]
    if not isinstance(channels, int) or channels % match["groups"] != 0:
        return False
    return all(_is_per_channel(match.get(name), x, channels) for name in ("scale", "bias"))


def _is_per_channel(operand: ir.Value | None, x: ir.Value, channels: int) -> bool:
    if operand is None:
        return True
    if operand.dtype != x.dtype or operand.shape is None or x.shape is None or len(operand.shape) > len(x.shape):
        return False
    aligned = [1] * (len(x.shape) - len(operand.shape)) + list(operand.shape.dims)
    return aligned[1] in (1, channels) and all(extent == 1 for axis, extent in enumerate(aligned) if axis != 1)


def _per_channel(builder: Builder, x: Tensor, operand: ir.Value | None, default: float) -> Tensor:
    channels = x.dimension(1)
    assert channels is not None
    if operand is None:
        return builder.constant(np.full(channels, default, dtype=x.dtype.numpy()))
    tensor = builder.tensor(_vector(operand, channels))
    if tensor.rank != 1:
        tensor = builder.op("Reshape", tensor, builder.integers([-1]))
    return tensor if tensor.dimension(0) == channels else builder.op("Expand", tensor, builder.integers([channels]))


def _vector(operand: ir.Value, channels: int) -> ir.Value:
    """Return the vector of all channels before an exporter's added axes, or the operand itself."""
    producer = operand.producer()
    source = producer.inputs[0] if producer is not None and producer.domain == "" and producer.inputs else None
    if producer is None or producer.op_type not in ("Unsqueeze", "Reshape") or source is None:
        return operand
    return source if static_shape(source) == (channels,) else operand


def _has_shape_of(restored: ir.Value, x: ir.Value) -> bool:
    """True if a reshaped value has the shape of ``x``; as it has the same elements, all dimensions but one suffice."""
    producer = restored.producer()
    target = None if producer is None else producer.inputs[1]
    shape = None if target is None else target.producer()
    if shape is not None and shape.op_type == "Shape" and shape.inputs[0] is x and not shape.attributes:
        return True
    if x.shape is None or restored.shape is None or len(x.shape) != len(restored.shape):
        return False
    pairs = zip(x.shape.dims, restored.shape.dims, strict=True)
    return sum(not same_dimension(left, right) for left, right in pairs) <= 1


def _restored() -> Pattern:
    grouped = Node("Reshape", Variable("x"), reads=_groups)
    normalized = Either(
        Node("InstanceNormalization", grouped, reads=_instance_normalization),
        Node("LayerNormalization", grouped, reads=_layer_normalization),
    )
    return Node("Reshape", normalized, reads=lambda node: {"restored": node.outputs[0]})


def _layer(restored: Pattern) -> Pattern:
    scaled = Either(Node("Mul", restored, Variable("scale")), restored)
    return Either(Node("Add", scaled, Variable("bias")), scaled)


def _groups(node: ir.Node) -> Mapping[str, Any] | None:
    """Return the number of groups if a Reshape of x [N, C, ...] keeps the batch and splits the rest by groups first."""
    x, target = node.inputs[0], constant_array(node.inputs[1])
    if x is None or x.shape is None or len(x.shape) < 2 or target is None or target.size < 3:
        return None
    batch, groups = int(target[0]), int(target[1])
    literal_zeros = "allowzero" in node.attributes and node.attributes["allowzero"].as_int() != 0
    keeps_batch = (batch == 0 and not literal_zeros) or (batch > 0 and batch == x.shape.dims[0])
    return {"groups": groups} if keeps_batch and groups > 0 else None


def _instance_normalization(node: ir.Node) -> Mapping[str, Any] | None:
    has_no_affine_part = _is_filled(node.inputs[1], 1.0) and _is_filled(node.inputs[2], 0.0)
    return {"epsilon": _epsilon(node)} if has_no_affine_part else None


def _layer_normalization(node: ir.Node) -> Mapping[str, Any] | None:
    x = node.inputs[0]
    if x is None or x.shape is None or len(node.outputs) > 1:
        return None
    axis = attribute_value(node, "axis", -1)
    operands = [value for value in node.inputs[1:] if value is not None]
    if any(value.is_initializer() for value in operands):
        return None  # weights that happen to be ones and zeros
    has_no_affine_part = all(_is_filled(value, number) for value, number in zip(operands, (1.0, 0.0), strict=False))
    return {"epsilon": _epsilon(node)} if has_no_affine_part and axis % len(x.shape) == 2 else None


def _is_filled(value: ir.Value | None, number: float) -> bool:
    producer = None if value is None else value.producer()
    source = None if producer is None or producer.op_type != "Expand" or producer.domain != "" else producer.inputs[0]
    if source is not None and not source.is_initializer():
        value = source
    array = constant_array(value)
    return array is not None and bool((array == number).all())


def _epsilon(node: ir.Node) -> float:
    epsilon: float = attribute_value(node, "epsilon", EPSILON)
    return epsilon


_RESTORED = _restored()
_LAYER = _layer(_RESTORED)

"""Fold masked and weight-normalized weights back into single initializers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value, constant_array, remove_node
from burnish.graph.annotations import masked_weights
from burnish.graph.constants import remove_unread_value, replace_by_initializer
from burnish.graph.uses import producer_of, remove_unread


def fold_pruning(model: ir.Model) -> bool:
    """Fold, in place, the products of constant weights and masks from ``burnish.surgery.prune``."""
    changed = False
    for node, _ in list(masked_weights(model.graph)):
        weight, mask = node.inputs
        numbers, kept = constant_array(weight), constant_array(mask)
        if weight is None or mask is None or numbers is None or kept is None or weight.name is None:
            continue
        weight.const_value = ir.Tensor(numbers * kept.astype(numbers.dtype), weight.dtype, name=weight.name)
        node.outputs[0].replace_all_uses_with(weight)
        remove_node(node)
        changed = True
        if not mask.uses():
            remove_unread_value(model.graph, mask)
    return changed


def fold_weight_normalization(model: ir.Model) -> bool:
    """Fold, in place, ``v * (g / ReduceL2(v))`` of constant g and v, as written by ``burnish.surgery.weight_normalize``.

    The result is computed in float64 and rounded once. It becomes an initializer with the weight's name; g and v are removed if
    unread. Results that are not finite stay unfolded.
    """
    changed = False
    for node in list(model.graph):
        operands = _normalized_weight(node)
        if operands is not None:
            changed |= _fold(model.graph, node, *operands)
    return changed


def _normalized_weight(node: ir.Node) -> tuple[ir.Value, ir.Node, ir.Node] | None:
    if node.op_type != "Mul" or node.domain != "" or node.outputs[0].is_graph_output():
        return None
    for direction, factor in (tuple(node.inputs), tuple(reversed(node.inputs))):
        division = producer_of(factor, "Div")
        norm = None if division is None else producer_of(division.inputs[1], "ReduceL2")
        if direction is None or division is None or norm is None or norm.inputs[0] is not direction:
            continue
        length, axes = division.inputs[0], norm.inputs[1] if len(norm.inputs) > 1 else None
        if not attribute_value(norm, "keepdims", 1):
            continue
        if all(constant_array(value) is not None for value in (direction, length, axes)):
            return direction, division, norm
    return None


def _fold(graph: ir.Graph, node: ir.Node, direction: ir.Value, division: ir.Node, norm: ir.Node) -> bool:
    length, axes = division.inputs[0], norm.inputs[1]
    v, g, along = (constant_array(value) for value in (direction, length, axes))
    assert v is not None
    assert g is not None
    assert along is not None
    over = tuple(int(axis) for axis in along) or None
    wide = v.astype(np.float64)
    with np.errstate(all="ignore"):
        weight = (g.astype(np.float64) * wide / np.sqrt(np.sum(wide * wide, axis=over, keepdims=True))).astype(v.dtype)
    if not np.isfinite(weight.astype(np.float64)).all():
        return False
    replace_by_initializer(graph, node, weight)
    remove_unread(graph, division, norm)
    return True

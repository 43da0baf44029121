"""Masked weights become single initializers again, with zeros where the mask has them."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import constant_array, remove_node
from burnish.graph.annotations import masked_weights
from burnish.graph.constants import remove_unread_value


def fold_pruning(model: ir.Model) -> bool:
    """Compute, in place, the products of constant weights and their masks, as ``burnish.surgery.prune`` writes them."""
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

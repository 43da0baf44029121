"""What stands around a batch normalization that its kernels take in: an addition, an activation, and the gradients of these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Tensor, constant_array, remove_node, replace_node, replace_uses
from burnish.graph.uses import only_user
from burnish.operators.activation import CLIP_GRAD, RELU_GRAD

RELU, CLIPPED = 1, 2
"""Activations as the kernels count them; 0 is none."""
ACTIVATION_GRADIENTS = {RELU: RELU_GRAD, CLIPPED: CLIP_GRAD}


@dataclass(frozen=True)
class Following:
    """What comes behind a layer.

    Attributes:
        addition, added: the node that adds something to the layer's result, and what.
        node: of the activation.
        activation, limit: as the kernels count them.
    """

    addition: ir.Node | None = None
    added: ir.Value | None = None
    node: ir.Node | None = None
    activation: int = 0
    limit: float = 0.0


@dataclass(frozen=True)
class Preceding:
    """What comes before the gradient of a layer with an activation.

    Attributes:
        node: the gradient of the activation.
        flow: the gradient that comes to it; ``more`` is still to be added to that.
        more, addition: the rest, and the node that adds it, where a block's input forks and nothing else reads the sum.
        is_read: whether what the node gives is read by others than the layer's gradient.
    """

    node: ir.Node
    flow: ir.Value
    more: ir.Value | None
    addition: ir.Node | None
    is_read: bool


def following(y: ir.Value) -> Following:
    """Find what alone reads a layer's result: an activation, with an addition between them or without."""
    last, addition, added = y, only_user(y, "Add"), None
    if addition is not None:
        other = addition.inputs[1] if addition.inputs[0] is y else addition.inputs[0]
        if other is not None and other is not y and _same_extents(other, y):
            last, added = addition.outputs[0], other
    found = _activation(last)
    if found is None:
        return Following()
    node, activation, limit = found
    return Following(addition if added is not None else None, added, node, activation, limit)


def preceding(flow: ir.Value, behind: Following, gradients: Collection[ir.Node]) -> Preceding | None:
    """Find the gradient of the layer's own activation, or None.

    Args:
        flow: the gradient that the layer's gradient reads.
        behind: what comes behind the layer.
        gradients: the nodes of the layer's gradient.
    """
    node = flow.producer()
    if behind.node is None or node is None or not ACTIVATION_GRADIENTS[behind.activation].is_of(node):
        return None
    source = node.inputs[0]
    if source is None or node.inputs[1] is not behind.node.outputs[0]:
        return None
    is_read = flow.is_graph_output() or any(user not in gradients for user, _ in flow.uses())
    addition = source.producer()
    if addition is not None and addition.op_type == "Add" and addition.domain == "" and len(source.uses()) == 1:
        one, other = addition.inputs
        if one is not None and other is not None and _same_extents(one, source) and _same_extents(other, source):
            return Preceding(node, one, other, addition, is_read)
    return Preceding(node, source, None, None, is_read)


def replace_layer(graph: ir.Graph, layer: ir.Node, behind: Following, y: Tensor) -> None:
    """Let ``y`` stand where the layer's result was, and what comes behind it, and remove their nodes."""
    if behind.node is None:
        replace_uses(layer.outputs[0], y.value)
    else:
        replace_node(behind.node, y)
        if behind.addition is not None:
            remove_node(behind.addition)
    remove_node(layer)


def remove_preceding(graph: ir.Graph, before: Preceding, kept: ir.Value) -> None:
    """Take the nodes out of the graph, after those of the layer's gradient; what else reads them reads ``kept``."""
    if before.is_read:
        replace_uses(before.node.outputs[0], kept)
    remove_node(before.node)
    if before.addition is not None:
        remove_node(before.addition)


def _activation(value: ir.Value) -> tuple[ir.Node, int, float] | None:
    """The activation that alone reads a value: its node, kind and limit."""
    node = only_user(value, "Relu")
    if node is not None:
        return node, RELU, 0.0
    node = only_user(value, "Clip")
    if node is None or len(node.inputs) < 3:
        return None
    low, high = (constant_array(bound) for bound in node.inputs[1:3])
    if low is None or high is None or float(low) != 0.0 or float(high) <= 0.0:
        return None
    return node, CLIPPED, float(high)


def _same_extents(one: ir.Value, other: ir.Value) -> bool:
    return one.shape is not None and other.shape is not None and one.shape == other.shape

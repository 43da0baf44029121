"""Group and instance normalization in training with the activation behind it; its gradient, with that of the activation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, remove_node, replace_node, replace_uses
from burnish.kernels.normalization import FUSED_GROUP_NORM, FUSED_GROUP_NORM_GRAD
from burnish.kernels.normalization.surroundings import ACTIVATION_GRADIENTS, following
from burnish.kernels.replacements import fuses
from burnish.operators.activation import SILU, SILU_GRAD
from burnish.operators.normalization.group import GROUP_NORM_GRAD, GROUP_NORM_TRAINING

BY_SILU = 3
"""As the kernel counts activations, behind those of batch normalization."""


@fuses(GROUP_NORM_TRAINING, GROUP_NORM_GRAD, SILU, SILU_GRAD)
def fuse_group_normalization(graph: ir.Graph) -> None:
    """Take every layer of a form that the kernels have, in place; the graph's order is to be restored after.

    SiLU that is left is written out, for the chains of elementwise operators.
    """
    for node in list(graph):
        if GROUP_NORM_TRAINING.is_of(node):
            _fuse_layer(graph, node)
    for node in list(graph):
        if SILU.is_of(node) or SILU_GRAD.is_of(node):
            _write_out(graph, node)


@dataclass(frozen=True)
class _Behind:
    """The activation behind a layer.

    Attributes:
        activation, limit: as the kernel counts them.
        nodes: it, and its gradients, which the kernels take in.
        result: its result; the layer's own where there is none.
        flows: by node of the layer's gradient, what comes to the gradient of the activation.
    """

    activation: int
    limit: float
    nodes: tuple[ir.Node, ...]
    result: ir.Value
    flows: dict[ir.Node, ir.Value]


def _fuse_layer(graph: ir.Graph, node: ir.Node) -> None:
    """GroupNormTraining, and the GroupNormGrad that reads it, to FusedGroupNorm and FusedGroupNormGrad."""
    x, scale, bias = node.inputs
    y, mean, inverse_std, shift, centered = node.outputs
    assert x is not None
    if x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) < 3:
        return
    gradients = {user for value in (mean, inverse_std, shift, centered) for user, _ in value.uses()}
    if any(not GROUP_NORM_GRAD.is_of(user) for user in gradients) or any(value.is_graph_output() for value in node.outputs[1:]):
        return
    behind = _silu_behind(y, gradients) or _bounded_behind(y, gradients) or _Behind(0, 0.0, (), y, {})
    builder = Builder(graph, before=behind.nodes[0] if behind.nodes else node)
    operands = [builder.tensor(value) for value in (x, scale, bias) if value is not None]
    attributes = {
        "num_groups": attribute_value(node, "num_groups", 0),
        "activation": behind.activation,
        "limit": behind.limit,
    }
    results = FUSED_GROUP_NORM.emit(
        *operands,
        epsilon=attribute_value(node, "epsilon", 1e-5),
        **attributes,
    )
    for result, source in zip(results, (y, mean, inverse_std, shift), strict=True):
        result.value.type, result.value.shape = source.type, source.shape
    for gradient in gradients:
        builder = Builder(graph, before=gradient)
        flow = behind.flows.get(gradient, gradient.inputs[0])
        assert flow is not None
        found = FUSED_GROUP_NORM_GRAD.emit(
            builder.tensor(flow),
            *(builder.tensor(operand.value) for operand in (*operands, *results[1:])),
            **attributes,
        )
        for result, output in zip(found, gradient.outputs, strict=True):
            result.value.type, result.value.shape = output.type, output.shape
            replace_uses(output, result.value)
        remove_node(gradient)
    replace_uses(behind.result, results[0].value)
    for other in reversed(behind.nodes):
        remove_node(other)
    remove_node(node)


def _silu_behind(y: ir.Value, gradients: Collection[ir.Node]) -> _Behind | None:
    """The sigmoid linear unit that alone reads a layer's result, where the layer's gradients alone read that of the unit."""
    users = list(y.uses())
    units = [user for user, _ in users if SILU.is_of(user)]
    slopes = [user for user, _ in users if SILU_GRAD.is_of(user)]
    if len(units) != 1 or len(units) + len(slopes) != len(users) or y.is_graph_output():
        return None
    unit = units[0]
    result, gate = unit.outputs
    if gate.is_graph_output() or any(user not in slopes for user, _ in gate.uses()):
        return None
    flows: dict[ir.Node, ir.Value] = {}
    for slope in slopes:
        flow, output = slope.inputs[0], slope.outputs[0]
        readers = [user for user, place in output.uses() if place == 0]
        if slope.inputs[1] is not y or flow is None or output.is_graph_output():
            return None
        if len(readers) != len(output.uses()) or any(reader not in gradients for reader in readers):
            return None
        flows |= dict.fromkeys(readers, flow)
    if set(flows) != set(gradients):
        return None
    return _Behind(BY_SILU, 0.0, (unit, *slopes), result, flows)


def _bounded_behind(y: ir.Value, gradients: Collection[ir.Node]) -> _Behind | None:
    """The ReLU, with an upper bound or without, that alone reads a layer's result."""
    behind = following(y)
    if behind.node is None or behind.addition is not None:
        return None
    result = behind.node.outputs[0]
    flows: dict[ir.Node, ir.Value] = {}
    nodes = [behind.node]
    for gradient in gradients:
        flow = gradient.inputs[0]
        slope = None if flow is None else flow.producer()
        if flow is None or slope is None or not ACTIVATION_GRADIENTS[behind.activation].is_of(slope):
            return None
        source = slope.inputs[0]
        if source is None or slope.inputs[1] is not result or flow.is_graph_output() or len(flow.uses()) != 1:
            return None
        flows[gradient] = source
        nodes.append(slope)
    return _Behind(behind.activation, behind.limit, tuple(nodes), result, flows)


def _write_out(graph: ir.Graph, node: ir.Node) -> None:
    """A sigmoid linear unit that no kernel took, or its gradient, as elementwise operators that read its operand alone.

    A chain computes the sigmoid again more quickly than it reads a kept one.
    """
    builder = Builder(graph, before=node)
    operands = [builder.tensor(value) for value in node.inputs if value is not None]
    if SILU.is_of(node):
        gate = builder.op("Sigmoid", operands[0])
        replace_node(node, (operands[0] * gate, gate))
        return
    flow, x = operands[:2]
    gate = builder.op("Sigmoid", x)
    replace_node(node, flow * (gate * (x * (1 - gate) + 1)))

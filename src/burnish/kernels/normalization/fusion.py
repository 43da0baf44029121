"""Fuse batch, group and instance normalization in training with the surrounding operators, and their gradients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, Tensor, attribute_value, constant_array, remove_node, replace_node, replace_uses
from burnish.graph.uses import only_user
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.normalization import (
    FUSED_BATCH_NORM,
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_MERGE,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_BATCH_NORM_MERGE,
    FUSED_BATCH_NORM_MOMENTS,
    FUSED_GROUP_NORM,
    FUSED_GROUP_NORM_GRAD,
)
from burnish.kernels.replacements import fuses
from burnish.operators.activation import CLIP_GRAD, RELU_GRAD, SILU, SILU_GRAD
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING
from burnish.operators.normalization.group import GROUP_NORM_GRAD, GROUP_NORM_TRAINING
from burnish.operators.normalization.synchronized import (
    BATCH_NORM_APPLY,
    BATCH_NORM_GRAD_APPLY,
    BATCH_NORM_GRAD_MERGE,
    BATCH_NORM_GRAD_SUMS,
    BATCH_NORM_MERGE,
    BATCH_NORM_MOMENTS,
)
from burnish.operators.semantic import semantic_operator

RELU, CLIPPED = 1, 2
"""The kernels' numbers of activations; 0 is none."""
ACTIVATION_GRADIENTS = {RELU: RELU_GRAD, CLIPPED: CLIP_GRAD}


@dataclass(frozen=True)
class Following:
    """The operators after a layer.

    Attributes:
        addition, added: the node that adds a value to the layer's result, and the value.
        node: activation node.
        activation, limit: the kernels' number and limit of the activation.
    """

    addition: ir.Node | None = None
    added: ir.Value | None = None
    node: ir.Node | None = None
    activation: int = 0
    limit: float = 0.0


@dataclass(frozen=True)
class Preceding:
    """The operators before the gradient of a layer with an activation.

    Attributes:
        node: gradient of the activation.
        flow: incoming gradient, without ``more``.
        more, addition: a second incoming gradient, and the node that adds it, if a block's input forks and nothing else reads the
            sum.
        is_read: True if other nodes than the layer's gradient read the result.
    """

    node: ir.Node
    flow: ir.Value
    more: ir.Value | None
    addition: ir.Node | None
    is_read: bool


def following(y: ir.Value) -> Following:
    """Find the only reader of a layer's result: an activation, with or without an addition in between."""
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
        flow: gradient that the layer's gradient reads.
        behind: operators after the layer.
        gradients: nodes of the layer's gradient.
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
    """Replace a layer and the operators after it by ``y``."""
    if behind.node is None:
        replace_uses(layer.outputs[0], y.value)
    else:
        replace_node(behind.node, y)
        if behind.addition is not None:
            remove_node(behind.addition)
    remove_node(layer)


def remove_preceding(graph: ir.Graph, before: Preceding, kept: ir.Value) -> None:
    """Remove the nodes before a layer's gradient, after it was removed; other readers read ``kept``."""
    if before.is_read:
        replace_uses(before.node.outputs[0], kept)
    remove_node(before.node)
    if before.addition is not None:
        remove_node(before.addition)


def _activation(value: ir.Value) -> tuple[ir.Node, int, float] | None:
    """Return node, kind and limit of the activation that is the only reader of a value."""
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


def fuse_batch_normalization(graph: ir.Graph) -> bool:
    """Fuse every layer of a supported form, in place; sort the graph afterwards."""
    layers = [node for node in graph if BATCH_NORM_TRAINING.is_of(node)]
    for node in layers:
        _fuse_batch_norm(graph, node)
    return any(node.graph is None for node in layers)


def _fuse_batch_norm(graph: ir.Graph, node: ir.Node) -> None:
    x, scale, bias = node.inputs[:3]
    assert x is not None
    if x.dtype != ir.DataType.FLOAT or x.shape is None or not 2 <= len(x.shape) <= 5:
        return  # keeps its casts: without them, lowering would compute its statistics in bfloat16
    y, mean, inverse_std, variance, centered, shift = node.outputs
    gradients = {user for value in (centered, shift) for user, _ in value.uses()}
    if any(not BATCH_NORM_GRAD.is_of(user) for user in gradients) or centered.is_graph_output() or shift.is_graph_output():
        return
    _take_in_casts(graph, node, gradients)
    x = node.inputs[0]
    assert x is not None
    behind = following(y)
    builder = Builder(graph, before=behind.node or node)
    epsilon = attribute_value(node, "epsilon", 1e-5)
    operands = [builder.tensor(value) for value in (x, scale, bias) if value is not None]
    added = None if behind.added is None else builder.tensor(behind.added)
    results = FUSED_BATCH_NORM.emit(
        *operands,
        added,
        epsilon=epsilon,
        activation=behind.activation,
        limit=behind.limit,
    )
    for result, source in zip(results[:4], (y, mean, inverse_std, variance), strict=True):
        result.value.type, result.value.shape = source.type, source.shape
    saved = results[4]
    assert scale is not None
    saved.value.type = scale.type
    layer = _FusedLayer(results[0].value, results[2].value, saved.value, bias, behind)
    for gradient in gradients:
        _fuse_gradient(graph, gradient, layer)
    for statistic, result in zip((mean, inverse_std, variance), results[1:4], strict=True):
        replace_uses(statistic, result.value)
    replace_layer(graph, node, behind, results[0])


def _take_in_casts(graph: ir.Graph, node: ir.Node, gradients: Collection[ir.Node]) -> None:
    """Make a layer and its gradients between casts read and write bfloat16: the kernels cast in registers."""
    readers = [(node, 0), *((gradient, index) for gradient in gradients for index in (0, 1))]
    written = [node.outputs[0], *(gradient.outputs[0] for gradient in gradients)]
    sources = [_widened(reader.inputs[index]) for reader, index in readers]
    if any(source is None for source in sources) or not all(_only_narrowed(value) for value in written):
        return
    for (reader, index), source in zip(readers, sources, strict=True):
        cast = reader.inputs[index].producer()  # type: ignore[union-attr]
        reader.replace_input_with(index, source)
        if cast is not None and not cast.outputs[0].uses() and not cast.outputs[0].is_graph_output():
            remove_node(cast)
    for value in written:
        value.type = ir.TensorType(ir.DataType.BFLOAT16)
        for cast in [user for user, _ in value.uses()]:
            cast.outputs[0].replace_all_uses_with(value)
            remove_node(cast)


def _widened(value: ir.Value | None) -> ir.Value | None:
    """Return the bfloat16 value that a float32 one was cast from."""
    cast = None if value is None else value.producer()
    if cast is None or cast.op_type != "Cast" or cast.domain != "" or value is None or value.dtype != ir.DataType.FLOAT:
        return None
    source = cast.inputs[0]
    return source if source is not None and source.dtype == ir.DataType.BFLOAT16 else None


def _only_narrowed(value: ir.Value) -> bool:
    if value.is_graph_output():
        return False
    casts = [user for user, _ in value.uses()]
    return all(
        cast.op_type == "Cast"
        and cast.domain == ""
        and cast.outputs[0].dtype == ir.DataType.BFLOAT16
        and not cast.outputs[0].is_graph_output()
        for cast in casts
    )


@dataclass(frozen=True)
class _FusedLayer:
    """The values of a fused batch normalization that its gradient reads.

    Attributes:
        y, inverse_std, saved: outputs of the fused node.
        behind: operators after the layer before fusion.
    """

    y: ir.Value
    inverse_std: ir.Value
    saved: ir.Value
    bias: ir.Value | None
    behind: Following


def _fuse_gradient(graph: ir.Graph, node: ir.Node, layer: _FusedLayer) -> None:
    flow, x, scale = node.inputs[:3]
    assert flow is not None
    behind, before = layer.behind, preceding(flow, layer.behind, (node,))
    builder = Builder(graph, before=node)
    operands = [flow, x, scale, layer.inverse_std, layer.saved]
    if before is not None:
        # If nothing was added to the layer, its result follows from x: that is cheaper than reading it.
        result = (None, before.more, layer.bias) if behind.added is None else (layer.y, before.more, None)
        operands = [before.flow, *operands[1:], *result]
    tensors = [None if value is None else builder.tensor(value) for value in operands]
    results = FUSED_BATCH_NORM_GRAD.emit(
        *tensors,
        activation=0 if before is None else behind.activation,
        limit=behind.limit,
        keep=int(before is not None and before.is_read),
    )
    for gradient, output in zip(results[:3], node.outputs, strict=True):
        gradient.value.type, gradient.value.shape = output.type, output.shape
        replace_uses(output, gradient.value)
    results[3].value.type, results[3].value.shape = flow.type, flow.shape
    remove_node(node)
    if before is not None:
        remove_preceding(graph, before, results[3].value)


RENAMED = {
    BATCH_NORM_MOMENTS: FUSED_BATCH_NORM_MOMENTS,
    BATCH_NORM_MERGE: FUSED_BATCH_NORM_MERGE,
    BATCH_NORM_GRAD_MERGE: FUSED_BATCH_NORM_GRAD_MERGE,
}
"""Kernels with the same operands and results."""

SYNCHRONIZED = (*RENAMED, BATCH_NORM_APPLY, BATCH_NORM_GRAD_SUMS, BATCH_NORM_GRAD_APPLY)
"""The semantic operators that become kernels here; the others must be lowered."""


def fuse_synchronized(graph: ir.Graph) -> bool:
    """Replace the parts of synchronized layers by kernels, in place, if they are float32.

    Sort the graph afterwards: a fused layer takes the place of its activation, and a gradient comes before its readers.
    """
    changed = False
    # With recomputation in the backward pass, the gradient belongs to the second run of a layer, which it meets first.
    for node in reversed(list(graph)):
        operator = semantic_operator(node)
        if operator is None or not node.inputs or not _is_single(node.inputs[-1]):
            continue
        if operator is BATCH_NORM_APPLY and _is_single(node.inputs[0]):
            _fuse_synchronized_layer(graph, node)
            changed = True
        elif operator in RENAMED:
            _rename(graph, node, RENAMED[operator])
            changed = True
    return changed


def _is_single(value: ir.Value | None) -> bool:
    """True if the kernels support a value: a vector per channel, or rows, signals, images or volumes, of float32."""
    return value is not None and value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) <= 5


def _rename(graph: ir.Graph, node: ir.Node, kernel: EngineOperator) -> None:
    builder = Builder(graph, before=node)
    operands = [None if value is None else builder.tensor(value) for value in node.inputs]
    attributes = {} if "epsilon" not in node.attributes else {"epsilon": attribute_value(node, "epsilon", 1e-5)}
    replace_node(node, kernel.emit(*operands, **attributes))


def _fuse_synchronized_layer(graph: ir.Graph, node: ir.Node) -> None:
    """Fuse BatchNormApply, and the gradient that reads its pivot."""
    x, pivot, center, gain, bias = node.inputs
    y = node.outputs[0]
    assert pivot is not None
    behind = following(y)
    builder = Builder(graph, before=behind.node or node)
    operands = [None if value is None else builder.tensor(value) for value in (x, pivot, center, gain, bias, behind.added)]
    result = FUSED_BATCH_NORM_APPLY(*operands, activation=behind.activation, limit=behind.limit)
    result.value.type, result.value.shape = y.type, y.shape
    for user in dict.fromkeys(user for user, _ in pivot.uses()):
        if BATCH_NORM_GRAD_SUMS.is_of(user):
            _fuse_synchronized_gradient(graph, user, node, behind, result.value)
    replace_layer(graph, node, behind, result)


def _fuse_synchronized_gradient(graph: ir.Graph, sums: ir.Node, layer: ir.Node, behind: Following, y: ir.Value) -> None:
    """Fuse BatchNormGradSums and its BatchNormGradApply, with the gradient of the activation before them."""
    flow, x, pivot, center = sums.inputs
    gain, bias = layer.inputs[3:5]
    assert flow is not None
    assert pivot is not None
    applications = [
        user
        for user in dict.fromkeys(user for user, _ in pivot.uses())
        if BATCH_NORM_GRAD_APPLY.is_of(user) and user.inputs[0] is flow
    ]
    before = preceding(flow, behind, (sums, *applications))
    activation, limit = (0, 0.0) if before is None else (behind.activation, behind.limit)
    # If nothing was added, the layer's result follows from x: that is cheaper than reading it. The gradient is applied with the
    # layer's gain, unless that was corrected (batch renormalization).
    again = behind.added is None and all(application.inputs[4] is gain for application in applications)
    result = (None, gain, bias) if again else (y, None, None)
    source, more = (flow, None) if before is None else (before.flow, before.more)
    keep = before is not None and before.is_read
    mask = (None, None, None) if before is None else result
    builder = Builder(graph, before=sums)
    operands = [None if value is None else builder.tensor(value) for value in (source, x, pivot, center, *mask, more)]
    found, kept = FUSED_BATCH_NORM_GRAD_SUMS.emit(
        *operands,
        activation=activation,
        limit=limit,
        keep=int(keep),
    )
    kept.value.type, kept.value.shape = flow.type, flow.shape
    if keep or more is not None:
        source, mask, activation, limit = kept.value, (None, None, None), 0, 0.0
    for application in applications:
        builder = Builder(graph, before=application)
        values = (source, *application.inputs[1:], mask[0], mask[2])
        dx = FUSED_BATCH_NORM_GRAD_APPLY(
            *(None if value is None else builder.tensor(value) for value in values),
            activation=activation,
            limit=limit,
        )
        replace_node(application, dx)
    replace_node(sums, found)
    if before is not None:
        remove_preceding(graph, before, kept.value)


BY_SILU = 3
"""The kernel's number of the activation, after those of batch normalization."""


@fuses(GROUP_NORM_TRAINING, GROUP_NORM_GRAD, SILU, SILU_GRAD)
def fuse_group_normalization(graph: ir.Graph) -> bool:
    """Fuse every layer of a supported form, in place; sort the graph afterwards.

    Remaining SiLU is written out for the chains of elementwise operators.
    """
    layers = [node for node in graph if GROUP_NORM_TRAINING.is_of(node)]
    for node in layers:
        _fuse_layer(graph, node)
    units = [node for node in graph if SILU.is_of(node) or SILU_GRAD.is_of(node)]
    for node in units:
        _write_out(graph, node)
    return bool(units) or any(node.graph is None for node in layers)


@dataclass(frozen=True)
class _Behind:
    """The activation after a layer.

    Attributes:
        activation, limit: the kernel's number and limit of the activation.
        nodes: the activation and its gradients, which the kernels include.
        result: its result; the layer's own if there is no activation.
        flows: incoming gradient of the activation, by node of the layer's gradient.
    """

    activation: int
    limit: float
    nodes: tuple[ir.Node, ...]
    result: ir.Value
    flows: dict[ir.Node, ir.Value]


def _fuse_layer(graph: ir.Graph, node: ir.Node) -> None:
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
    """Return the SiLU that is the only reader of a layer's result, if only the layer's gradients read the SiLU's gradient."""
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
    """Write out a SiLU without a kernel, or its gradient, as elementwise operators that read only its operand.

    A chain recomputes the sigmoid faster than it reads a stored one.
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

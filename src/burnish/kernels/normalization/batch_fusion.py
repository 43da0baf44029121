"""Batch normalization in training, with the addition and the activation behind it; its gradient, with the gradients of these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, remove_node, replace_uses
from burnish.kernels.normalization import FUSED_BATCH_NORM, FUSED_BATCH_NORM_GRAD
from burnish.kernels.normalization.surroundings import Following, following, preceding, remove_preceding, replace_layer
from burnish.operators.normalization.batch import BATCH_NORM_GRAD, BATCH_NORM_TRAINING


def fuse_batch_normalization(graph: ir.Graph) -> None:
    """Take every layer of a form that the kernels have, in place; the graph's order is to be restored after."""
    for node in list(graph):
        if BATCH_NORM_TRAINING.is_of(node):
            _fuse_batch_norm(graph, node)


def _fuse_batch_norm(graph: ir.Graph, node: ir.Node) -> None:
    """BatchNormTraining, and the BatchNormGrad that reads it, to FusedBatchNorm and FusedBatchNormGrad."""
    x, scale, bias = node.inputs[:3]
    assert x is not None
    if x.dtype != ir.DataType.FLOAT or x.shape is None or not 2 <= len(x.shape) <= 5:
        return  # with the casts around it: what it is lowered to would compute its statistics in bfloat16 without them
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
    """Let a layer and its gradients that stand between casts read and write bfloat16 instead: the kernels cast in registers."""
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
    """The bfloat16 value that a float32 one was cast from."""
    cast = None if value is None else value.producer()
    if cast is None or cast.op_type != "Cast" or cast.domain != "" or value is None or value.dtype != ir.DataType.FLOAT:
        return None
    source = cast.inputs[0]
    return source if source is not None and source.dtype == ir.DataType.BFLOAT16 else None


def _only_narrowed(value: ir.Value) -> bool:
    """Whether casts to bfloat16 inside the graph are all that read a value."""
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
    """A batch normalization that was fused: what its gradient reads.

    Attributes:
        y, inverse_std, saved: outputs of the fused node.
        bias: of the layer.
        behind: what comes behind it in the graph before fusion.
    """

    y: ir.Value
    inverse_std: ir.Value
    saved: ir.Value
    bias: ir.Value | None
    behind: Following


def _fuse_gradient(graph: ir.Graph, node: ir.Node, layer: _FusedLayer) -> None:
    """BatchNormGrad, with the gradient of the activation before it where that is of the fused layer's own."""
    flow, x, scale = node.inputs[:3]
    assert flow is not None
    behind, before = layer.behind, preceding(flow, layer.behind, (node,))
    builder = Builder(graph, before=node)
    operands = [flow, x, scale, layer.inverse_std, layer.saved]
    if before is not None:
        # Where nothing was added to the layer, its result follows from x: that costs less than reading it.
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

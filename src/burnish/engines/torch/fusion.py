"""Fusion of a program's graph into the kernels that this engine has beyond ATen's.

Batch normalization in training takes in the addition and the activation behind it, and its gradient the gradients of these; max
pooling keeps the places of its maxima as PyTorch counts them. Depthwise convolution, normalization of rows, linear layers and
elementwise arithmetic have modules of their own. What is not of a form that a kernel has is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from burnish.engines.torch.batch_norm_surroundings import Following, following, preceding, remove_preceding, replace_layer
from burnish.engines.torch.cast_placement import read_shapes_before_casts, transpose_narrow
from burnish.engines.torch.cross_entropy_fusion import fuse_cross_entropy
from burnish.engines.torch.depthwise_fusion import fuse_depthwise
from burnish.engines.torch.elementwise_fusion import fuse_elementwise
from burnish.engines.torch.linear_fusion import fuse_linear
from burnish.engines.torch.normalization_fusion import STANDARDIZED, fuse_normalization
from burnish.engines.torch.softmax_fusion import fuse_softmax
from burnish.engines.torch.synchronized_fusion import SYNCHRONIZED, fuse_synchronized
from burnish.engines.torch.winograd_fusion import use_winograd
from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node
from burnish.lowering import lower_semantic_operators

FUSED = frozenset({"BatchNormTraining", "BatchNormGrad"}) | SYNCHRONIZED | STANDARDIZED
"""The semantic operators that only fusion takes: ATen has no kernels of them that keep as many digits."""


def fuse(model: ir.Model, kernels: bool, winograd: bool = False) -> ir.Model:
    """Rewrite a graph, in place.

    Args:
        model: a graph of the program, with the semantic operators that the engine translates.
        kernels: whether the engine's own kernels are there; ATen's are.
        winograd: whether convolutions may be computed by Winograd's minimal filtering, by these kernels.

    Returns:
        The same model. Batch normalization that no kernel takes is lowered.
    """
    graph = model.graph
    read_shapes_before_casts(graph)
    for node in list(graph):
        if node.op_type == "MaxPool" and node.domain == "":
            _fuse_pool(graph, node)
        elif kernels and node.domain == BURNISH_DOMAIN and node.op_type == "BatchNormTraining":
            _fuse_batch_norm(graph, node)
    if kernels:
        fuse_synchronized(graph)
        fuse_normalization(graph)
        if winograd:
            use_winograd(graph)
    # A fused layer stands where its activation was: what reads its statistics may have come before.
    graph.sort()
    left = {node.op_type for node in graph if node.domain == BURNISH_DOMAIN} - FUSED
    lower_semantic_operators(model, keep=left)
    fuse_softmax(graph)
    if kernels:
        fuse_cross_entropy(graph)
        transpose_narrow(graph)
        fuse_linear(graph)
        fuse_depthwise(graph)
        fuse_elementwise(graph)
    return model


def _fuse_batch_norm(graph: ir.Graph, node: ir.Node) -> None:
    """BatchNormTraining, and the BatchNormGrad that reads it, to FusedBatchNorm and FusedBatchNormGrad."""
    x, scale, bias = node.inputs[:3]
    assert x is not None
    if x.dtype != ir.DataType.FLOAT or x.shape is None or len(x.shape) not in (2, 4):
        return  # with the casts around it: what it is lowered to would compute its statistics in bfloat16 without them
    y, mean, inverse_std, variance, centered, shift = node.outputs
    gradients = {user for value in (centered, shift) for user, _ in value.uses()}
    if any(user.op_type != "BatchNormGrad" for user in gradients) or centered.is_graph_output() or shift.is_graph_output():
        return
    _take_in_casts(graph, node, gradients)
    x = node.inputs[0]
    assert x is not None
    behind = following(y)
    builder = Builder(graph, before=behind.node or node)
    epsilon = attribute_value(node, "epsilon", 1e-5)
    operands = [builder.tensor(value) for value in (x, scale, bias) if value is not None]
    added = None if behind.added is None else builder.tensor(behind.added)
    results = builder.op(
        "FusedBatchNorm",
        *operands,
        added,
        domain=BURNISH_DOMAIN,
        outputs=5,
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
        statistic.replace_all_uses_with(result.value, replace_graph_outputs=True)
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
            graph.remove(cast, safe=True)
    for value in written:
        value.type = ir.TensorType(ir.DataType.BFLOAT16)
        for cast in [user for user, _ in value.uses()]:
            cast.outputs[0].replace_all_uses_with(value)
            graph.remove(cast, safe=True)


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
    results = builder.op(
        "FusedBatchNormGrad",
        *tensors,
        domain=BURNISH_DOMAIN,
        outputs=4,
        activation=0 if before is None else behind.activation,
        limit=behind.limit,
        keep=int(before is not None and before.is_read),
    )
    for gradient, output in zip(results[:3], node.outputs, strict=True):
        gradient.value.type, gradient.value.shape = output.type, output.shape
        output.replace_all_uses_with(gradient.value, replace_graph_outputs=True)
    results[3].value.type, results[3].value.shape = flow.type, flow.shape
    graph.remove(node, safe=True)
    if before is not None:
        remove_preceding(graph, before, results[3].value)


def _fuse_pool(graph: ir.Graph, node: ir.Node) -> None:
    """MaxPool whose indices only its own gradient reads: they need not be counted over the whole tensor."""
    if len(node.outputs) < 2 or len(node.attributes["kernel_shape"].as_ints()) != 2:
        return
    indices = node.outputs[1]
    users = {user for user, _ in indices.uses()}
    if not users or indices.is_graph_output() or any(user.op_type != "MaxPoolGrad" for user in users):
        return
    pads = list(attribute_value(node, "pads", [0] * 4))
    kernel = list(node.attributes["kernel_shape"].as_ints())
    automatic = attribute_value(node, "auto_pad", "NOTSET")
    if automatic != "NOTSET" or pads[:2] != pads[2:] or any(2 * pad > size for pad, size in zip(pads, kernel, strict=False)):
        return
    attributes = {
        "kernel_shape": kernel,
        "strides": list(attribute_value(node, "strides", [1, 1])),
        "dilations": list(attribute_value(node, "dilations", [1, 1])),
        "pads": pads[:2],
        "ceil_mode": attribute_value(node, "ceil_mode", 0),
    }
    for user in users:
        builder = Builder(graph, before=user)
        operands = [builder.tensor(value) for value in user.inputs if value is not None]
        like = operands[2]
        replace_node(user, builder.op("FusedMaxPoolGrad", *operands, domain=BURNISH_DOMAIN, like=like, **attributes))
    builder = Builder(graph, before=node)
    source = node.inputs[0]
    assert source is not None
    pooled, places = builder.op("FusedMaxPool", builder.tensor(source), domain=BURNISH_DOMAIN, outputs=2, **attributes)
    pooled.value.type, pooled.value.shape = node.outputs[0].type, node.outputs[0].shape
    places.value.type, places.value.shape = indices.type, indices.shape
    replace_node(node, (pooled, places))

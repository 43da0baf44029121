"""Fusion of a program's graph into the kernels that this engine has beyond ATen's.

Batch normalization in training takes in the addition and the activation behind it, and its gradient the gradients of these; max
pooling keeps the places of its maxima as PyTorch counts them. Depthwise convolution, normalization of rows, linear layers and
elementwise arithmetic have modules of their own. What is not of a form that a kernel has is left as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from burnish.engines.torch.cast_placement import read_shapes_before_casts, transpose_narrow
from burnish.engines.torch.cross_entropy_fusion import fuse_cross_entropy
from burnish.engines.torch.depthwise_fusion import fuse_depthwise
from burnish.engines.torch.elementwise_fusion import fuse_elementwise
from burnish.engines.torch.linear_fusion import fuse_linear
from burnish.engines.torch.normalization_fusion import STANDARDIZED, fuse_normalization
from burnish.engines.torch.softmax_fusion import fuse_softmax
from burnish.engines.torch.winograd_fusion import use_winograd
from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, constant_array, replace_node
from burnish.lowering import lower_semantic_operators

FUSED = frozenset({"BatchNormTraining", "BatchNormGrad"}) | STANDARDIZED
"""The semantic operators that only fusion takes: ATen has no kernels of them that keep as many digits."""
RELU, CLIPPED = 1, 2


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
    last, added = y, None
    addition = _only_user(y, "Add")
    if addition is not None:
        other = addition.inputs[1] if addition.inputs[0] is y else addition.inputs[0]
        if other is not None and other is not y and _same_extents(other, y):
            last, added = addition.outputs[0], other
    activation, limit, following = 0, 0.0, None
    found = _activation(last)
    if found is not None:
        following, activation, limit = found
    elif added is not None:
        last, added = y, None
    position = following or node
    builder = Builder(graph, before=position)
    epsilon = attribute_value(node, "epsilon", 1e-5)
    operands = [builder.tensor(value) for value in (x, scale, bias) if value is not None]
    more = None if added is None else builder.tensor(added)
    results = builder.op(
        "FusedBatchNorm", *operands, more, domain=BURNISH_DOMAIN, outputs=5, epsilon=epsilon, activation=activation, limit=limit
    )
    for result, source in zip(results[:4], (y, mean, inverse_std, variance), strict=True):
        result.value.type, result.value.shape = source.type, source.shape
    saved = results[4]
    assert scale is not None
    saved.value.type = scale.type
    layer = _FusedLayer(
        results[0].value,
        results[2].value,
        saved.value,
        bias,
        added is not None,
        activation,
        limit,
        None if following is None else following.outputs[0],
    )
    for gradient in gradients:
        _fuse_gradient(graph, gradient, layer)
    for statistic, result in zip((mean, inverse_std, variance), results[1:4], strict=True):
        statistic.replace_all_uses_with(result.value, replace_graph_outputs=True)
    if following is not None:
        replace_node(following, results[0])
        if added is not None:
            graph.remove(addition, safe=True)  # type: ignore[arg-type]
        graph.remove(node, safe=True)
    else:
        y.replace_all_uses_with(results[0].value, replace_graph_outputs=True)
        graph.remove(node, safe=True)


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
        adds: whether something is added to it before the activation.
        activation, limit: as the kernels count them.
        activated: the output of the activation in the graph before fusion.
    """

    y: ir.Value
    inverse_std: ir.Value
    saved: ir.Value
    bias: ir.Value | None
    adds: bool
    activation: int
    limit: float
    activated: ir.Value | None


def _fuse_gradient(graph: ir.Graph, node: ir.Node, layer: _FusedLayer) -> None:
    """BatchNormGrad, with the gradient of the activation before it where that is of the fused layer's own."""
    flow, x, scale = node.inputs[:3]
    assert flow is not None
    producer = flow.producer()
    names = {RELU: "ReluGrad", CLIPPED: "ClipGrad"}
    masked = producer if layer.activation and producer is not None and producer.op_type == names[layer.activation] else None
    builder = Builder(graph, before=node)
    if masked is not None and masked.inputs[1] is layer.activated:
        read_by_others = len(flow.uses()) > 1 or flow.is_graph_output()
        source, more = masked.inputs[0], None
        # Where a block's input forks, the gradients of its branches are added up right here.
        addition = None if source is None else source.producer()
        if (
            source is not None
            and addition is not None
            and addition.op_type == "Add"
            and addition.domain == ""
            and len(source.uses()) == 1
        ):
            one, other = addition.inputs
            if one is not None and other is not None and _same_extents(one, source) and _same_extents(other, source):
                source, more = one, other
        # Where nothing was added to the layer, its result follows from x: that costs less than reading it.
        result = (layer.y, more, None) if layer.adds else (None, more, layer.bias)
        operands = [source, x, scale, layer.inverse_std, layer.saved, *result]
        kind, bound = layer.activation, layer.limit
    else:
        masked, read_by_others, more = None, False, None
        operands = [flow, x, scale, layer.inverse_std, layer.saved]
        kind, bound = 0, 0.0
    tensors = [None if value is None else builder.tensor(value) for value in operands]
    results = builder.op(
        "FusedBatchNormGrad", *tensors, domain=BURNISH_DOMAIN, outputs=4, activation=kind, limit=bound, keep=int(read_by_others)
    )
    for gradient, output in zip(results[:3], node.outputs, strict=True):
        gradient.value.type, gradient.value.shape = output.type, output.shape
        output.replace_all_uses_with(gradient.value, replace_graph_outputs=True)
    results[3].value.type, results[3].value.shape = flow.type, flow.shape
    graph.remove(node, safe=True)
    if masked is not None:
        if read_by_others:
            flow.replace_all_uses_with(results[3].value, replace_graph_outputs=True)
        graph.remove(masked, safe=True)
        if more is not None:
            graph.remove(addition, safe=True)  # type: ignore[arg-type]


def _activation(value: ir.Value) -> tuple[ir.Node, int, float] | None:
    """The activation that alone reads a value: its node, kind and limit."""
    node = _only_user(value, "Relu")
    if node is not None:
        return node, RELU, 0.0
    node = _only_user(value, "Clip")
    if node is None or len(node.inputs) < 3:
        return None
    low, high = (constant_array(bound) for bound in node.inputs[1:3])
    if low is None or high is None or float(low) != 0.0 or float(high) <= 0.0:
        return None
    return node, CLIPPED, float(high)


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = list(value.uses())
    if value.is_graph_output() or len(users) != 1:
        return None
    node = users[0][0]
    return node if node.op_type == op_type and node.domain == "" else None


def _same_extents(one: ir.Value, other: ir.Value) -> bool:
    return one.shape is not None and other.shape is not None and one.shape == other.shape


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

"""Max pooling with indices that only its own gradient reads, for signals, images and volumes.

The indices are then the positions of the maxima, as PyTorch counts them.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, replace_node
from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.pooling import MAX_POOL_GRAD

FUSED_MAX_POOL = EngineOperator("FusedMaxPool", ("x",), ("y", "places"))
FUSED_MAX_POOL_GRAD = EngineOperator("FusedMaxPoolGrad", ("dy", "places", "x"), ("dx",))


def fuse_max_pooling(graph: ir.Graph) -> bool:
    """Replace poolings and their gradients by FusedMaxPool and FusedMaxPoolGrad, in place."""
    pools = [node for node in graph if node.op_type == "MaxPool" and node.domain == ""]
    for node in pools:
        _fuse_pool(graph, node)
    return any(node.graph is None for node in pools)


def _fuse_pool(graph: ir.Graph, node: ir.Node) -> None:
    kernel = list(node.attributes["kernel_shape"].as_ints())
    rank = len(kernel)
    if len(node.outputs) < 2 or rank > 3:
        return
    indices = node.outputs[1]
    users = {user for user, _ in indices.uses()}
    if not users or indices.is_graph_output() or any(not MAX_POOL_GRAD.is_of(user) for user in users):
        return
    pads = list(attribute_value(node, "pads", [0] * (2 * rank)))
    automatic = attribute_value(node, "auto_pad", "NOTSET")
    if automatic != "NOTSET" or pads[:rank] != pads[rank:]:
        return
    if any(2 * pad > size for pad, size in zip(pads[:rank], kernel, strict=True)):
        return
    attributes = {
        "kernel_shape": kernel,
        "strides": list(attribute_value(node, "strides", [1] * rank)),
        "dilations": list(attribute_value(node, "dilations", [1] * rank)),
        "pads": pads[:rank],
        "ceil_mode": attribute_value(node, "ceil_mode", 0),
    }
    for user in users:
        builder = Builder(graph, before=user)
        operands = [builder.tensor(value) for value in user.inputs if value is not None]
        like = operands[2]
        replace_node(user, FUSED_MAX_POOL_GRAD(*operands, like=like, **attributes))
    builder = Builder(graph, before=node)
    source = node.inputs[0]
    assert source is not None
    pooled, places = FUSED_MAX_POOL.emit(builder.tensor(source), **attributes)
    pooled.value.type, pooled.value.shape = node.outputs[0].type, node.outputs[0].shape
    places.value.type, places.value.shape = indices.type, indices.shape
    replace_node(node, (pooled, places))

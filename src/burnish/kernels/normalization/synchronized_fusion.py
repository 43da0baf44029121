"""Fusion of batch normalization by statistics of several workers into kernels.

The layer is in parts already, cut by an exchange forward and one backward (``burnish.operators.normalization.synchronized``). Its
application takes in the addition and the activation behind it; its gradient, in two parts that read the same, the gradients of
these. A part that no kernel takes is left as it is.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, replace_node
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.normalization import (
    FUSED_BATCH_NORM_APPLY,
    FUSED_BATCH_NORM_GRAD_APPLY,
    FUSED_BATCH_NORM_GRAD_MERGE,
    FUSED_BATCH_NORM_GRAD_SUMS,
    FUSED_BATCH_NORM_MERGE,
    FUSED_BATCH_NORM_MOMENTS,
)
from burnish.kernels.normalization.surroundings import Following, following, preceding, remove_preceding, replace_layer
from burnish.operators.normalization.synchronized import (
    BATCH_NORM_APPLY,
    BATCH_NORM_GRAD_APPLY,
    BATCH_NORM_GRAD_MERGE,
    BATCH_NORM_GRAD_SUMS,
    BATCH_NORM_MERGE,
    BATCH_NORM_MOMENTS,
)
from burnish.operators.semantic import semantic_operator

RENAMED = {
    BATCH_NORM_MOMENTS: FUSED_BATCH_NORM_MOMENTS,
    BATCH_NORM_MERGE: FUSED_BATCH_NORM_MERGE,
    BATCH_NORM_GRAD_MERGE: FUSED_BATCH_NORM_GRAD_MERGE,
}
"""Each is a kernel of the same operands and results."""

SYNCHRONIZED = (*RENAMED, BATCH_NORM_APPLY, BATCH_NORM_GRAD_SUMS, BATCH_NORM_GRAD_APPLY)
"""The semantic operators that become kernels here; a part that none takes is to be lowered."""


def fuse_synchronized(graph: ir.Graph) -> None:
    """Replace the parts of synchronized layers by kernels, in place, where they are of float32.

    The caller sorts the graph: what is fused stands where its activation was, and a gradient before what reads it.
    """
    # Where a layer is computed again in the backward, its gradient is of the second run, which comes to it first.
    for node in reversed(list(graph)):
        operator = semantic_operator(node)
        if operator is None or not node.inputs or not _is_single(node.inputs[-1]):
            continue
        if operator is BATCH_NORM_APPLY and _is_single(node.inputs[0]):
            _fuse_layer(graph, node)
        elif operator in RENAMED:
            _rename(graph, node, RENAMED[operator])


def _is_single(value: ir.Value | None) -> bool:
    """Whether the kernels take a value: a vector per channel, or rows, signals, images or volumes, of float32."""
    return value is not None and value.dtype == ir.DataType.FLOAT and value.shape is not None and len(value.shape) <= 5


def _rename(graph: ir.Graph, node: ir.Node, kernel: EngineOperator) -> None:
    """To the kernel of the same operands and results."""
    builder = Builder(graph, before=node)
    operands = [None if value is None else builder.tensor(value) for value in node.inputs]
    attributes = {} if "epsilon" not in node.attributes else {"epsilon": attribute_value(node, "epsilon", 1e-5)}
    replace_node(node, kernel.emit(*operands, **attributes))


def _fuse_layer(graph: ir.Graph, node: ir.Node) -> None:
    """BatchNormApply, and the gradient in which its pivot is read."""
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
            _fuse_gradient(graph, user, node, behind, result.value)
    replace_layer(graph, node, behind, result)


def _fuse_gradient(graph: ir.Graph, sums: ir.Node, layer: ir.Node, behind: Following, y: ir.Value) -> None:
    """BatchNormGradSums, and the BatchNormGradApply that reads the same, with the gradient of the activation before them."""
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
    # The layer's result follows from x where nothing was added to it: that costs less than reading it. The gradient is applied
    # with the gain that the layer was, except where that was corrected (batch renormalization).
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

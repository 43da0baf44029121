"""Softmax cross-entropy over class indices: its operators, and the graph pass that inserts them.

``saved`` [N, 2] holds two numbers per row for the gradient: the largest logit, and the logarithm of the sum of the exponentials
of the logits minus that (``cross_entropy.h``).
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, replace_node
from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.loss import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_GRAD

FUSED_CROSS_ENTROPY = EngineOperator("FusedCrossEntropy", ("logits", "labels"), ("total", "counted", "saved"))
FUSED_CROSS_ENTROPY_GRAD = EngineOperator("FusedCrossEntropyGrad", ("logits", "labels", "saved", "flow"), ("dlogits",))

LOG_P = 3
"""The gradient's operand from the forward pass; the kernels keep two numbers per row instead."""


def use_cross_entropy_kernels(graph: ir.Graph) -> bool:
    """Replace the loss and its gradient by ``burnish.FusedCrossEntropy`` and ``burnish.FusedCrossEntropyGrad``.

    This applies to float32 logits ``[N, C]``; class weights and smoothing have no kernel.
    """
    changed = False
    for node in list(graph):
        if not SOFTMAX_CROSS_ENTROPY.is_of(node) or not _has_kernel(node):
            continue
        logits, labels = node.inputs[:2]
        assert logits is not None
        assert logits.shape is not None
        assert labels is not None
        gradients = [user for user, _ in node.outputs[2].uses()]
        ignored = attribute_value(node, "ignore_index", None)
        builder = Builder(graph, before=node)
        operands = [builder.tensor(logits), builder.tensor(labels)]
        results = FUSED_CROSS_ENTROPY.emit(*operands, ignored=ignored)
        for result, replaced in zip(results, node.outputs, strict=True):
            result.value.type, result.value.shape = replaced.type, replaced.shape
        results[2].value.shape = ir.Shape([logits.shape[0], 2])
        for gradient in gradients:
            builder = Builder(graph, before=gradient)
            flow = gradient.inputs[0]
            assert flow is not None
            read = [*operands, results[2], builder.tensor(flow)]
            replace_node(gradient, FUSED_CROSS_ENTROPY_GRAD(*read, builder=builder, like=operands[0], ignored=ignored))
        replace_node(node, results)
        changed = True
    return changed


def _has_kernel(node: ir.Node) -> bool:
    logits, log_p = node.inputs[0], node.outputs[2]
    is_plain = len([operand for operand in node.inputs if operand is not None]) == 2 and "smoothing" not in node.attributes
    is_matrix = logits is not None and logits.dtype == ir.DataType.FLOAT and logits.shape is not None and len(logits.shape) == 2
    read_by_gradients = all(SOFTMAX_CROSS_ENTROPY_GRAD.is_of(user) and place == LOG_P for user, place in log_p.uses())
    return is_plain and is_matrix and read_by_gradients and "ignore_index" in node.attributes and not log_p.is_graph_output()

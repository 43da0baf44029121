"""Softmax cross-entropy over class indices, as losses emit it, and its gradient. The class axis is 1, whatever the rank.

With p = softmax(logits), y the label, w the class weights (1 where none are given) and s the smoothing, the term of a position is
``(1 - s) * w[y] * -log p[y] + s / C * sum_c w[c] * -log p[c]``; one whose label is ``ignore_index`` has no term.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.operators.activation import LOG_SOFTMAX_GRAD
from burnish.operators.labels import CLASS_AXIS, Labelled, class_count
from burnish.operators.positions import scatter_add
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like


def _totals(operands: Operands) -> list[OutputType]:
    logits = OutputType.of(operands["logits"])
    scalar = OutputType(logits.dtype, ir.Shape([]))
    return [scalar, scalar, logits]


SOFTMAX_CROSS_ENTROPY = SemanticOperator(
    "SoftmaxCrossEntropy", ("logits", "labels", "weights"), ("total", "counted", "log_p"), _totals, constants=("counted",)
)
"""The sum of the terms of logits [N, C, d1, ...] at labels [N, d1, ...], int64, and that of the weights, to divide it by.

``weights`` [C] may be left out. Attributes: ``ignore_index``; ``smoothing``, a float64 scalar, none where it is left out.
"""

SOFTMAX_CROSS_ENTROPY_GRAD = SemanticOperator(
    "SoftmaxCrossEntropyGrad", ("d_total", "logits", "labels", "log_p", "weights"), ("d_logits",), like("logits")
)


@SOFTMAX_CROSS_ENTROPY.gradient
def softmax_cross_entropy(op: Operation, d_total: Tensor | None, _: Tensor | None, d_log_p: Tensor | None) -> tuple[Tensor]:
    logits, labels, weights, log_p = op.required(0), op.required(1), op.optional(2), op.outputs[2]
    settings = {name: op.attribute(name) for name in ("ignore_index", "smoothing")}
    parts = []
    if d_total is not None:
        parts.append(SOFTMAX_CROSS_ENTROPY_GRAD(d_total, logits, labels, log_p, weights, **settings))
    if d_log_p is not None:
        parts.append(LOG_SOFTMAX_GRAD(d_log_p, log_p, axis=CLASS_AXIS))
    return (parts[0] if len(parts) == 1 else parts[0] + parts[1],)


@SOFTMAX_CROSS_ENTROPY.lowering
def lower_softmax_cross_entropy(op: Operation) -> tuple[Tensor, Tensor, Tensor]:
    builder, logits, weights = op.builder, op.required(0), op.optional(2)
    log_p = builder.op("LogSoftmax", logits, axis=CLASS_AXIS)
    labelled = Labelled(log_p, op.required(1), op.attribute("ignore_index"), weights)
    term = labelled.pick(log_p)
    if labelled.weight is not None:
        term = labelled.weight * term
    smoothing = _smoothing(op)
    if smoothing:
        weighted = log_p if weights is None else log_p * _column(weights, log_p)
        term = term * (1.0 - smoothing) + builder.op("ReduceMean", weighted, _class_axis(op), keepdims=0) * smoothing
    total = builder.op("ReduceSum", labelled.counted(-term), keepdims=0)
    return total, labelled.total_weight(), log_p


@SOFTMAX_CROSS_ENTROPY_GRAD.lowering
def lower_softmax_cross_entropy_grad(op: Operation) -> Tensor:
    """With d = [y counts] d_total: p d w[y] - [c = y] d w[y] where nothing is smoothed."""
    builder, labels, log_p, weights = op.builder, op.required(2), op.required(3), op.optional(4)
    labelled = Labelled(log_p, labels, op.attribute("ignore_index"), weights)
    index = labelled.on_class_axis(labelled.index)
    flow = builder.op("Expand", op.required(0), builder.op("Shape", labels), shape=labels.shape)
    flow = labelled.counted(flow)
    smoothing = _smoothing(op)
    at_label = flow * (1.0 - smoothing) if smoothing else flow
    at_label = labelled.on_class_axis(at_label if labelled.weight is None else at_label * labelled.weight)
    if not smoothing:
        return scatter_add(builder.op("Exp", log_p) * at_label, index, -at_label, CLASS_AXIS, like=log_p)
    # What is spread over all classes does not cancel in the sum along them.
    spread = labelled.on_class_axis(flow * smoothing * _reciprocal_count(log_p))
    if weights is None:
        spread = builder.op("Expand", spread, builder.op("Shape", log_p), like=log_p)
    else:
        spread = builder.op("Mul", spread, _column(weights, log_p), like=log_p)
    d_log_p = scatter_add(-spread, index, -at_label, CLASS_AXIS, like=log_p)
    return LOG_SOFTMAX_GRAD(d_log_p, log_p, axis=CLASS_AXIS)


def _smoothing(op: Operation) -> float:
    smoothing = op.attribute("smoothing")
    return 0.0 if smoothing is None else float(smoothing.numpy())


def _reciprocal_count(scores: Tensor) -> Tensor:
    """1 / C; the reciprocal and not the count, which float16 may not hold."""
    classes = scores.dimension(CLASS_AXIS)
    if classes:
        return scores.builder.scalar(1 / classes, scores)
    wide = scores.builder.cast(class_count(scores), max(scores.dtype, ir.DataType.FLOAT, key=lambda dtype: dtype.itemsize))
    return scores.builder.cast(scores.builder.op("Reciprocal", wide), scores.dtype)


def _class_axis(op: Operation) -> Tensor:
    return op.builder.integers([CLASS_AXIS])


def _column(weights: Tensor, scores: Tensor) -> Tensor:
    """The weights as a tensor that broadcasts along the class axis."""
    assert scores.rank is not None
    return weights.builder.op("Reshape", weights, weights.builder.integers([-1, *([1] * (scores.rank - 2))]))

"""Losses over class indices: those of the standard, and burnish's softmax cross-entropy.

The class axis is 1, for any rank.

With p = softmax(logits), y the label, w the class weights (1 by default) and s the smoothing, the term of a position is
``(1 - s) * w[y] * -log p[y] + s / C * sum_c w[c] * -log p[c]``; a position with the label ``ignore_index`` has no term.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators import reopen_rules
from burnish.operators.activation import LOG_SOFTMAX_GRAD
from burnish.operators.positions import scatter_add
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like


def softmax_cross_entropy_loss(
    op: Operation, d_loss: Tensor | None, d_log_p: Tensor | None = None
) -> tuple[Tensor | None, None, Tensor | None]:
    scores = op.input
    log_p = op.second_output(scores.dtype, scores)
    if d_loss is None:
        assert d_log_p is not None
        return _through_softmax(log_p, d_log_p), None, None
    picked = _PickedTerms(op, d_loss)
    d_weight = picked.weight_gradient(log_p) if op.wants(2) else None
    if not op.wants(0):
        return None, None, d_weight
    # With d the cotangent of log p, d scores = d - p * sum(d); the loss adds -at_label to d at the label.
    at_label = picked.cotangent
    spread = op.builder.op("Exp", log_p) * at_label if d_log_p is None else _through_softmax(log_p, d_log_p, at_label)
    return picked.add_at_label(spread, -at_label, like=scores), None, d_weight


def negative_log_likelihood_loss(op: Operation, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    log_p = op.input
    picked = _PickedTerms(op, dy)
    d_input = None
    if op.wants(0):
        d_input = picked.add_at_label(_zeros(op.builder, log_p), -picked.cotangent, like=log_p)
    return d_input, None, picked.weight_gradient(log_p) if op.wants(2) else None


def _through_softmax(log_p: Tensor, d_log_p: Tensor, at_label: Tensor | None = None) -> Tensor:
    """Emit ``d - p * (sum_c d - at_label)``."""
    builder = log_p.builder
    total = builder.op("ReduceSum", d_log_p, builder.integers([CLASS_AXIS]), keepdims=1)
    if at_label is not None:
        total = total - at_label
    return builder.op("Sub", d_log_p, builder.op("Exp", log_p) * total, like=log_p)


class _PickedTerms:
    """The terms -weight[y] * log p[y] of a loss at the labels y, and their cotangents.

    With the reduction ``mean`` the terms are divided by the sum of the weights used.
    """

    def __init__(self, op: Operation, dy: Tensor):
        self._op = op
        self._labelled = Labelled(op.input, op.required(1), op.attribute("ignore_index"), op.optional(2))
        self._mean = op.attribute("reduction", "mean") == "mean"
        self._scaled = dy / self._labelled.total_weight() if self._mean else dy

    @property
    def cotangent(self) -> Tensor:
        """The cotangent of each position's -log p[y], 0 for ignored labels; with a class axis of extent 1."""
        builder, labels, weight = self._op.builder, self._op.required(1), self._labelled.weight
        if weight is None:
            cotangent = builder.op("Expand", self._scaled, builder.op("Shape", labels), shape=labels.shape)
        else:
            cotangent = builder.op("Mul", weight, self._scaled, shape=labels.shape)
        return self._labelled.on_class_axis(self._labelled.counted(cotangent))

    def add_at_label(self, tensor: Tensor, addend: Tensor, like: Tensor) -> Tensor:
        return scatter_add(tensor, self._labelled.on_class_axis(self._labelled.index), addend, CLASS_AXIS, like)

    def weight_gradient(self, log_p: Tensor) -> Tensor:
        """Emit the gradient of the class weights: of -w[y] * log p[y], and of the division by their sum."""
        builder, weights = self._op.builder, self._op.required(2)
        share = -self._labelled.pick(log_p)
        if self._mean:
            share = share - self._op.output
        share = self._labelled.counted(share * self._scaled)
        flat = builder.integers([-1])
        index, addend = builder.op("Reshape", self._labelled.index, flat), builder.op("Reshape", share, flat)
        return scatter_add(_zeros(builder, weights), index, addend, 0, like=weights)


def _zeros(builder: Builder, tensor: Tensor) -> Tensor:
    value = ir.tensor(np.zeros(1, dtype=tensor.dtype.numpy()))
    return builder.op("ConstantOfShape", builder.op("Shape", tensor), value=value, like=tensor)


def _totals(operands: Operands) -> list[OutputType]:
    logits = OutputType.of(operands["logits"])
    scalar = OutputType(logits.dtype, ir.Shape([]))
    return [scalar, scalar, logits]


def softmax_cross_entropy(op: Operation, d_total: Tensor | None, _: Tensor | None, d_log_p: Tensor | None) -> tuple[Tensor]:
    logits, labels, weights, log_p = op.required(0), op.required(1), op.optional(2), op.outputs[2]
    settings = {name: op.attribute(name) for name in ("ignore_index", "smoothing")}
    parts = []
    if d_total is not None:
        parts.append(SOFTMAX_CROSS_ENTROPY_GRAD(d_total, logits, labels, log_p, weights, **settings))
    if d_log_p is not None:
        parts.append(LOG_SOFTMAX_GRAD(d_log_p, log_p, axis=CLASS_AXIS))
    return (parts[0] if len(parts) == 1 else parts[0] + parts[1],)


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


def lower_softmax_cross_entropy_grad(op: Operation) -> Tensor:
    """With d = d_total for counted labels, otherwise 0: p d w[y] - [c = y] d w[y] without smoothing."""
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
    # The part spread over all classes does not cancel in the sum along them.
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
    """1 / C instead of the count C, which may overflow float16."""
    classes = scores.dimension(CLASS_AXIS)
    if classes:
        return scores.builder.scalar(1 / classes, scores)
    wide = scores.builder.cast(class_count(scores), max(scores.dtype, ir.DataType.FLOAT, key=lambda dtype: dtype.itemsize))
    return scores.builder.cast(scores.builder.op("Reciprocal", wide), scores.dtype)


def _class_axis(op: Operation) -> Tensor:
    return op.builder.integers([CLASS_AXIS])


def _column(weights: Tensor, scores: Tensor) -> Tensor:
    assert scores.rank is not None
    return weights.builder.op("Reshape", weights, weights.builder.integers([-1, *([1] * (scores.rank - 2))]))


CLASS_AXIS = 1


class Labelled:
    """Class indices of a prediction: the counted positions, the element at each label, and the weight of each position.

    Args:
        prediction: ``[N, C, d1, ...]``, floating-point.
        labels: ``[N, d1, ...]``, int64, each in [0, C) or ``ignore_index``.
        ignore_index: label of positions to ignore; None for none.
        weight: one number per class, as numbers or as a tensor ``[C]``; or None.
    """

    def __init__(
        self, prediction: Tensor, labels: Tensor, ignore_index: int | None, weight: Sequence[float] | Tensor | None = None
    ):
        self._builder = builder = prediction.builder
        self._dtype = prediction.dtype
        self._scores = prediction
        self._ignored: Tensor | None = None
        self.index = labels
        if ignore_index is not None:
            self._ignored = builder.op("Equal", labels, ignore_index)
            # An ignored label may be no valid class; class 0 replaces it and its term is dropped.
            self.index = builder.op("Where", self._ignored, builder.scalar(0, labels), labels, like=labels)
        self._weights = weight

    @cached_property
    def weight(self) -> Tensor | None:
        """The weight of each position, of the labels' shape; None if all weights are equal."""
        if self._weights is None:
            return None
        table = self._weights
        if not isinstance(table, Tensor):
            table = self._builder.constant(np.asarray(table, dtype=self._dtype.numpy()))
        return self._builder.op("Gather", table, self.index, axis=0, shape=self.index.shape)

    def on_class_axis(self, tensor: Tensor) -> Tensor:
        """Emit a tensor of the labels' shape with a class axis of extent 1."""
        return self._builder.op("Unsqueeze", tensor, self._builder.integers([CLASS_AXIS]))

    def pick(self, tensor: Tensor) -> Tensor:
        """Emit the element at each position's label, ``[N, d1, ...]``, from a tensor ``[N, C, d1, ...]``."""
        picked = self._builder.op("GatherElements", tensor, self.on_class_axis(self.index), axis=CLASS_AXIS)
        return self._builder.op("Squeeze", picked, self._builder.integers([CLASS_AXIS]), shape=self.index.shape)

    def counted(self, tensor: Tensor) -> Tensor:
        """Emit a tensor of the labels' shape with 0 for ignored labels."""
        if self._ignored is None:
            return tensor
        return self._builder.op("Where", self._ignored, self._builder.scalar(0.0, tensor), tensor, like=tensor)

    def is_counted(self) -> Tensor:
        """Emit True for counted positions, bool, of the labels' shape."""
        if self._ignored is None:
            return self._builder.op("Equal", self.index, self.index)
        return self._builder.op("Not", self._ignored)

    def total_weight(self) -> Tensor:
        """Emit the sum of the weights of the counted positions, a scalar of the prediction's dtype."""
        if self.weight is not None:
            return _sum_of(self.counted(self.weight))
        return self.count()

    def count(self) -> Tensor:
        """Emit the number of counted positions, a scalar of the prediction's dtype."""
        if self._ignored is None:
            return self._builder.cast(self._builder.op("Size", self.index), self._dtype)
        return _sum_of(self._builder.cast(self.is_counted(), self._dtype))

    def classes(self) -> Tensor:
        """Emit the number of classes, a scalar of the prediction's dtype."""
        return self._builder.cast(class_count(self._scores), self._dtype)


def class_count(prediction: Tensor) -> Tensor:
    """Emit the extent of the class axis, an int64 scalar."""
    builder = prediction.builder
    extent = builder.op("Shape", prediction, start=CLASS_AXIS, end=CLASS_AXIS + 1)
    return builder.op("Squeeze", extent, builder.integers([0]), shape=())


def _sum_of(tensor: Tensor) -> Tensor:
    return tensor.builder.op("ReduceSum", tensor, keepdims=0)


SOFTMAX_CROSS_ENTROPY = SemanticOperator(
    "SoftmaxCrossEntropy",
    ("logits", "labels", "weights"),
    ("total", "counted", "log_p"),
    _totals,
    constants=("counted",),
    gradient=softmax_cross_entropy,
    lowering=lower_softmax_cross_entropy,
)
"""The sum of the terms of logits [N, C, d1, ...] at labels [N, d1, ...], int64, and the sum of the weights as divisor.

``weights`` [C] is optional. Attributes: ``ignore_index``; ``smoothing``, a float64 scalar, optional.
"""
SOFTMAX_CROSS_ENTROPY_GRAD = SemanticOperator(
    "SoftmaxCrossEntropyGrad",
    ("d_total", "logits", "labels", "log_p", "weights"),
    ("d_logits",),
    like("logits"),
    lowering=lower_softmax_cross_entropy_grad,
)

OPERATORS = [
    Operator("SoftmaxCrossEntropyLoss", gradient=softmax_cross_entropy_loss, reopen=reopen_rules.class_loss),
    Operator("NegativeLogLikelihoodLoss", gradient=negative_log_likelihood_loss, reopen=reopen_rules.class_loss),
    SOFTMAX_CROSS_ENTROPY,
    SOFTMAX_CROSS_ENTROPY_GRAD,
]

"""Losses of the standard: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss. The class axis is 1, whatever the rank."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators.labels import CLASS_AXIS, Labelled
from burnish.operators.positions import scatter_add
from burnish.operators.registry import Operation, gradient


@gradient("SoftmaxCrossEntropyLoss")
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
    # With d the cotangent of log p, d scores = d - p * sum(d); the loss adds -at_label to d where the label is.
    at_label = picked.cotangent
    spread = op.builder.op("Exp", log_p) * at_label if d_log_p is None else _through_softmax(log_p, d_log_p, at_label)
    return picked.add_at_label(spread, -at_label, like=scores), None, d_weight


@gradient("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op: Operation, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
    log_p = op.input
    picked = _PickedTerms(op, dy)
    d_input = None
    if op.wants(0):
        d_input = picked.add_at_label(_zeros(op.builder, log_p), -picked.cotangent, like=log_p)
    return d_input, None, picked.weight_gradient(log_p) if op.wants(2) else None


def _through_softmax(log_p: Tensor, d_log_p: Tensor, at_label: Tensor | None = None) -> Tensor:
    """Emit ``d - p * (sum_c d - at_label)``, the cotangent of the scores."""
    builder = log_p.builder
    total = builder.op("ReduceSum", d_log_p, builder.integers([CLASS_AXIS]), keepdims=1)
    if at_label is not None:
        total = total - at_label
    return builder.op("Sub", d_log_p, builder.op("Exp", log_p) * total, like=log_p)


class _PickedTerms:
    """The terms -weight[y] * log p[y] of a loss: where the label y picks them, and what cotangent reaches each.

    With the reduction ``mean`` the terms are divided by the sum of the weights used.
    """

    def __init__(self, op: Operation, dy: Tensor):
        self._op = op
        self._labelled = Labelled(op.input, op.required(1), op.attribute("ignore_index"), op.optional(2))
        self._mean = op.attribute("reduction", "mean") == "mean"
        self._scaled = dy / self._labelled.total_weight() if self._mean else dy

    @property
    def cotangent(self) -> Tensor:
        """The cotangent of each position's -log p[y], 0 where the label is ignored; with a class axis of extent 1."""
        builder, labels, weight = self._op.builder, self._op.required(1), self._labelled.weight
        if weight is None:
            cotangent = builder.op("Expand", self._scaled, builder.op("Shape", labels), shape=labels.shape)
        else:
            cotangent = builder.op("Mul", weight, self._scaled, shape=labels.shape)
        return self._labelled.on_class_axis(self._labelled.counted(cotangent))

    def add_at_label(self, tensor: Tensor, addend: Tensor, like: Tensor) -> Tensor:
        """Emit ``tensor`` with ``addend`` added at the label of each position."""
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

"""Losses of the standard: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss. The class axis is 1, whatever the rank."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.ops.labels import CLASS_AXIS
from burnish.ops.positions import scatter_add
from burnish.ops.registry import Operation, gradient


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
    d_weight = picked.weight_gradient(log_p, d_loss) if op.wants(2) else None
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
    return d_input, None, picked.weight_gradient(log_p, dy) if op.wants(2) else None


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
        self._builder = builder = op.builder
        labels = op.required(1)
        ignore_index = op.attribute("ignore_index")
        self._ignored = None if ignore_index is None else builder.op("Equal", labels, ignore_index)
        self._index = labels
        if self._ignored is not None:
            # An ignored label may be no class at all; class 0 stands in for it, with weight 0.
            self._index = builder.op("Where", self._ignored, builder.scalar(0, labels), labels, like=labels)
        self._mean = op.attribute("reduction", "mean") == "mean"
        self._scaled = dy / self._total_weight() if self._mean else dy

    @property
    def cotangent(self) -> Tensor:
        """The cotangent of each position's -log p[y], 0 where the label is ignored; with a class axis of extent 1."""
        weight = self._position_weight()
        labels = self._op.required(1)
        if weight is None:
            cotangent = self._builder.op("Expand", self._scaled, self._builder.op("Shape", labels), shape=labels.shape)
        else:
            cotangent = self._builder.op("Mul", weight, self._scaled, shape=labels.shape)
        return self._on_class_axis(cotangent)

    def add_at_label(self, tensor: Tensor, addend: Tensor, like: Tensor) -> Tensor:
        """Emit ``tensor`` with ``addend`` added at the label of each position."""
        index = self._on_class_axis(self._index)
        return scatter_add(tensor, index, addend, CLASS_AXIS, like)

    def weight_gradient(self, log_p: Tensor, dy: Tensor) -> Tensor:
        """Emit the gradient of the class weights: of -w[y] * log p[y], and of the division by their sum."""
        builder = self._builder
        picked = builder.op("GatherElements", log_p, self._on_class_axis(self._index), axis=CLASS_AXIS)
        share = -builder.op("Squeeze", picked, builder.integers([CLASS_AXIS]))
        if self._mean:
            share = share - self._op.output
        share = share * self._scaled
        if self._ignored is not None:
            share = builder.op("Where", self._ignored, builder.scalar(0.0, share), share)
        weights = self._op.required(2)
        flat = builder.integers([-1])
        index, addend = builder.op("Reshape", self._index, flat), builder.op("Reshape", share, flat)
        return scatter_add(_zeros(builder, weights), index, addend, 0, like=weights)

    def _position_weight(self) -> Tensor | None:
        """Emit the weight of each position, of the labels' shape; None where every weight is 1."""
        builder = self._builder
        weights = self._op.optional(2)
        if weights is None:
            return None if self._ignored is None else builder.cast(builder.op("Not", self._ignored), self._op.input.dtype)
        weight = builder.op("Gather", weights, self._index, axis=0)
        if self._ignored is None:
            return weight
        return builder.op("Where", self._ignored, builder.scalar(0.0, weight), weight)

    def _total_weight(self) -> Tensor:
        weight = self._position_weight()
        if weight is None:
            return self._builder.cast(self._builder.op("Size", self._op.required(1)), self._op.input.dtype)
        return self._builder.op("ReduceSum", weight, keepdims=0)

    def _on_class_axis(self, tensor: Tensor) -> Tensor:
        return self._builder.op("Unsqueeze", tensor, self._builder.integers([CLASS_AXIS]))


def _zeros(builder: Builder, tensor: Tensor) -> Tensor:
    value = ir.tensor(np.zeros(1, dtype=tensor.dtype.numpy()))
    return builder.op("ConstantOfShape", builder.op("Shape", tensor), value=value, like=tensor)

"""Activations, softmax with the losses over its classes, and their semantic gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from burnish.engines.torch.translate.rules import Call, translates
from burnish.operators.activation import CLIP_GRAD, RELU_GRAD


@translates(RELU_GRAD)
def relu_gradient(op: Call) -> Any:
    return torch.ops.aten.threshold_backward.default(op.tensor(0), op.tensor(1), 0)


@translates("HardSigmoid")
def hard_sigmoid(op: Call) -> Any:
    return torch.clamp(op.tensor() * op.attribute("alpha", 0.2) + op.attribute("beta", 0.5), 0, 1)


@translates("Softmax", since=13)
def softmax(op: Call) -> Any:
    return torch.softmax(op.tensor(), op.attribute("axis", -1))


@translates("LogSoftmax", since=13)
def log_softmax(op: Call) -> Any:
    return torch.log_softmax(op.tensor(), op.attribute("axis", -1))


@translates("Softplus")
def softplus(op: Call) -> Any:
    x = op.tensor()
    return torch.logaddexp(x, torch.zeros_like(x))


@translates("Elu")
def elu(op: Call) -> Any:
    return functional.elu(op.tensor(), op.attribute("alpha", 1.0))


@translates("Celu")
def celu(op: Call) -> Any:
    return functional.celu(op.tensor(), op.attribute("alpha", 1.0))


@translates("Selu")
def selu(op: Call) -> Any:
    alpha, gamma = op.attribute("alpha", 1.67326319217681884765625), op.attribute("gamma", 1.05070102214813232421875)
    return functional.elu(op.tensor(), alpha) * gamma


@translates("LeakyRelu")
def leaky_relu(op: Call) -> Any:
    return functional.leaky_relu(op.tensor(), op.attribute("alpha", 0.01))


@translates("PRelu")
def parametric_relu(op: Call) -> Any:
    x = op.tensor(0)
    return torch.where(x < 0, op.tensor(1) * x, x)


@translates("ThresholdedRelu")
def thresholded_relu(op: Call) -> Any:
    return functional.threshold(op.tensor(), op.attribute("alpha", 1.0), 0.0)


@translates("Gelu")
def gelu(op: Call) -> Any:
    return functional.gelu(op.tensor(), approximate=op.attribute("approximate", "none"))


@translates("Swish")
def swish(op: Call) -> Any:
    x = op.tensor()
    return x * torch.sigmoid(x * op.attribute("alpha", 1.0))


@translates("Shrink")
def shrink(op: Call) -> Any:
    x, bias, threshold = op.tensor(), op.attribute("bias", 0.0), op.attribute("lambd", 0.5)
    zero = torch.zeros_like(x)
    return torch.where(x < -threshold, x + bias, torch.where(x > threshold, x - bias, zero))


@translates("Hardmax", since=13)
def hardmax(op: Call) -> Any:
    x, axis = op.tensor(), op.attribute("axis", -1)
    return torch.zeros_like(x).scatter(axis, torch.argmax(x, axis, keepdim=True), 1)


@translates(CLIP_GRAD)
def clip_gradient(op: Call) -> Any:
    low, high = (op.operand(index) if op.has(index) else None for index in (2, 3))
    if isinstance(low, int | float) and isinstance(high, int | float):
        return torch.ops.aten.hardtanh_backward.default(op.tensor(0), op.tensor(1), low, high)
    inside: Any = None
    if low is not None:
        inside = op.tensor(1) > low
    if high is not None:
        below = op.tensor(1) < high
        inside = below if inside is None else torch.logical_and(inside, below)
    return op.tensor(0) * inside


CLASS_AXIS = 1


@translates("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op: Call) -> Any:
    log_p = torch.log_softmax(op.tensor(0), CLASS_AXIS)
    return _negative_log_likelihood(op, log_p), log_p if op.is_read(1) else None


@translates("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op: Call) -> Any:
    return _negative_log_likelihood(op, op.tensor(0))


def _negative_log_likelihood(op: Call, log_p: Any) -> Any:
    """Return -weight[y] log p[y] at every position; or reduced to the sum, or to the sum divided by that of the weights used.

    Unlike ``nll_loss``, it handles labels out of range on all devices, and sums in the order of the positions.
    """
    labels = op.tensor(1).to(torch.int64)
    ignore_index, reduction = op.attribute("ignore_index"), op.attribute("reduction", "mean")
    ignored = None if ignore_index is None else torch.eq(labels, ignore_index)
    index = labels if ignored is None else torch.where(ignored, torch.zeros_like(labels), labels)
    picked = torch.squeeze(torch.gather(log_p, CLASS_AXIS, torch.unsqueeze(index, CLASS_AXIS)), CLASS_AXIS)
    weight = None
    if op.has(2):
        weight = torch.reshape(torch.index_select(op.tensor(2), 0, torch.reshape(index, [-1])), op.extents(1))
    elif ignored is not None:
        weight = torch.ones_like(picked)
    if ignored is not None:
        assert weight is not None
        weight, picked = torch.where(ignored, 0, weight), torch.where(ignored, 0, picked)
    losses = -picked if weight is None else -picked * weight
    if reduction == "none":
        return losses
    if reduction == "sum":
        return torch.sum(losses)
    return torch.mean(losses) if weight is None else torch.sum(losses) / torch.sum(weight)

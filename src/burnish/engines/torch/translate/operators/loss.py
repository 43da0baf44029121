"""The standard's losses over class indices; the class axis is 1, whatever the rank."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, translates

CLASS_AXIS = 1


@translates("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy_loss(op: Call) -> Any:
    log_p = torch.log_softmax(op.tensor(0), CLASS_AXIS)
    return _negative_log_likelihood(op, log_p), log_p if op.is_read(1) else None


@translates("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(op: Call) -> Any:
    return _negative_log_likelihood(op, op.tensor(0))


def _negative_log_likelihood(op: Call, log_p: Any) -> Any:
    """-weight[y] log p[y] at every position; reduced to the sum, or to the sum over that of the weights used.

    Written out, not ``nll_loss``: that one takes labels out of range for granted on some devices, and its sums are in the
    order of the positions.
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

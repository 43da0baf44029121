"""Losses that a model computes itself."""

from __future__ import annotations

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.operands import Refused
from burnish.importer.open_batch.rules.images import stacked, unstacked
from burnish.importer.open_batch.rules.reductions import LOSS_REMEDY


@opens("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def class_loss(call: Call) -> list[Result | None]:
    """Without a reduction, each sample has its own loss. A sum or mean goes over all samples, and is refused."""
    call.same_for_all(0, 1)
    reduction = call.attribute("reduction", "mean")
    if reduction != "none":
        raise Refused(f"takes the {reduction} over all samples, and of a batch there is only one", LOSS_REMEDY)
    scores, labels = call.operand(0), call.operand(1)
    count = scores.shape[0]
    if labels.shape != (count, *scores.shape[2:]):
        raise Refused(f"has labels of the shape {labels.shape} for scores of the shape {scores.shape}")
    values = [stacked(call.opening, operand) for operand in (scores, labels)]
    results = call.again(*call.with_rest(*values))
    return [unstacked(call, value, count, index) if value.name != "" else None for index, value in enumerate(results)]

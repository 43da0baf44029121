"""Losses of the standard: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from specs.operator_spec import OperatorSpec, Sample, normal, uniform

CLASSES = 4


def negative_log_likelihood(
    log_p: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
) -> torch.Tensor:
    """The standard's definition, written so that PyTorch differentiates it by the class weights too."""
    ignored = torch.zeros_like(labels, dtype=torch.bool) if ignore_index is None else labels == ignore_index
    index = torch.where(ignored, 0, labels).long()
    one = torch.ones(log_p.shape[1], dtype=log_p.dtype) if weight is None else weight
    used = torch.where(ignored, 0.0, one[index])
    terms = -used * log_p.gather(1, index.unsqueeze(1)).squeeze(1)
    if reduction == "none":
        return terms
    return terms.sum() / used.sum() if reduction == "mean" else terms.sum()


def softmax_cross_entropy(
    scores: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None = None, **attributes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = torch.log_softmax(scores, 1)
    return negative_log_likelihood(log_p, labels, weight, **attributes), log_p


def loss_samples(rng: np.random.Generator, outputs: int) -> Iterator[Sample]:
    for shape in ((5, CLASSES), (3, CLASSES, 2), (2, CLASSES, 3, 2)):
        positions = (shape[0], *shape[2:])
        labels = rng.integers(0, CLASSES, positions)
        ignoring = labels.copy()
        ignoring.flat[1] = -100
        ignoring.flat[3] = -100
        common: dict[str, Any] = {"constants": (), "batched": (0, 1)}
        for reduction in ("none", "sum", "mean"):
            name = f"{reduction}_rank{len(shape)}"
            reduced = {"reduction": reduction}
            scores, weight = normal(rng, *shape), uniform(rng, 0.2, 2.0, CLASSES)
            yield Sample([scores, labels], reduced, name, most_nodes=15, **common)
            yield Sample([scores, labels, weight], reduced, f"{name}_weight", **common)
            ignore = {**reduced, "ignore_index": -100}
            yield Sample([scores, ignoring], ignore, f"{name}_ignore", **common)
            yield Sample([scores, ignoring, weight], ignore, f"{name}_weight_ignore", **common)
            if outputs == 2:
                yield Sample([scores, ignoring, weight], ignore, f"{name}_log_p", outputs=2, **common)
                yield Sample([scores, labels], reduced, f"{name}_log_p_alone", outputs=2, cotangents=(1,), **common)
    ignored_class = {"reduction": "mean", "ignore_index": 1}
    labels = np.array([1, 0, 2, 1, 3])
    yield Sample([normal(rng, 5, CLASSES), labels], ignored_class, "ignored_class", batched=(0, 1))
    yield Sample([normal(rng, 5, CLASSES), labels.astype(np.int32)], ignored_class, "int32_labels", batched=(0, 1))


SPECS = [
    OperatorSpec("SoftmaxCrossEntropyLoss", lambda rng: loss_samples(rng, 2), torch=softmax_cross_entropy),
    OperatorSpec("NegativeLogLikelihoodLoss", lambda rng: loss_samples(rng, 1), torch=negative_log_likelihood),
]

"""Losses of regions and of boxes beside the same functions in PyTorch: more of the table in ``losses.py``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def boxes_that_overlap(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Boxes and targets as two corners; the last of them do not touch."""
    corner, size = rng.uniform(0, 0.4, (*shape, 2)), rng.uniform(0.2, 0.5, (*shape, 2))
    target, other = corner + rng.uniform(-0.1, 0.1, (*shape, 2)), size * rng.uniform(0.7, 1.4, (*shape, 2))
    boxes, targets = np.concatenate([corner, corner + size], -1), np.concatenate([target, target + other], -1)
    targets.reshape(-1, 4)[-1] += 2
    return boxes, targets


def as_format(boxes: np.ndarray, box_format: str) -> np.ndarray:
    first, last = boxes[..., :2], boxes[..., 2:]
    if box_format == "xyxy":
        return boxes
    return np.concatenate([first if box_format == "xywh" else (first + last) / 2, last - first], -1)


def box_loss(x: torch.Tensor, y: torch.Tensor, kind: str, box_format: str, epsilon: float, reduction: str) -> torch.Tensor:
    """The definitions of ``torchvision.ops``: generalized, distance and complete IoU losses."""
    (a, b), (c, d) = (_corners(boxes, box_format) for boxes in (x, y))
    shared = (torch.minimum(b, d) - torch.maximum(a, c)).clamp(min=0).prod(-1)
    union = (b - a).prod(-1) + (d - c).prod(-1) - shared
    value = shared / (union + epsilon)
    around = torch.maximum(b, d) - torch.minimum(a, c)
    if kind == "giou":
        value = value - (around.prod(-1) - union) / (around.prod(-1) + epsilon)
    if kind in ("diou", "ciou"):
        overlap = value
        value = value - ((a + b - c - d) / 2).square().sum(-1) / (around.square().sum(-1) + epsilon)
    if kind == "ciou":
        (width, height), (other_width, other_height) = (b - a).unbind(-1), (d - c).unbind(-1)
        v = 4 / math.pi**2 * (torch.atan(other_width / other_height) - torch.atan(width / height)) ** 2
        with torch.no_grad():
            alpha = v / (1 - overlap + v + epsilon)
        value = value - alpha * v
    return getattr(1 - value, reduction)()


def _corners(boxes: torch.Tensor, box_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = boxes[..., :2], boxes[..., 2:]
    if box_format == "xyxy":
        return first, second
    return (first, first + second) if box_format == "xywh" else (first - second / 2, first + second / 2)


def _hot(x: torch.Tensor, y: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = y != ignored
    hot = torch.movedim(F.one_hot(torch.where(counts, y, 0), x.shape[1]), -1, 1)
    return torch.softmax(x, 1).flatten(2), hot.flatten(2).double(), counts.flatten(1)


def tversky(
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
    beta: float,
    smooth: float,
    gamma: float,
    ignored: int,
    reduction: str,
) -> Any:
    p, hot, counts = _hot(x, y, ignored)
    p, hot = p * counts[:, None], hot * counts[:, None]
    hits, false, missed = (p * hot).sum(2), (p * (1 - hot)).sum(2), ((1 - p) * hot).sum(2)
    element = (1 - (hits + smooth) / (hits + alpha * false + beta * missed + smooth)) ** gamma
    return getattr(element, reduction)()


def lovasz(x: torch.Tensor, y: torch.Tensor, ignored: int, reduction: str) -> torch.Tensor:
    """Algorithm 1 of Berman et al. 2018, of one sample and class after the other; ignored positions are taken out first."""
    p, hot, counts = _hot(x, y, ignored)
    terms = []
    for sample in range(len(x)):
        for index in range(x.shape[1]):
            probability, there = p[sample, index, counts[sample]], hot[sample, index, counts[sample]]
            if there.sum() == 0:
                continue
            errors, order = torch.sort((there - probability).abs(), descending=True)
            ordered = there[order]
            jaccard = 1 - (there.sum() - ordered.cumsum(0)) / (there.sum() + (1 - ordered).cumsum(0))
            weight = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
            terms.append((errors * weight.detach()).sum())
    return getattr(torch.stack(terms), reduction)()

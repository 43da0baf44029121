"""Losses of detectors in PyTorch, picture by picture and object by object: what the graphs are measured against."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

from specs.region_and_box_losses import box_loss

Losses = dict[str, torch.Tensor]


def iou(boxes: torch.Tensor, others: torch.Tensor, kind: str = "iou") -> torch.Tensor:
    """Of each box with each other, ``[boxes, others]``."""
    pairs = [[1 - box_loss(box, other, kind, "xyxy", 1e-7, "sum") for other in others] for box in boxes]
    return torch.stack([torch.stack(row) for row in pairs])


def objects_of(labels: torch.Tensor, boxes: torch.Tensor, crowd: torch.Tensor | None, sample: int) -> Any:
    there = labels[sample] >= 0
    regions = boxes[sample][:0]
    if crowd is not None:
        regions = boxes[sample][there & (crowd[sample] == 1)]
        there = there & (crowd[sample] == 0)
    return labels[sample][there], boxes[sample][there], regions


def ssd(
    offsets: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    boxes: torch.Tensor,
    anchors: np.ndarray,
    crowd: torch.Tensor | None = None,
    threshold: float = 0.5,
    ratio: float = 3.0,
) -> Losses:
    """As torchvision's ``SSD.compute_loss`` and its matcher, with anchors in regions of many objects left out."""
    centres = torch.from_numpy(anchors)
    sides = torch.cat([centres[:, :2] - centres[:, 2:] / 2, centres[:, :2] + centres[:, 2:] / 2], 1)
    location, entropy, answering = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for sample in range(len(offsets)):
        own, goal, regions = objects_of(labels, boxes, crowd, sample)
        matched = torch.full((len(anchors),), -1)
        if len(own):
            pairs = iou(goal, sides)
            best, index = pairs.max(0)
            matched = torch.where(best >= threshold, index, -1)
            for number in range(len(own)):
                matched[pairs[number].argmax()] = number
        positive = matched >= 0
        label = torch.zeros(len(anchors), dtype=torch.int64)
        label[positive] = own[matched[positive]] + 1
        cost = F.cross_entropy(scores[sample], label, reduction="none")
        if positive.any():
            box, anchor = goal[matched[positive]], centres[positive]
            size = box[:, 2:] - box[:, :2]
            aim = torch.cat(
                [((box[:, :2] + box[:, 2:]) / 2 - anchor[:, :2]) / anchor[:, 2:] / 0.1, torch.log(size / anchor[:, 2:]) / 0.2], 1
            )
            location = location + F.smooth_l1_loss(offsets[sample][positive], aim, reduction="sum")
        excluded = positive.clone()
        for region in regions:
            shared = torch.minimum(sides[:, 2:], region[2:]) - torch.maximum(sides[:, :2], region[:2])
            excluded |= shared.clamp(min=0).prod(1) >= 0.5 * (sides[:, 2:] - sides[:, :2]).prod(1)
        count = min(int(ratio * positive.sum()), int((~excluded).sum()))
        entropy = entropy + cost[positive].sum() + cost[~excluded].sort(descending=True)[0][:count].sum()
        answering += int(positive.sum())
    return {"boxes": location / max(answering, 1), "classes": entropy / max(answering, 1)}


def task_aligned(
    read: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    boxes: torch.Tensor,
    grids: list[tuple[int, int]],
    bins: int,
    candidates: int,
    crowd: torch.Tensor | None = None,
) -> Losses:
    """The task-aligned assigner of TOOD as YOLOv8 uses it, written for one object after the other; in cells of the first map."""
    scale = 1.0
    points, strides = [], []
    for height, width in grids:
        stride = scale * grids[0][1] / width
        for y in range(height):
            for x in range(width):
                points.append([(x + 0.5) * stride, (y + 0.5) * stride])
                strides.append(stride)
    point, stride = torch.tensor(points, dtype=torch.float64), torch.tensor(strides, dtype=torch.float64)[:, None]
    extent = torch.tensor([grids[0][1] * scale, grids[0][0] * scale] * 2, dtype=torch.float64)
    numbers = torch.arange(bins, dtype=torch.float64)
    picked: list[Any] = []
    entropy: list[torch.Tensor] = []
    for sample in range(len(read)):
        own, goal, regions = objects_of(labels, boxes, crowd, sample)
        goal, regions = goal * extent, regions * extent
        distances = read[sample]
        if bins > 1:
            distances = (distances.reshape(-1, 4, bins).softmax(2) * numbers).sum(2)
        predicted = torch.cat([point - distances[:, :2] * stride, point + distances[:, 2:] * stride], 1)
        aim = torch.zeros_like(scores[sample])
        chosen = torch.zeros(len(point), dtype=torch.bool)
        if len(own):
            with torch.no_grad():
                pairs = iou(goal, predicted, "ciou").clamp(min=0)
                inside = torch.stack([torch.cat([point - box[:2], box[2:] - point], 1).min(1)[0] > 1e-9 for box in goal])
                pairs = pairs * inside
                measure = scores[sample].sigmoid().T[own] ** 0.5 * pairs**6.0 * inside
                order = torch.sort(measure, dim=1, descending=True, stable=True)[1][:, :candidates]
                wanted = torch.zeros_like(inside)
                for number, cells in enumerate(order):
                    wanted[number, cells] = True
                wanted &= inside
                for cell in range(len(point)):
                    if wanted[:, cell].sum() > 1:
                        best = pairs[:, cell].argmax()
                        wanted[:, cell] = False
                        wanted[best, cell] = True
                measure, pairs = measure * wanted, pairs * wanted
                share = measure * pairs.max(1, keepdim=True)[0] / (measure.max(1, keepdim=True)[0] + 1e-9)
            chosen = wanted.any(0)
            for cell in torch.nonzero(chosen).flatten():
                number = int(wanted[:, cell].int().argmax())
                quality = share[number, cell]
                aim[cell, own[number]] = quality
                box = goal[number]
                sides = torch.cat([point[cell] - box[:2], box[2:] - point[cell]]) / stride[cell]
                picked.append((predicted[cell], box, quality, read[sample, cell], sides.clamp(0, bins - 1 - 0.01)))
        cost = F.binary_cross_entropy_with_logits(scores[sample], aim.detach(), reduction="none")
        for region in regions:
            within = torch.cat([point - region[:2], region[2:] - point], 1).min(1)[0] > 1e-9
            cost = cost * (chosen | ~within)[:, None]
        entropy.append(cost.sum())
    total = max(float(sum(one[2] for one in picked)), 1.0)
    location = sum(box_loss(one[0], one[1], "ciou", "xyxy", 1e-7, "sum") * one[2] for one in picked) / total
    losses: Losses = {"boxes": 7.5 * location, "classes": 0.5 * torch.stack(entropy).sum() / total}
    if bins > 1:
        spread = torch.zeros((), dtype=torch.float64)
        for *_, quality, logits, sides in picked:
            for side in range(4):
                below = math.floor(sides[side])
                log_p = F.log_softmax(logits.reshape(4, bins)[side], 0)
                near = sides[side] - below
                spread = spread - quality * ((1 - near) * log_p[below] + near * log_p[below + 1]) / 4
        losses["distances"] = 1.5 * spread / total
    return losses


def detr(boxes: torch.Tensor, scores: torch.Tensor, labels: torch.Tensor, goals: torch.Tensor, focal: bool) -> Losses:
    """As the SetCriterion and the HungarianMatcher of DETR, and of Deformable DETR."""
    found = torch.full(scores.shape[:2], -1)
    l1 = giou = torch.zeros((), dtype=torch.float64)
    objects = 0
    sides = torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], 2)
    for sample in range(len(boxes)):
        own, goal, _ = objects_of(labels, goals, None, sample)
        objects += len(own)
        if not len(own):
            continue
        centred = torch.cat([(goal[:, :2] + goal[:, 2:]) / 2, goal[:, 2:] - goal[:, :2]], 1)
        with torch.no_grad():
            if focal:
                p = scores[sample].sigmoid()
                cost = (0.25 * (1 - p) ** 2 * -(p + 1e-8).log() - 0.75 * p**2 * -(1 - p + 1e-8).log())[:, own]
            else:
                cost = -scores[sample].softmax(1)[:, own]
            cost = cost + 5 * torch.cdist(boxes[sample], centred, p=1) - 2 * iou(sides[sample], goal, "giou")
        places, index = linear_sum_assignment(cost.numpy())
        found[sample, places] = own[index]
        l1 = l1 + (boxes[sample, places] - centred[index]).abs().sum()
        giou = giou + box_loss(sides[sample, places], goal[index], "giou", "xyxy", 1e-7, "sum")
    count = max(objects, 1)
    if focal:
        hot = torch.zeros_like(scores)
        for sample, place in torch.nonzero(found >= 0).tolist():
            hot[sample, place, found[sample, place]] = 1
        p = scores.sigmoid()
        entropy = F.binary_cross_entropy_with_logits(scores, hot, reduction="none")
        p_t = p * hot + (1 - p) * (1 - hot)
        classes = ((0.25 * hot + 0.75 * (1 - hot)) * (1 - p_t) ** 2 * entropy).sum() / count
    else:
        weight = torch.ones(scores.shape[2], dtype=torch.float64)
        weight[-1] = 0.1
        label = torch.where(found >= 0, found, scores.shape[2] - 1)
        classes = F.cross_entropy(scores.flatten(0, 1), label.flatten(), weight=weight)
    return {"classes": classes, "l1": 5 * l1 / count, "giou": 2 * giou / count}

"""Detectors and their losses: one over a grid in the manner of YOLO, one over boxes of several sizes in the manner of SSD."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from architectures.pixels import convolution

ANCHORS = ((0.2, 0.3), (0.5, 0.4))
CLASSES = 3
YOLO_CELLS = 4


class Yolo(nn.Module):
    """A detector over a grid (Redmon and Farhadi 2018). Input [batch, 3, 32, 32], output [batch, anchors, 4, 4, 5 + classes]."""

    def __init__(self, width: int = 8):
        super().__init__()
        channels = [3, width, 2 * width, 4 * width]
        self.backbone = nn.Sequential(
            *(convolution(before, after, 3, 2, activation=nn.SiLU) for before, after in pairwise(channels))
        )
        self.head = nn.Conv2d(4 * width, len(ANCHORS) * (5 + CLASSES), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.backbone(x))
        return y.view(y.shape[0], len(ANCHORS), 5 + CLASSES, y.shape[2], y.shape[3]).permute(0, 1, 3, 4, 2)


def distance_overlap(first: torch.Tensor, second: torch.Tensor, eps: float = 1e-7) -> torch.Tensor:
    """Distance intersection over union (Zheng et al. 2019) of boxes [..., centre x, centre y, width, height]."""
    lows = [boxes[..., :2] - boxes[..., 2:] / 2 for boxes in (first, second)]
    highs = [boxes[..., :2] + boxes[..., 2:] / 2 for boxes in (first, second)]
    extents = (torch.minimum(*highs) - torch.maximum(*lows)).clamp(min=0)
    shared = extents[..., 0] * extents[..., 1]
    union = first[..., 2] * first[..., 3] + second[..., 2] * second[..., 3] - shared + eps
    diagonal = (torch.maximum(*highs) - torch.minimum(*lows)).square().sum(-1) + eps
    return shared / union - (first[..., :2] - second[..., :2]).square().sum(-1) / diagonal


class YoloLoss(nn.Module):
    """Objectness and classes by binary cross-entropy, boxes by their overlap where an object stands.

    Inputs: the detector's output; ``objects`` [batch, anchors, cells, cells], 0 or 1; ``boxes`` [..., 4], as parts of the image;
    ``classes`` [...], int64.
    """

    def __init__(self, count: int = YOLO_CELLS):
        super().__init__()
        self.count = count
        rows, columns = torch.meshgrid(torch.arange(count), torch.arange(count), indexing="ij")
        self.register_buffer("cells", torch.stack((columns, rows), -1).float())
        self.register_buffer("anchors", torch.tensor(ANCHORS)[None, :, None, None])

    def forward(self, grid: torch.Tensor, objects: torch.Tensor, boxes: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        centres = (torch.sigmoid(grid[..., :2]) * 2 - 0.5 + self.cells) / self.count
        extents = (torch.sigmoid(grid[..., 2:4]) * 2) ** 2 * self.anchors
        count = objects.sum().clamp(min=1)
        far = 1 - distance_overlap(torch.cat((centres, extents), -1), boxes)
        named = binary_cross_entropy_with_logits(grid[..., 5:], one_hot(classes, CLASSES).to(grid.dtype), reduction="none")
        objectness = binary_cross_entropy_with_logits(grid[..., 4], objects)
        return objectness + ((5 * far + named.mean(-1)) * objects).sum() / count


class Ssd(nn.Module):
    """Class scores and offsets for boxes on two maps (Liu et al. 2016). Input [batch, 3, 32, 32].

    Outputs: scores [batch, boxes, 1 + classes], the first of them the background, and offsets [batch, boxes, 4].
    """

    def __init__(self, width: int = 8):
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(convolution(3, width, 3, 2), convolution(width, 2 * width, 3, 2)),
                convolution(2 * width, 4 * width, 3, 2),
            ]
        )
        anchors, widths = len(ANCHORS), (2 * width, 4 * width)
        self.scores = nn.ModuleList(nn.Conv2d(channels, anchors * (1 + CLASSES), 3, 1, 1) for channels in widths)
        self.offsets = nn.ModuleList(nn.Conv2d(channels, anchors * 4, 3, 1, 1) for channels in widths)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, offsets = [], []
        for stage, score, offset in zip(self.stages, self.scores, self.offsets, strict=True):
            x = stage(x)
            scores.append(self.of_boxes(score(x), 1 + CLASSES))
            offsets.append(self.of_boxes(offset(x), 4))
        return torch.cat(scores, 1), torch.cat(offsets, 1)

    @staticmethod
    def of_boxes(y: torch.Tensor, values: int) -> torch.Tensor:
        return y.permute(0, 2, 3, 1).reshape(y.shape[0], -1, values)


class SsdLoss(nn.Module):
    """Cross-entropy of positives and of the three times as many hardest negatives, and smooth L1 of the positives' offsets.

    Inputs: the detector's outputs; ``classes`` [batch, boxes], int64, 0 where there is no object; ``wanted`` [batch, boxes, 4].
    """

    def forward(self, scores: torch.Tensor, offsets: torch.Tensor, classes: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        positive = classes > 0
        count = positive.sum(1, keepdim=True)
        losses = cross_entropy(scores.transpose(1, 2), classes, reduction="none")
        negatives = losses.detach().masked_fill(positive, 0.0)
        order = negatives.sort(1, descending=True)[1]
        rank = order.sort(1)[1]
        chosen = positive | (rank < 3 * count)
        distance = (offsets - wanted).abs()
        near = torch.where(distance < 1, 0.5 * distance * distance, distance - 0.5).sum(2)
        total = (losses * chosen.to(losses.dtype)).sum() + (near * positive.to(near.dtype)).sum()
        return total / count.sum().clamp(min=1).to(losses.dtype)


class WithLoss(nn.Module):
    """A detector that computes its loss itself."""

    def __init__(self, detector: nn.Module, loss: nn.Module):
        super().__init__()
        self.detector, self.loss = detector, loss

    def forward(self, x: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        outputs = self.detector(x)
        return self.loss(*(outputs if isinstance(outputs, tuple) else (outputs,)), *labels)

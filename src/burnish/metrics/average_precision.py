"""Mean average precision of detectors, over whole data sets: what was found and what is there are rows that are kept apart."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import Compared, Detections
from burnish.metrics.base import MetricBase, widened
from burnish.metrics.box_matching import (
    AREAS,
    IOU_THRESHOLDS,
    Picture,
    coco_average_precision,
    suppressed,
    voc_average_precision,
)
from burnish.settings import is_number, is_whole

FOUND, THERE, PICTURE = "found", "there", "picture"
EVERY = "0.5:0.95"
NOWHERE = 2.0
"""An overlap that no two boxes have: what is above it is never left out."""


@dataclass(frozen=True)
class AveragePrecision(MetricBase):
    """A metric of what a detector found, which is computed from all rows of a data set, on the host.

    Its totals are rows, one or more for each picture: ``found [N, K, 6]`` (score, class, box), ``there [N, M, 7]`` (class, box,
    whether it does not count, area) and ``picture [N, 1, 3]`` (height, width, overlap to suppress). A step reports no figure.
    """

    higher_is_better: ClassVar[bool] = True
    is_of_rows: ClassVar[bool] = True

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit the rows.

        Raises:
            ConfigurationError: the loss is none of detectors, or lacks what the metric reads.
        """
        detections = compared.detections
        if detections is None:
            raise ConfigurationError(
                f"{self.name} compares boxes with objects, and the loss {compared.loss.name} is none of detectors: leave the "
                "metric out, or use a loss such as ssd, task_aligned or detr"
            )
        self.check(detections)
        key = (AveragePrecision, self.candidates_kept, self.overlap, detections.boxes.value, detections.labels.value)
        return detections.boxes.builder.once(key, lambda: self._rows(detections))

    @property
    @abstractmethod
    def candidates_kept(self) -> int:
        """How many boxes of a picture are looked at, the likeliest."""

    @property
    @abstractmethod
    def overlap(self) -> float | None:
        """Above which overlap the less likely of two boxes of a class goes; None: as the loss says."""

    def check(self, detections: Detections) -> None:
        """Raise ConfigurationError where the loss lacks what the metric reads; this one lacks nothing."""

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        """No graph computes it.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"{self.name} is a figure of a data set: no graph computes it")

    def _rows(self, detections: Detections) -> dict[str, Tensor]:
        builder = detections.boxes.builder
        boxes, scores = widened(detections.boxes), widened(detections.scores)
        flat = builder.op("Reshape", scores, builder.integers([0, -1]))
        count = builder.op("Min", builder.op("Shape", flat, start=1, end=2), builder.integers([self.candidates_kept]))
        best, place = builder.op("TopK", flat, count, axis=1, outputs=2)
        classes = builder.op("Shape", scores, start=2, end=3)
        column = builder.integers([2])
        box = builder.op("GatherND", boxes, builder.op("Unsqueeze", place / classes, column), batch_dims=1)
        index = builder.cast(place - place / classes * classes, boxes.dtype)
        found = builder.op("Concat", *(builder.op("Unsqueeze", one, column) for one in (best, index)), box, axis=2)
        label = builder.cast(detections.labels, boxes.dtype)
        crowd = label * 0.0 if detections.crowd is None else builder.cast(detections.crowd, boxes.dtype)
        areas = label * 0.0 if detections.areas is None else widened(detections.areas)
        single = [builder.op("Unsqueeze", one, column) for one in (label, crowd, areas)]
        there = builder.op("Concat", single[0], widened(detections.objects), *single[1:], axis=2)
        first = builder.op("Slice", boxes, *(builder.integers([number]) for number in (0, 1, 1)))
        first = builder.op("Slice", first, *(builder.integers([number]) for number in (0, 1, 2))) * 0.0
        suppression = detections.suppression if self.overlap is None else self.overlap
        limit = first + (NOWHERE if suppression is None else suppression)
        if detections.sizes is None:
            size = builder.op("Concat", first + 1.0, first + 1.0, axis=2)
        else:
            size = builder.op("Unsqueeze", widened(detections.sizes), builder.integers([1]))
        return {FOUND: found, THERE: there, PICTURE: builder.op("Concat", size, limit, axis=2)}

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        """Return the figure of all rows; NaN where no object is there."""
        return self.of_pictures(pictures_of(totals))

    @abstractmethod
    def of_pictures(self, pictures: Sequence[Picture]) -> float:
        """Return the figure of pictures."""


@dataclass(frozen=True)
class CocoAveragePrecision(AveragePrecision):
    """COCO's mean average precision, as pycocotools computes it; see ``coco_average_precision``.

    Attributes:
        iou: ``0.5:0.95``, the mean over ten thresholds of overlap; or one threshold.
        area: ``all``, or of ``small``, ``medium`` or ``large`` objects: the loss has ``crowd=true`` then, as areas are its input.
        detections: of a picture and a class, at most.
        candidates: of a picture, before the suppression, at most.
        suppression: the overlap above which the less likely of two boxes of a class goes; None: as the loss says, 1: none goes.
    """

    word: ClassVar[str] = "coco_map"

    iou: str | float = EVERY
    area: str = "all"
    detections: int = 100
    candidates: int = 1000
    suppression: float | None = None

    def __post_init__(self) -> None:
        if self.iou != EVERY and not (is_number(self.iou) and 0 < self.iou <= 1):
            raise ConfigurationError(f"{self.word}: iou must be {EVERY!r} or a number above 0 up to 1, not {self.iou!r}")
        if self.area not in AREAS:
            raise ConfigurationError(f"{self.word}: area must be {', '.join(map(repr, AREAS))}, not {self.area!r}")
        _check_counts(self.word, detections=self.detections, candidates=self.candidates)
        _check_overlap(self.word, self.suppression)

    @property
    def candidates_kept(self) -> int:
        return self.candidates

    @property
    def overlap(self) -> float | None:
        return self.suppression

    def check(self, detections: Detections) -> None:
        if self.area != "all" and detections.areas is None:
            raise ConfigurationError(
                f"{self.name}: the areas of objects are no input of the loss: give it crowd=true, and data that have them, or "
                "leave area out"
            )

    def of_pictures(self, pictures: Sequence[Picture]) -> float:
        thresholds = IOU_THRESHOLDS if isinstance(self.iou, str) else (self.iou,)
        return coco_average_precision(pictures, thresholds, self.area, self.detections)


@dataclass(frozen=True)
class VocAveragePrecision(AveragePrecision):
    """PASCAL VOC's mean average precision; see ``voc_average_precision``.

    Attributes:
        iou: threshold of overlap.
        points: 0 for the area under the curve (VOC 2010 and later), or 11 (VOC 2007).
        candidates, suppression: as ``CocoAveragePrecision`` has them.
    """

    word: ClassVar[str] = "voc_map"

    iou: float = 0.5
    points: int = 0
    candidates: int = 1000
    suppression: float | None = None

    def __post_init__(self) -> None:
        if not is_number(self.iou) or not 0 < self.iou <= 1:
            raise ConfigurationError(f"{self.word}: iou must be a number above 0 up to 1, not {self.iou!r}")
        if self.points not in (0, 11):
            raise ConfigurationError(f"{self.word}: points must be 0 (the area under the curve) or 11, not {self.points!r}")
        _check_counts(self.word, candidates=self.candidates)
        _check_overlap(self.word, self.suppression)

    @property
    def candidates_kept(self) -> int:
        return self.candidates

    @property
    def overlap(self) -> float | None:
        return self.suppression

    def of_pictures(self, pictures: Sequence[Picture]) -> float:
        return voc_average_precision(pictures, self.iou, self.points)


def pictures_of(totals: Mapping[str, np.ndarray]) -> list[Picture]:
    """Return the pictures in rows, without boxes that are suppressed and places without objects."""
    pictures = []
    for found, there, picture in zip(totals[FOUND], totals[THERE], totals[PICTURE], strict=True):
        there = there[there[:, 0] >= 0]
        height, width, threshold = picture[0]
        found = found[found[:, 1] >= 0]
        scores, classes, boxes = found[:, 0], found[:, 1].astype(np.int64), found[:, 2:]
        if threshold < 1:
            kept = suppressed(scores, classes, boxes, threshold)
            scores, classes, boxes = scores[kept], classes[kept], boxes[kept]
        labels, crowd = there[:, 0].astype(np.int64), there[:, 5] > 0
        pictures.append(Picture(scores, classes, boxes, labels, there[:, 1:5], crowd, there[:, 6], (height, width)))
    return pictures


def _check_counts(metric: str, **counts: int) -> None:
    for option, count in counts.items():
        if not is_whole(count) or count < 1:
            raise ConfigurationError(f"{metric}: {option} must be a whole number above 0, not {count!r}")


def _check_overlap(metric: str, overlap: float | None) -> None:
    if overlap is not None and not (is_number(overlap) and 0 <= overlap <= 1):
        raise ConfigurationError(f"{metric}: suppression must be a number between 0 and 1, not {overlap!r}")


def coco_map(
    iou: str | float = EVERY,
    *,
    area: str = "all",
    detections: int = 100,
    candidates: int = 1000,
    suppression: float | None = None,
) -> CocoAveragePrecision:
    """Return COCO's mean average precision; see ``CocoAveragePrecision``."""
    return CocoAveragePrecision(iou, area, detections, candidates, suppression)


def voc_map(
    iou: float = 0.5, *, points: int = 0, candidates: int = 1000, suppression: float | None = None
) -> VocAveragePrecision:
    """Return PASCAL VOC's mean average precision; see ``VocAveragePrecision``."""
    return VocAveragePrecision(iou, points, candidates, suppression)

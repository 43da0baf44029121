"""Mean average precision of detectors over whole data sets, from rows of detections and objects."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import Compared, Detections
from burnish.metrics.base import MetricBase, widened
from burnish.validation import is_number, is_whole, require

FOUND, THERE, PICTURE = "found", "there", "picture"
IOU_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
RECALLS = np.linspace(0, 1, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
"""Bounds of areas in pixels, both inclusive, by COCO's names."""
EVERY = "0.5:0.95"
NOWHERE = 2.0
"""An overlap that no two boxes reach, which turns suppression off."""


@dataclass(frozen=True)
class AveragePrecision(MetricBase):
    """A metric of detections, computed on the host from all rows of a data set.

    Its totals are rows, one or more per picture: ``found [N, K, 6]`` (score, class, box), ``there [N, M, 7]`` (class, box, 1 for
    an object that does not count, area) and ``picture [N, 1, 3]`` (height, width, suppression overlap). A training step reports
    no figure.
    """

    higher_is_better: ClassVar[bool] = True
    is_of_rows: ClassVar[bool] = True

    def totals(self, compared: Compared) -> dict[str, Tensor]:
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
        """The number of boxes per picture, the likeliest, that are kept."""

    @property
    @abstractmethod
    def overlap(self) -> float | None:
        """The overlap above which the less likely of two boxes of a class is dropped; None uses the loss's."""

    def check(self, detections: Detections) -> None:
        """Raise ConfigurationError if the loss lacks an input of the metric."""

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        """Raise an error: no graph computes this figure.

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
        """Return the figure of all rows; NaN if there is no object."""
        return self.of_pictures(pictures_of(totals))

    @abstractmethod
    def of_pictures(self, pictures: Sequence[Picture]) -> float:
        """Return the figure of pictures."""


@dataclass(frozen=True)
class CocoAveragePrecision(AveragePrecision):
    """COCO's mean average precision, as pycocotools computes it; see ``coco_average_precision``.

    Attributes:
        iou: ``0.5:0.95``, the mean over ten overlap thresholds; or one threshold.
        area: ``all``, or only ``small``, ``medium`` or ``large`` objects; these need the areas from a loss with ``crowd=true``.
        detections: largest number of boxes per picture and class.
        candidates: largest number of boxes per picture before suppression.
        suppression: overlap above which the less likely of two boxes of a class is dropped; None uses the loss's, 1 drops none.
    """

    word: ClassVar[str] = "coco_map"

    iou: str | float = EVERY
    _: KW_ONLY
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
        iou: overlap threshold.
        points: 0 for the area under the curve (VOC 2010 and later), or 11 (VOC 2007).
        candidates, suppression: as in ``CocoAveragePrecision``.
    """

    word: ClassVar[str] = "voc_map"

    iou: float = 0.5
    _: KW_ONLY
    points: int = 0
    candidates: int = 1000
    suppression: float | None = None

    def __post_init__(self) -> None:
        require(is_number(self.iou) and 0 < self.iou <= 1, self.word, "iou", self.iou, "a number above 0 up to 1")
        require(self.points in (0, 11), self.word, "points", self.points, "0 (the area under the curve) or 11")
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
    """Return the pictures in rows, without suppressed boxes and empty places."""
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


@dataclass(frozen=True)
class Picture:
    """The detections and the objects of a picture.

    Attributes:
        scores: float64 ``[D]``.
        classes: int64 ``[D]``.
        boxes: float64 ``[D, 4]``.
        labels: classes of the objects, int64 ``[M]``.
        objects: boxes of the objects, float64 ``[M, 4]``.
        crowd: True for an object that does not count, bool ``[M]``.
        areas: areas of the objects in pixels, float64 ``[M]``; 0 if unknown.
        size: height and width in pixels, to convert boxes from fractions to pixels.
    """

    scores: np.ndarray
    classes: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    objects: np.ndarray
    crowd: np.ndarray
    areas: np.ndarray
    size: tuple[float, float]


def overlaps(boxes: np.ndarray, others: np.ndarray, crowd: np.ndarray | None = None) -> np.ndarray:
    """Return the intersection over union of each pair of boxes, ``[D, M]``; for a crowd region, intersection over the box."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=2)
    own = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)[:, None]
    union = own + np.prod(others[:, 2:] - others[:, :2], axis=1)[None] - shared
    if crowd is not None:
        union = np.where(crowd[None], own, union)
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def suppressed(scores: np.ndarray, classes: np.ndarray, boxes: np.ndarray, threshold: float) -> np.ndarray:
    """Return the indices of the boxes that stay, the likeliest first (non-maximum suppression, class by class).

    A box is dropped if it overlaps a likelier remaining box of its class by more than ``threshold``.
    """
    order = np.argsort(-scores, kind="mergesort")
    stays = np.ones(len(order), bool)
    for index in np.unique(classes):
        own = np.flatnonzero(classes[order] == index)
        covers = overlaps(boxes[order[own]], boxes[order[own]]) > threshold
        alive = np.ones(len(own), bool)
        for place in range(len(own)):
            if alive[place]:
                alive[place + 1 :] &= ~covers[place, place + 1 :]
        stays[own] = alive
    return order[stays]


def coco_average_precision(
    pictures: Sequence[Picture],
    thresholds: Sequence[float] = IOU_THRESHOLDS,
    area: str = "all",
    most: int = 100,
) -> float:
    """Return COCO's average precision, the mean over thresholds and present classes; NaN without any class.

    The protocol is that of pycocotools. The ``most`` likeliest boxes of each picture and class count, and each is matched with
    the free object that it overlaps most. Crowd regions, and objects outside the range of areas, are neither hits nor misses.
    Precision is the largest at the same or a higher recall, sampled at 101 recalls.

    Args:
        pictures: the pictures of the data set.
        thresholds: overlap thresholds.
        area: a name of ``AREAS``.
        most: largest number of boxes.
    """
    limits = np.minimum(np.asarray(thresholds, np.float64), 1 - 1e-10)

    def match(picture: Picture, index: int) -> tuple[np.ndarray, ...]:
        return _coco_matches(picture, index, limits, AREAS[area], most)

    means = []
    for index in _classes(pictures):
        hits, ignored, count = _gathered(pictures, index, match, len(limits))
        if not count:
            continue
        for place in range(len(limits)):
            counted = ~ignored[place]
            means.append(_mean_at_recalls(hits[place][counted], count, RECALLS))
    return float(np.mean(means)) if means else math.nan


def voc_average_precision(pictures: Sequence[Picture], threshold: float = 0.5, points: int = 0) -> float:
    """Return VOC's mean average precision over the classes that are present; NaN without any.

    Each box is matched with the object that it overlaps most. It is a hit if the overlap reaches ``threshold`` and no likelier
    box was matched with that object. Difficult objects are neither hits nor misses.

    Args:
        pictures: the pictures of the data set, with difficult objects marked as ``crowd``.
        threshold: overlap threshold.
        points: 0 for the area under the non-increasing precision-recall curve (VOC 2010 and later); 11 for the mean at recalls 0,
            0.1, ... (VOC 2007).
    """

    def match(picture: Picture, index: int) -> tuple[np.ndarray, ...]:
        return _voc_matches(picture, index, threshold)

    means = []
    for index in _classes(pictures):
        hits, ignored, count = _gathered(pictures, index, match, 1)
        if not count:
            continue
        own = hits[0][~ignored[0]]
        means.append(_mean_at_recalls(own, count, np.linspace(0, 1, points)) if points else _area_under(own, count))
    return float(np.mean(means)) if means else math.nan


def _classes(pictures: Sequence[Picture]) -> list[int]:
    return sorted({int(label) for picture in pictures for label in picture.labels})


def _gathered(
    pictures: Sequence[Picture], index: int, match: Callable[[Picture, int], tuple[np.ndarray, ...]], rows: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return hit and ignore masks of all boxes of a class, the likeliest first, and the number of objects."""
    parts = [match(picture, index) for picture in pictures]
    scores = np.concatenate([part[0] for part in parts])
    order = np.argsort(-scores, kind="mergesort")
    hits = np.concatenate([part[1].reshape(rows, -1) for part in parts], axis=1)
    ignored = np.concatenate([part[2].reshape(rows, -1) for part in parts], axis=1)
    return hits[:, order], ignored[:, order], sum(int(part[3]) for part in parts)


def _of_class(picture: Picture, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores and boxes of a class, the likeliest first, and the indices of its objects."""
    own = np.flatnonzero(picture.classes == index)
    own = own[np.argsort(-picture.scores[own], kind="mergesort")]
    return picture.scores[own], picture.boxes[own], np.flatnonzero(picture.labels == index)


def _coco_matches(
    picture: Picture, index: int, limits: np.ndarray, bounds: tuple[float, float], most: int
) -> tuple[np.ndarray, ...]:
    scores, boxes, places = _of_class(picture, index)
    scores, boxes = scores[:most], boxes[:most]
    crowd, areas = picture.crowd[places], picture.areas[places]
    outside = crowd | (areas < bounds[0]) | (areas > bounds[1])
    # Objects that count come first, so that they win ties of the overlap.
    places = places[np.argsort(outside, kind="mergesort")]
    crowd, outside = picture.crowd[places], np.sort(outside, kind="mergesort")
    pairs = overlaps(boxes, picture.objects[places], crowd)
    hits, ignored = (np.zeros((len(limits), len(boxes)), bool) for _ in range(2))
    taken = np.zeros((len(limits), len(places)), bool)
    height, width = picture.size
    sizes = (boxes[:, 2] - boxes[:, 0]) * width * (boxes[:, 3] - boxes[:, 1]) * height
    too_small_or_large = (sizes < bounds[0]) | (sizes > bounds[1])
    ignored[:] = too_small_or_large
    overlapping = (pairs >= limits.min()).any(axis=1) if len(places) else np.zeros(len(boxes), bool)
    for box in np.flatnonzero(overlapping):
        free = (~taken | crowd) & (pairs[box] >= limits[:, None])
        counted = free & ~outside
        best = _last_largest(pairs[box], np.where(counted.any(axis=1, keepdims=True), counted, free))
        found = best >= 0
        rows = np.flatnonzero(found)
        taken[rows, best[rows]] = True
        hits[:, box] = found
        ignored[rows, box] = outside[best[rows]]
    return scores, hits, ignored, np.asarray((~outside).sum())


def _last_largest(overlap: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Return the index of the largest allowed overlap of each row, the last of equal ones; -1 if none is allowed."""
    if not allowed.shape[1]:
        return np.full(len(allowed), -1)
    values = np.where(allowed, overlap, -1.0)[:, ::-1]
    best = allowed.shape[1] - 1 - values.argmax(axis=1)
    return np.where(allowed.any(axis=1), best, -1)


def _voc_matches(picture: Picture, index: int, threshold: float) -> tuple[np.ndarray, ...]:
    scores, boxes, places = _of_class(picture, index)
    difficult = picture.crowd[places]
    pairs = overlaps(boxes, picture.objects[places])
    hits, ignored = (np.zeros((1, len(boxes)), bool) for _ in range(2))
    taken = np.zeros(len(places), bool)
    for box in range(len(boxes)):
        if not len(places):
            break
        best = int(pairs[box].argmax())
        if pairs[box, best] < threshold:
            continue
        if difficult[best]:
            ignored[0, box] = True
        elif not taken[best]:
            hits[0, box] = taken[best] = True
    return scores, hits, ignored, np.asarray((~difficult).sum())


def _precision(hits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return recall, and the largest precision at the same or a higher recall, after each box."""
    right = np.cumsum(hits)
    precision = right / np.arange(1, len(hits) + 1)
    return right / count, np.maximum.accumulate(precision[::-1])[::-1]


def _mean_at_recalls(hits: np.ndarray, count: int, recalls: np.ndarray) -> float:
    recall, precision = _precision(hits, count)
    places = np.searchsorted(recall, recalls, side="left")
    return float(np.append(precision, 0.0)[np.minimum(places, len(precision))].mean())


def _area_under(hits: np.ndarray, count: int) -> float:
    recall, precision = _precision(hits, count)
    return float((np.diff(recall, prepend=0.0) * precision).sum())


coco_map = CocoAveragePrecision
voc_map = VocAveragePrecision

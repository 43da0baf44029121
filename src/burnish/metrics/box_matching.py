"""Average precision of boxes, by the protocols of COCO and of PASCAL VOC: from what was found and what is there to one figure.

Everything here is NumPy on the host: precision depends on the order of all boxes of a data set, which no fixed number of totals
holds. Boxes are two corners ``[left, top, right, bottom]`` in any unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

IOU_THRESHOLDS = tuple(0.5 + 0.05 * step for step in range(10))
RECALLS = np.linspace(0, 1, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
"""Bounds of areas in pixels, both included, by COCO's names."""


@dataclass(frozen=True)
class Picture:
    """What was found in a picture, and what is there.

    Attributes:
        scores: float64 ``[D]``.
        classes: int64 ``[D]``.
        boxes: float64 ``[D, 4]``.
        labels: classes of the objects, int64 ``[M]``.
        objects: float64 ``[M, 4]``.
        crowd: whether an object does not count, bool ``[M]``.
        areas: of the objects in pixels, float64 ``[M]``; 0 where they are not known.
        size: height and width in pixels, by which boxes that are fractions become pixels.
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
    """Return intersection over union of each box with each other, ``[D, M]``; of a region of many over the box alone."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    shared = np.prod(np.clip(high - low, 0, None), axis=2)
    own = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)[:, None]
    union = own + np.prod(others[:, 2:] - others[:, :2], axis=1)[None] - shared
    if crowd is not None:
        union = np.where(crowd[None], own, union)
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def suppressed(scores: np.ndarray, classes: np.ndarray, boxes: np.ndarray, threshold: float) -> np.ndarray:
    """Return the places of the boxes that stay, the likeliest first (non-maximum suppression, class by class).

    A box goes where it overlaps a likelier one of its class, which stays, by more than ``threshold``.
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
    """Return COCO's average precision: the mean over thresholds of overlap and classes that are there; NaN without any.

    The protocol of pycocotools: of each picture and class the ``most`` likeliest boxes count; each takes the object that it
    overlaps most among those that are free; regions of many, and objects outside of the range of areas, are neither hits nor
    misses; precision is the largest at that recall or above, at 101 recalls.

    Args:
        pictures: of the data set.
        thresholds: of overlap.
        area: a name of ``AREAS``.
        most: how many boxes.
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
    """Return VOC's mean average precision over the classes that are there; NaN without any.

    Each box takes the object that it overlaps most; it is a hit where the overlap reaches ``threshold``, and no likelier box took
    the object. Objects that are difficult are neither hits nor misses.

    Args:
        pictures: of the data set; ``crowd`` are the difficult ones.
        threshold: of overlap.
        points: 0 for the area under the curve of precision that does not rise with recall (VOC 2010 and later); 11 for the mean
            at recalls 0, 0.1, ... (VOC 2007).
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
    """Return hits and what is ignored of all boxes of a class, the likeliest first, and the number of objects."""
    parts = [match(picture, index) for picture in pictures]
    scores = np.concatenate([part[0] for part in parts])
    order = np.argsort(-scores, kind="mergesort")
    hits = np.concatenate([part[1].reshape(rows, -1) for part in parts], axis=1)
    ignored = np.concatenate([part[2].reshape(rows, -1) for part in parts], axis=1)
    return hits[:, order], ignored[:, order], sum(int(part[3]) for part in parts)


def _of_class(picture: Picture, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores and boxes of a class, the likeliest first, and the places of its objects."""
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
    # Objects that count come first, so that of two that are overlapped alike the one that counts is taken.
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
    """Return, for each row of ``allowed``, the place of the largest overlap, of equal ones the last; -1 where there is none."""
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
    """Return recall and the largest precision at that recall or above, after each box."""
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

"""The judgement of a detector: which objects it finds, what it takes for which, and the pictures it gets most wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from burnish.data import Dataset
from burnish.data.image.labelled import DecodedImages
from burnish.errors import BurnishError
from burnish.metrics.average_precision import Picture, overlaps
from burnish.training.detections import pictures_in
from burnish.training.html_report.contents import Example, Judgement
from burnish.training.html_report.pictures import class_colours, drawn_on, joined, pixels_of
from burnish.training.trained_model import TrainedModel

ENOUGH = 0.5
"""The overlap from which a box stands for an object."""
MOST_BOXES = 100
"""Of a picture, the likeliest: as many as COCO's precision looks at of a class."""
MOST_NAMES = 1000
"""Beyond so many classes no matrix is kept."""
NOTHING = "nothing"
"""What stands in the matrix for objects that no box finds, and for boxes of no object."""
UNSAID = 0.5
"""The score above which boxes are judged, where no box is right at any."""


class _Pairs(NamedTuple):
    """Which boxes and objects of a picture belong to each other.

    Attributes:
        boxes, objects: the places of both, int64 ``[pairs]``.
        spare: boxes that stand for no object, int64; what lies in a region of many is none of them.
        missed: objects that no box stands for, int64.
    """

    boxes: np.ndarray
    objects: np.ndarray
    spare: np.ndarray
    missed: np.ndarray


def judge_boxes(model: TrainedModel, dataset: Dataset, batch_size: int, worst: int) -> Judgement:
    """Return what a detector says of all pictures of a data set.

    Boxes are judged above one score for all pictures: that at which the harmonic mean of precision and recall is largest.

    Args:
        model: with a metric of average precision.
        dataset: with objects, as the model's loss takes them.
        batch_size: pictures at once.
        worst: how many examples are kept.
    """
    pictures: list[Picture] = []
    try:
        for begin in range(0, len(dataset), batch_size):
            batch = dataset.batch(np.arange(begin, min(begin + batch_size, len(dataset))))
            pictures += [_likeliest(picture) for picture in pictures_in(model, batch)]
    except BurnishError as error:
        return Judgement(0, (), None, (), str(error))
    threshold = best_threshold(pictures)
    shown = [_above(picture, threshold) for picture in pictures]
    pairs = [matched(picture) for picture in shown]
    names = _names(model, pictures)
    wrong = np.array([_wrong(picture, own) for picture, own in zip(shown, pairs, strict=True)])
    order = [int(place) for place in np.argsort(-wrong, kind="stable")[:worst] if wrong[place]]
    examples = tuple(_example(model, dataset, place, shown[place], pairs[place], names, int(wrong[place])) for place in order)
    matrix = _matrix(shown, pairs, len(names)) if len(names) <= MOST_NAMES else None
    return Judgement(len(dataset), names, matrix, examples, of_boxes=threshold)


def _matrix(pictures: Sequence[Picture], pairs: Sequence[_Pairs], count: int) -> np.ndarray:
    """How many objects are taken for which class, the last of ``count`` being nothing."""
    matrix = np.zeros((count, count), np.int64)
    for picture, own in zip(pictures, pairs, strict=True):
        np.add.at(matrix, (picture.labels[own.objects], picture.classes[own.boxes]), 1)
        np.add.at(matrix, (picture.labels[own.missed], count - 1), 1)
        np.add.at(matrix, (count - 1, picture.classes[own.spare]), 1)
    return matrix


def best_threshold(pictures: Sequence[Picture]) -> float:
    """Return the score above which boxes have the largest F1 over all pictures; ``UNSAID`` where none of them is right.

    A box is right where it overlaps an object of its class by half, for which no likelier box stands.
    """
    scores, hits, objects = [np.zeros(0)], [np.zeros(0, bool)], 0
    for picture in pictures:
        order = np.argsort(-picture.scores, kind="stable")
        places = np.flatnonzero(~picture.crowd)
        shared = overlaps(picture.boxes[order], picture.objects[places])
        shared = np.where(picture.classes[order][:, None] == picture.labels[places][None], shared, 0.0)
        right = np.zeros(len(order), bool)
        for box in range(len(order) if len(places) else 0):
            best = int(shared[box].argmax())
            if shared[box, best] >= ENOUGH:
                right[box], shared[:, best] = True, 0.0
        scores.append(picture.scores[order])
        hits.append(right)
        objects += len(places)
    joined_scores, joined_hits = np.concatenate(scores), np.concatenate(hits)
    order = np.argsort(-joined_scores, kind="stable")
    right = np.cumsum(joined_hits[order])
    if not right.size or not right[-1]:
        return UNSAID
    f1 = 2 * right / (np.arange(1, len(right) + 1) + objects)
    # Boxes of one score are judged together.
    sorted_scores = joined_scores[order]
    is_last = np.append(sorted_scores[1:] != sorted_scores[:-1], True)
    return float(sorted_scores[np.where(is_last, f1, -1.0).argmax()])


def matched(picture: Picture) -> _Pairs:
    """Return which boxes stand for which objects, those that overlap most first, by half at least.

    Boxes of an object's own class go before those of others.
    """
    places = np.flatnonzero(~picture.crowd)
    shared = overlaps(picture.boxes, picture.objects[places])
    is_same = picture.classes[:, None] == picture.labels[places][None]
    boxes, objects = [], []
    for allowed in (is_same, ~is_same):
        remaining = np.where(allowed, shared, 0.0)
        while remaining.size and remaining.max() >= ENOUGH:
            box, place = np.unravel_index(int(remaining.argmax()), remaining.shape)
            boxes.append(int(box))
            objects.append(int(places[place]))
            for each in (remaining, shared):
                each[box], each[:, place] = 0.0, 0.0
    regions = picture.objects[picture.crowd]
    in_region = (overlaps(picture.boxes, regions, np.ones(len(regions), bool)) >= ENOUGH).any(axis=1)
    spare, missed = np.setdiff1d(np.flatnonzero(~in_region), boxes), np.setdiff1d(places, objects)
    return _Pairs(*(np.asarray(part, np.int64) for part in (boxes, objects, spare, missed)))


def _likeliest(picture: Picture) -> Picture:
    order = np.argsort(-picture.scores, kind="stable")[:MOST_BOXES]
    return _chosen(picture, order)


def _above(picture: Picture, threshold: float) -> Picture:
    return _chosen(picture, np.flatnonzero(picture.scores >= threshold))


def _chosen(picture: Picture, boxes: np.ndarray) -> Picture:
    return replace(picture, scores=picture.scores[boxes], classes=picture.classes[boxes], boxes=picture.boxes[boxes])


def _names(model: TrainedModel, pictures: Sequence[Picture]) -> tuple[str, ...]:
    """What the classes are called, and nothing: by their numbers, where the model does not say."""
    known = model.described.classes
    count = 1 + max((int(max(one.labels.max(initial=-1), one.classes.max(initial=-1))) for one in pictures), default=-1)
    named = known if known is not None and len(known) >= count else tuple(map(str, range(count)))
    return (*named, NOTHING)


def _wrong(picture: Picture, pairs: _Pairs) -> int:
    """How many objects are missed or taken for others, and how many boxes stand for none."""
    mixed_up = picture.labels[pairs.objects] != picture.classes[pairs.boxes]
    return len(pairs.spare) + len(pairs.missed) + int(mixed_up.sum())


def _example(
    model: TrainedModel, dataset: Dataset, place: int, picture: Picture, pairs: _Pairs, names: Sequence[str], wrong: int
) -> Example:
    sample = np.asarray(dataset.batch(np.array([place]))[model.to_predict.data[0].name][0])
    pixels = pixels_of(sample, model.described.preprocessing)
    is_right = picture.labels[pairs.objects] == picture.classes[pairs.boxes]
    counts = ~picture.crowd
    right_objects, right_boxes = pairs.objects[is_right], pairs.boxes[is_right]
    if pixels is not None:
        colours = class_colours(len(names))[1:]  # the first is that of a background
        sides = [
            (picture.objects[counts], picture.labels[counts], np.isin(np.flatnonzero(counts), right_objects)),
            (picture.boxes, picture.classes, np.isin(np.arange(len(picture.boxes)), right_boxes)),
        ]
        pixels = joined([drawn_on(pixels, boxes, colours[classes], right) for boxes, classes, right in sides])
    name = dataset.name_of(place) if isinstance(dataset, DecodedImages) else ""
    truth = _counted(picture.labels[counts], names)
    return Example(place, truth, _counted(picture.classes, names), None, float(wrong), pixels, "", name)


def _counted(classes: np.ndarray, names: Sequence[str]) -> str:
    """How many there are of each class, in words."""
    counts = np.bincount(classes, minlength=len(names))
    return ", ".join(f"{count} {names[index]}" for index, count in enumerate(counts.tolist()) if count) or NOTHING

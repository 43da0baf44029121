"""The evaluation of a model on a data set: the confusion matrix, and the samples with the largest errors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from burnish.data import Dataset, Loader, TextDataset
from burnish.data.batches import BatchLoader
from burnish.data.image.labelled import DecodedImages
from burnish.errors import BurnishError
from burnish.metrics.average_precision import Picture, overlaps
from burnish.training.feature_dataset import FeatureDataset
from burnish.training.html_report.contents import Example, Judgement
from burnish.training.html_report.pictures import class_colours, drawn_on, joined, pixels_of, side_by_side
from burnish.training.predictions import Answer, class_names, is_detector, pictures_in, read_answer
from burnish.training.trained_model import TrainedModel

MOST_CLASSES = 1000
"""Most classes for a matrix."""
LONGEST_TEXT = 240
"""Most characters of a text shown."""
SMALLEST = 1e-12
EVEN_ODDS = 0.5
"""The probability above which a label is a yes."""


class _Part:
    def __init__(self, dataset: Dataset, start: int, stop: int):
        self._dataset, self._start, self._count = dataset, start, stop - start

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return dict(self._dataset.batch(indices + self._start))


def judged_samples(loader: Loader) -> Dataset | None:
    """Return the samples of a loader as the model reads them; None for an iterable of batches, which has no fixed order."""
    if isinstance(loader, BatchLoader):
        return None
    return loader.dataset.source if isinstance(loader.dataset, FeatureDataset) else loader.dataset


def judge(model: TrainedModel, dataset: Dataset | None, batch_size: int = 32, worst: int = 12) -> Judgement:
    """Return the evaluation of a model on all samples of a data set.

    Args:
        model: model in inference mode.
        dataset: data with labels, as in ``model.to_evaluate``; None gives an empty result.
        batch_size: samples at once, which bounds the memory.
        worst: number of examples to keep.
    """
    if dataset is None:
        return Judgement(0, (), None, (), "the data come as batches, in which no sample has a place of its own")
    if is_detector(model):
        return judge_boxes(model, dataset, batch_size, worst)
    try:
        answer, label = read_answer(model), model.to_evaluate.label
    except BurnishError as error:
        return Judgement(0, (), None, (), str(error))
    asks_of_pixels = label is not None and answer.kind == "questions" and len(label.extents) == 4 and label.extents[1] == 1
    if label is None:
        return Judgement(0, (), None, (), "the data have no labels")
    kept = _Worst(model, worst)
    confusion: np.ndarray | None = None
    for start in range(0, len(dataset), batch_size):
        part = _Part(dataset, start, min(start + batch_size, len(dataset)))
        batch = part.batch(np.arange(len(part)))
        labels = batch[label.name]
        outputs = model.predict(part, batch_size)[answer.output]
        if asks_of_pixels:
            outputs, labels = _no_and_yes(outputs, answer.least_yes), labels[:, 0].astype(np.int64)
        if answer.kind != "values" and _is_of_pixels(outputs, labels):
            if outputs.shape[2:] != labels.shape[1:]:
                missing = f"the output '{answer.output}' is of another size than the masks: its figures are those of the metrics"
                return Judgement(0, (), None, (), missing)
            confusion = kept.add_masks(start, batch, labels, outputs, confusion)
            continue
        try:
            numbers = answer.numbers(outputs)
        except BurnishError:
            missing = f"the output '{answer.output}' gives each sample more than one row, for which no matrix has a place"
            return Judgement(0, (), None, (), missing)
        if len(numbers) != len(part) or labels.shape[1:] not in ((), (1,), numbers.shape[1:]):
            return Judgement(0, (), None, (), f"the labels '{label.name}' have more than one entry for each sample")
        if answer.kind == "questions":
            if labels.size != numbers.size:
                return Judgement(0, (), None, (), f"the labels '{label.name}' are not as many as the questions of each sample")
            kept.add_questions(start, batch, labels.reshape(len(part), -1), numbers)
            continue
        if answer.kind == "values":
            kept.add_values(start, batch, labels.reshape(len(part), -1), numbers)
            continue
        if labels.dtype.kind not in "iu" or labels.size != len(part) or numbers.shape[1] < 2:
            return Judgement(0, (), None, (), f"the labels '{label.name}' are no indices of classes")
        confusion = _added(confusion, labels.reshape(-1), numbers)
        kept.add_classes(start, batch, labels.reshape(-1), numbers, answer)
    is_large = confusion is not None and len(confusion) > MOST_CLASSES
    examples = kept.examples()
    if isinstance(dataset, DecodedImages):
        examples = tuple(replace(example, name=dataset.name_of(example.index)) for example in examples)
    if isinstance(dataset, TextDataset):
        examples = tuple(replace(each, values=_words(dataset.words(each.index), each.values)) for each in examples)
    return Judgement(len(dataset), kept.names, None if is_large else confusion, examples, of_pixels=kept.of_pixels)


def _words(text: str | None, otherwise: str) -> str:
    """A text, shortened if long; ``otherwise`` if there is none."""
    if not text:
        return otherwise
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT].rstrip()}…"


def _added(confusion: np.ndarray | None, labels: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    count = numbers.shape[1]
    if count > MOST_CLASSES:
        return np.zeros((count, 1), np.int64)
    total = np.zeros((count, count), np.int64) if confusion is None else confusion
    counts = (labels >= 0) & (labels < count)  # others are ignored by the loss
    np.add.at(total, (labels[counts], numbers.argmax(axis=1)[counts]), 1)
    return total


def _is_of_pixels(outputs: np.ndarray, labels: np.ndarray) -> bool:
    """True for class scores of each pixel, [samples, classes, height, width], with masks of indices as labels."""
    return outputs.ndim == 4 and labels.ndim == 3 and labels.dtype.kind in "iu" and outputs.shape[1] > 1


def _no_and_yes(scores: np.ndarray, least: float) -> np.ndarray:
    """Return scores of the classes no and yes from one score that is a yes above ``least``: [samples, 2, height, width]."""
    return np.concatenate([np.full_like(scores, least), scores], axis=1)


def _compared(said: np.ndarray, right: np.ndarray, classes: int) -> np.ndarray:
    """Return the confusion matrix of pixels: int64, [right class, predicted class].

    Pixels without a right class are left out, as in the loss.
    """
    counts = (right >= 0) & (right < classes)
    pairs = right[counts].astype(np.int64) * classes + said[counts].astype(np.int64)
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def _most_mixed_up(matrix: np.ndarray) -> tuple[int, int, float]:
    """Return the most common wrong pair of classes (right, predicted), and the share of wrong pixels."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    right, said = np.unravel_index(int(wrong.argmax()), wrong.shape)
    return int(right), int(said), float(wrong.sum() / max(matrix.sum(), 1))


class _Worst:
    def __init__(self, model: TrainedModel, count: int):
        self._model, self._count = model, count
        self._heap: list[tuple[float, int, Example]] = []
        self.names: tuple[str, ...] = ()
        self.of_pixels = False

    def add_classes(
        self, start: int, batch: dict[str, np.ndarray], labels: np.ndarray, numbers: np.ndarray, answer: Answer
    ) -> None:
        count = numbers.shape[1]
        self._name(count)
        said = numbers.argmax(axis=1)
        for row, (right, guess) in enumerate(zip(labels.tolist(), said.tolist(), strict=True)):
            if right == guess or not 0 <= right < count:
                continue
            is_probability = answer.kind == "classes"
            own = float(numbers[row, right])
            error = -np.log(max(own, SMALLEST)) if is_probability else float(numbers[row, guess]) - own
            if self._takes(error):
                named = (self.names[right], self.names[guess], own if is_probability else None)
                self._keep(float(error), start + row, *named, self._sample(batch, row))

    def add_masks(
        self, start: int, batch: dict[str, np.ndarray], masks: np.ndarray, outputs: np.ndarray, confusion: np.ndarray | None
    ) -> np.ndarray:
        """Add pictures with a class for each pixel, and return the matrix with their pixels added."""
        count, self.of_pixels = outputs.shape[1], True
        self._name(count)
        said = outputs.argmax(axis=1)
        total = np.zeros((count, count), np.int64) if confusion is None else confusion
        for row, (mask, prediction) in enumerate(zip(masks, said, strict=True)):
            matrix = _compared(prediction, mask, count)
            total = total + matrix
            right, guess, error = _most_mixed_up(matrix)
            if error and self._takes(error):
                picture = pixels_of(self._sample(batch, row), self._model.described.preprocessing)
                pixels = side_by_side(picture, (mask, prediction), count)
                self._push(error, start + row, (self.names[right], self.names[guess], None), pixels, "")
        return total

    def add_values(self, start: int, batch: dict[str, np.ndarray], targets: np.ndarray, numbers: np.ndarray) -> None:
        errors = ((numbers - targets) ** 2).mean(axis=1)
        for row, error in enumerate(errors.tolist()):
            if self._takes(error):
                named = (_numbers(targets[row]), _numbers(numbers[row]), None)
                self._keep(error, start + row, *named, self._sample(batch, row))

    def add_questions(self, start: int, batch: dict[str, np.ndarray], targets: np.ndarray, numbers: np.ndarray) -> None:
        names = class_names(self._model.described.classes, targets.shape[1])
        chances = np.clip(numbers, SMALLEST, 1 - SMALLEST)
        errors = -(targets * np.log(chances) + (1 - targets) * np.log1p(-chances)).mean(axis=1)
        for row, error in enumerate(errors.tolist()):
            right, said = (_yes(names, each[row] > EVEN_ODDS) for each in (targets, numbers))
            if right != said and self._takes(error):
                self._keep(error, start + row, right, said, None, self._sample(batch, row))

    def examples(self) -> tuple[Example, ...]:
        return tuple(example for _, _, example in sorted(self._heap, key=lambda item: (-item[0], -item[1])))

    def _name(self, count: int) -> None:
        self.names = tuple(class_names(self._model.described.classes, count))

    def _takes(self, error: float) -> bool:
        return len(self._heap) < self._count or error > self._heap[0][0]

    def _sample(self, batch: dict[str, np.ndarray], row: int) -> np.ndarray:
        return np.asarray(batch[self._model.to_predict.data[0].name][row])

    def _keep(self, error: float, index: int, truth: str, said: str, probability: float | None, sample: np.ndarray) -> None:
        pixels = pixels_of(sample, self._model.described.preprocessing)
        values = "" if pixels is not None else _numbers(sample.reshape(-1))
        self._push(error, index, (truth, said, probability), pixels, values)

    def _push(
        self, error: float, index: int, answer: tuple[str, str, float | None], pixels: np.ndarray | None, values: str
    ) -> None:
        item = (error, -index, Example(index, *answer, error, pixels, values))
        (heapq.heappush if len(self._heap) < self._count else heapq.heappushpop)(self._heap, item)


def _yes(names: Sequence[str], which: np.ndarray) -> str:
    return ", ".join(name for name, is_yes in zip(names, which.tolist(), strict=True) if is_yes) or "none"


def _numbers(values: Any, most: int = 8) -> str:
    shown = ", ".join(item if isinstance(item, str) else f"{item:.4g}" for item in values[:most].tolist())
    return shown + (f", … ({len(values)} in all)" if len(values) > most else "")


ENOUGH = 0.5
"""The least overlap at which a box matches an object."""
MOST_BOXES = 100
"""Most boxes per picture, by score: as many as COCO's precision uses per class."""
MOST_NAMES = 1000
"""Most classes for a matrix."""
NOTHING = "nothing"
"""The class of missed objects and spare boxes in the matrix."""
UNSAID = 0.5
"""The score threshold if no box is right at any."""


class _Pairs(NamedTuple):
    """The boxes and objects of a picture that match.

    Attributes:
        boxes, objects: indices of both, int64 ``[pairs]``.
        spare: boxes without an object, int64; boxes in crowd regions are left out.
        missed: objects without a box, int64.
    """

    boxes: np.ndarray
    objects: np.ndarray
    spare: np.ndarray
    missed: np.ndarray


def judge_boxes(model: TrainedModel, dataset: Dataset, batch_size: int, worst: int) -> Judgement:
    """Return the evaluation of a detector on all pictures of a data set.

    One score threshold is used for all pictures: the one with the largest harmonic mean of precision and recall.

    Args:
        model: model with a metric of average precision.
        dataset: data with objects, as for the model's loss.
        batch_size: pictures at once.
        worst: number of examples to keep.
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
    """The confusion matrix of objects; the last of ``count`` classes is "nothing"."""
    matrix = np.zeros((count, count), np.int64)
    for picture, own in zip(pictures, pairs, strict=True):
        np.add.at(matrix, (picture.labels[own.objects], picture.classes[own.boxes]), 1)
        np.add.at(matrix, (picture.labels[own.missed], count - 1), 1)
        np.add.at(matrix, (count - 1, picture.classes[own.spare]), 1)
    return matrix


def best_threshold(pictures: Sequence[Picture]) -> float:
    """Return the score threshold with the largest F1 over all pictures; ``UNSAID`` if no box is right.

    A box is right if it overlaps an object of its class by half, and no likelier box matches that object.
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
    # Boxes with equal scores pass the threshold together.
    sorted_scores = joined_scores[order]
    is_last = np.append(sorted_scores[1:] != sorted_scores[:-1], True)
    return float(sorted_scores[np.where(is_last, f1, -1.0).argmax()])


def matched(picture: Picture) -> _Pairs:
    """Return the matches of boxes and objects, largest overlap first, at least one half.

    Boxes of an object's own class take precedence.
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
    known = model.described.classes
    count = 1 + max((int(max(one.labels.max(initial=-1), one.classes.max(initial=-1))) for one in pictures), default=-1)
    named = known if known is not None and len(known) >= count else tuple(map(str, range(count)))
    return (*named, NOTHING)


def _wrong(picture: Picture, pairs: _Pairs) -> int:
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
        colours = class_colours(len(names))[1:]  # the first is the background's
        sides = [
            (picture.objects[counts], picture.labels[counts], np.isin(np.flatnonzero(counts), right_objects)),
            (picture.boxes, picture.classes, np.isin(np.arange(len(picture.boxes)), right_boxes)),
        ]
        pixels = joined([drawn_on(pixels, boxes, colours[classes], right) for boxes, classes, right in sides])
    name = dataset.name_of(place) if isinstance(dataset, DecodedImages) else ""
    truth = _counted(picture.labels[counts], names)
    return Example(place, truth, _counted(picture.classes, names), None, float(wrong), pixels, "", name)


def _counted(classes: np.ndarray, names: Sequence[str]) -> str:
    counts = np.bincount(classes, minlength=len(names))
    return ", ".join(f"{count} {names[index]}" for index, count in enumerate(counts.tolist()) if count) or NOTHING

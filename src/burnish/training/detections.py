"""A detector's predictions for pictures: boxes with their classes and scores, as its loss reads them off the raw outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from burnish import losses, metrics
from burnish.data import Dataset
from burnish.data.image.decoding import resized_sides
from burnish.data.preprocessing import Preprocessing
from burnish.errors import BurnishError, ConfigurationError
from burnish.losses.detection import BOXES, LABELS, PADDING, SIZES, DetectionLoss
from burnish.metrics.average_precision import FOUND, PICTURE, THERE, AveragePrecision, Picture, pictures_of
from burnish.metrics.base import rows_name
from burnish.training.trained_model import TrainedModel


def is_detector(model: TrainedModel) -> bool:
    """Return whether a model was trained on a loss of detectors."""
    return "loss" in model.options and isinstance(losses.get(model.options["loss"]), DetectionLoss)


def precision_of(model: TrainedModel) -> str | None:
    """Return the name of a metric whose rows are boxes; None where the model is evaluated by none."""
    for name in model.options.get("metrics", ()) if "loss" in model.options else ():
        try:
            metric = metrics.get(name)
        except BurnishError:
            continue
        if isinstance(metric, AveragePrecision):
            return metric.name
    return None


def pictures_in(model: TrainedModel, batch: Mapping[str, np.ndarray]) -> list[Picture]:
    """Return what a model finds in the pictures of a batch, the boxes that its metric suppresses left out, and what is there.

    Args:
        model: evaluated by a metric of average precision, in the state that it has.
        batch: of what its loss reads.

    Raises:
        ConfigurationError: no such metric.
    """
    metric = precision_of(model)
    if metric is None:
        raise ConfigurationError(
            f"{model.name} says which boxes it finds by a metric of average precision, and it was trained with none: train "
            "with metrics=('coco_map',) (--metrics coco_map), or read its raw outputs"
        )
    totals = model.totals(batch)
    return pictures_of({part: totals[rows_name(metric, part)] for part in (FOUND, THERE, PICTURE)})


def found_in(model: TrainedModel, dataset: Dataset, batch_size: int = 32) -> Iterator[Picture]:
    """Give what a model finds in each picture of a data set without labels, as ``pictures_in`` does.

    Args:
        model: as ``pictures_in`` takes it.
        dataset: of what the model itself reads.
        batch_size: pictures at once; of a model of a fixed batch that.
    """
    fixed = model.fixed_batch("evaluate")
    size = batch_size if fixed is None else fixed
    for begin in range(0, len(dataset), size):
        places = np.arange(begin, begin + size)
        count = min(size, len(dataset) - begin)
        # A model of a fixed batch reads the last picture again, and what it finds in it again is left out.
        batch = dict(dataset.batch(np.minimum(places, len(dataset) - 1) if fixed is not None else places[:count]))
        yield from pictures_in(model, batch | _nothing_there(model, len(next(iter(batch.values())))))[:count]


def _nothing_there(model: TrainedModel, count: int) -> dict[str, np.ndarray]:
    """The inputs of a loss for pictures without objects."""
    spec = model.to_evaluate
    arrays = {}
    for entry in (spec.label, *spec.further_labels):
        assert entry is not None
        shape = (count, 2) if entry.name == SIZES else (count, 1, 4) if entry.name == BOXES else (count, 1)
        value = PADDING if entry.name == LABELS else 1 if entry.name == SIZES else 0
        arrays[entry.name] = np.full(shape, value, entry.numpy_dtype)
    return arrays


def in_pixels(boxes: np.ndarray, size: tuple[int, int], preprocessing: Preprocessing) -> np.ndarray:
    """Return boxes in pixels of the picture's file, cut off at its rim.

    Args:
        boxes: left, top, right, bottom as fractions of what the model sees, ``[boxes, 4]``.
        size: width and height of the picture.
        preprocessing: what was done to it.
    """
    width, height = size
    sides, corner = resized_sides(width, height, preprocessing)
    fractions = boxes
    if corner is not None:
        assert preprocessing.size is not None
        fractions = (boxes * [*preprocessing.size[::-1], *preprocessing.size[::-1]] + [*corner, *corner]) / [*sides, *sides]
    return np.clip(fractions, 0.0, 1.0) * [width, height, width, height]


def box_rows(
    names: Sequence[str],
    pictures: Sequence[Picture],
    classes: Sequence[str] | None,
    least: float,
    sizes: Sequence[tuple[int, int]] | None = None,
    preprocessing: Preprocessing | None = None,
) -> list[list[Any]]:
    """Return a row for each box of a score of at least ``least``: name, class, score, left, top, right, bottom.

    Args:
        names: of the pictures.
        pictures: what was found in each.
        classes: their names; numbers where there are none, or fewer.
        least: a score.
        sizes: width and height of each picture's file; None gives fractions of what the model sees.
        preprocessing: what was done to the pictures, with ``sizes``.
    """
    rows: list[list[Any]] = []
    for place, (name, picture) in enumerate(zip(names, pictures, strict=True)):
        boxes = picture.boxes
        if sizes is not None and preprocessing is not None:
            boxes = in_pixels(boxes, sizes[place], preprocessing)
        for index in np.argsort(-picture.scores, kind="stable"):
            if picture.scores[index] < least:
                break
            label = int(picture.classes[index])
            called = classes[label] if classes is not None and label < len(classes) else str(label)
            rows.append([name, called, float(picture.scores[index]), *map(float, boxes[index])])
    return rows

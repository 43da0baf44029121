"""The average precision of what a tuned file itself gives, where it suppresses boxes: by its own thresholds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from burnish import engines
from burnish.data import Dataset
from burnish.data.annotated.objects import ObjectImages
from burnish.engines import Engine
from burnish.graph import attribute_value
from burnish.importer import load
from burnish.losses.detection import BOXES, CROWD, LABELS
from burnish.metrics.average_precision import FOUND, IOU_THRESHOLDS, Picture, coco_average_precision
from burnish.metrics.base import rows_name
from burnish.rewriting.remove_unused import remove_unused
from burnish.training.trained_model import open_model

SUPPRESSION = "NonMaxSuppression"
FRACTIONS_END = 2.0
"""Boxes whose sides stay below it are fractions of the picture, others are pixels."""
CENTRED = 1
PRECISION = "coco_map"
TURNED = [1, 0, 3, 2]
COMPARED = 20
"""Boxes of a picture by which the order of their sides is told."""


def file_precision(path: str | Path, dataset: Dataset, batch_size: int, engine: str | Engine = "auto") -> float | str | None:
    """Return COCO's mean average precision of the boxes that a file's NonMaxSuppression leaves.

    The operator does not say in which order the sides of boxes stand, and takes any: left, top, right, bottom or top, left,
    bottom, right. It is read in the one in which its boxes are those that the loss of the file decodes.

    Args:
        path: the ONNX file, with its objective in its metadata.
        dataset: pictures with objects, as a loss of detectors takes them.
        batch_size: of the evaluation.
        engine: runs the file.

    Returns:
        The figure; why there is none, in words; or None, where the file suppresses nothing.
    """
    model = load(path)
    found = [node for node in model.graph if node.domain == "" and node.op_type == SUPPRESSION]
    if not found or not isinstance(dataset, ObjectImages):
        return None
    if len(found) > 1:
        return f"it has {len(found)} nodes {SUPPRESSION}"
    node = found[0]
    is_centred = attribute_value(node, "center_point_box", 0) == CENTRED
    entry = model.graph.inputs[0]
    run, fixed = _UpToSuppression(model, node, engine), None if entry.shape is None else entry.shape[0]
    decodes, is_turned = open_model(path, metrics=(PRECISION,), engine=engine), None if not is_centred else False
    size = fixed if isinstance(fixed, int) else batch_size
    pictures: list[Picture] = []
    for begin in range(0, len(dataset) - len(dataset) % size if isinstance(fixed, int) else len(dataset), size):
        batch = dataset.batch(np.arange(begin, min(begin + size, len(dataset))))
        boxes, scores, selected = run(batch)
        first = scores.shape[1] - len(dataset.classes)
        if first not in (0, 1):
            return f"its {SUPPRESSION} reads {scores.shape[1]} scores of each box, and there are {len(dataset.classes)} classes"
        corners, images = _corners(boxes, is_centred), batch[entry.name or ""]
        if is_turned is None:
            decoded = decodes.totals(batch)[rows_name(PRECISION, FOUND)][..., 2:]
            straight, turned = (_distance(in_fractions(corners, way, images.shape), decoded) for way in (False, True))
            is_turned = turned < straight
        pictures += _pictures(in_fractions(corners, is_turned, images.shape), scores, selected, first, batch)
    return coco_average_precision(pictures, IOU_THRESHOLDS, "all", 100)


def file_line(path: str | Path, dataset: Dataset, batch_size: int, data: str, engine: str | Engine = "auto") -> str | None:
    """Return a line that says how precise what a file gives is; None where it suppresses nothing.

    Args:
        path, dataset, batch_size, engine: as ``file_precision`` takes them.
        data: which these are, in words.
    """
    figure = file_precision(path, dataset, batch_size, engine)
    if figure is None:
        return None
    if isinstance(figure, str):
        return f"{path}: the precision of the boxes that it leaves is not known: {figure}"
    return f"{path}: coco_map {figure:.4f} of the boxes that its own {SUPPRESSION} leaves ({data} data)"


class _UpToSuppression:
    """Runs a model as far as its suppression."""

    def __init__(self, model: ir.Model, node: ir.Node, engine: str | Engine):
        self._names = [value.name or "" for value in model.graph.inputs]
        values = [*node.inputs[:2], node.outputs[0]]
        self._read = [value.name or "" for value in values if value is not None]
        model.graph.outputs.clear()
        model.graph.outputs.extend(value for value in values if value is not None)
        remove_unused(model)
        self._run = engines.get(engine).load(model)

    def __call__(self, batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        outputs = self._run({name: batch[name] for name in self._names})
        boxes, scores, selected = (outputs[name] for name in self._read)
        return boxes, scores, selected


def _corners(boxes: np.ndarray, is_centred: bool) -> np.ndarray:
    """Boxes as two corners, as the file has them otherwise."""
    sides = boxes.astype(np.float64)
    if not is_centred:
        return sides
    return np.concatenate([sides[..., :2] - sides[..., 2:] / 2, sides[..., :2] + sides[..., 2:] / 2], axis=-1)


def in_fractions(corners: np.ndarray, is_turned: bool, images: Sequence[int]) -> np.ndarray:
    """Return boxes as left, top, right, bottom, in fractions of the picture.

    Args:
        corners: in fractions or in pixels, ``[..., 4]``.
        is_turned: whether they are top, left, bottom, right.
        images: the shape of the model's input, ``[N, C, H, W]`` or ``[N, H, W, C]``.
    """
    sides = corners[..., TURNED] if is_turned else corners
    if np.abs(sides).max(initial=0.0) <= FRACTIONS_END:
        return sides
    height, width = images[2:4] if images[1] in (1, 3) else images[1:3]
    return sides / np.array([width, height, width, height], np.float64)


def _pictures(
    boxes: np.ndarray, scores: np.ndarray, selected: np.ndarray, first: int, batch: Mapping[str, np.ndarray]
) -> Iterator[Picture]:
    for sample in range(len(scores)):
        own = selected[(selected[:, 0] == sample) & (selected[:, 1] >= first)]
        there = batch[LABELS][sample] >= 0
        crowd = batch[CROWD][sample][there] > 0 if CROWD in batch else np.zeros(int(there.sum()), bool)
        yield Picture(
            scores[sample, own[:, 1], own[:, 2]].astype(np.float64),
            (own[:, 1] - first).astype(np.int64),
            boxes[sample, own[:, 2]],
            batch[LABELS][sample][there].astype(np.int64),
            batch[BOXES][sample][there].astype(np.float64),
            crowd,
            np.zeros(int(there.sum())),
            (1.0, 1.0),
        )


def _distance(boxes: np.ndarray, decoded: np.ndarray) -> float:
    """How far the boxes that a loss decodes, the likeliest of ``[N, K, 4]``, are from the nearest of all, ``[N, A, 4]``."""
    likeliest = decoded[:, :COMPARED, None]
    return float(np.abs(likeliest - boxes[:, None]).max(axis=3).min(axis=2).sum())

"""Shared parts of detection losses: the padded objects of each picture, and the positions of predictions in it.

Boxes of objects are two corners, as fractions of a picture's width and height. The matching of predictions with objects is part
of the graph, in operators that every runtime has, and passes no gradient. A program therefore remains a function of its batch,
and a runtime without Python can run it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Compared, Detections, LabelSpec, Loss, LossBase, floating_shape
from burnish.losses.iou import Corners, box_area, corners, intersection_area
from burnish.settings import plain
from burnish.validation import is_number, is_whole, require

PADDING = -1
"""Label of an empty place."""
LABELS, BOXES, CROWD, AREAS, SIZES = "labels", "boxes", "crowd", "areas", "sizes"
MOSTLY = 0.5
"""Share of an anchor that must be in a crowd before it no longer counts as background."""


class Objects(NamedTuple):
    """The objects of a batch.

    Attributes:
        labels: class indices ``[N, M]``, int64; 0 for an empty place.
        boxes: corners, each ``[N, M, 1]``.
        counts: True for an object to find, bool ``[N, M]``.
        crowd: True for a region of many objects, bool ``[N, M]``; None if no input of the loss marks them.
    """

    labels: Tensor
    boxes: Corners
    counts: Tensor
    crowd: Tensor | None


@dataclass(frozen=True, kw_only=True)
class DetectionLoss(LossBase):
    """A loss that reads boxes and scores, and compares them with the objects of each picture.

    The inputs are ``labels [N, M]``, int64, -1 for an empty place, and ``boxes [N, M, 4]``, two corners as fractions of the
    picture: left, top, right, bottom. M may differ from batch to batch and is at least 1.

    Attributes:
        crowd: True for three more inputs: ``crowd [N, M]``, 1 for a box that is a region of many objects or does not count;
            ``areas [N, M]``, of objects in pixels; and ``sizes [N, 2]``, height and width of the pictures. A region is not an
            object to find, and anything inside it is not background.
        outputs: names of the model's outputs, first the boxes, then the scores; None leaves that to ``compile``.
    """

    default_metrics = ("coco_map",)

    crowd: bool = False
    outputs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.outputs is None:
            return
        names = self.outputs if isinstance(self.outputs, str) else plain(tuple(self.outputs))
        are_two = isinstance(names, tuple) and len(names) == 2 and all(isinstance(name, str) for name in names)
        require(are_two, self.name, "outputs", names, "two names of outputs, of the boxes and of the scores")
        object.__setattr__(self, "outputs", names)

    def output(self, position: int) -> str | None:
        """Return the name of an output, or None if no names were given."""
        return None if self.outputs is None else self.outputs[position]

    def object_specs(self, prediction: Tensor, classes: int) -> tuple[LabelSpec, ...]:
        """Return the specs of the inputs, for predictions with the batch as the first axis."""
        batch = floating_shape(self.name, prediction)[0]
        labels = LabelSpec(LABELS, ir.DataType.INT64, (batch, "objects"), 0, classes - 1, PADDING)
        specs = (labels, LabelSpec(BOXES, prediction.dtype, (batch, "objects", 4)))
        if not self.crowd:
            return specs
        return (
            *specs,
            LabelSpec(CROWD, ir.DataType.INT64, (batch, "objects"), 0, 1),
            LabelSpec(AREAS, prediction.dtype, (batch, "objects")),
            LabelSpec(SIZES, prediction.dtype, (batch, 2)),
        )

    def objects(self, inputs: Sequence[Tensor]) -> Objects:
        """Emit the objects that the inputs of a loss describe."""
        labels, boxes = inputs[:2]
        builder = labels.builder
        there = builder.op("GreaterOrEqual", labels, 0)
        crowd = None
        if self.crowd:
            is_crowd = builder.op("Equal", inputs[2], 1)
            crowd = builder.op("And", there, is_crowd)
            there = builder.op("And", there, builder.op("Not", is_crowd))
        index = builder.op("Max", labels, builder.scalar(0, labels), like=labels)
        return Objects(index, corners(boxes), there, crowd)

    def detected(self, boxes: Tensor, scores: Tensor, inputs: Sequence[Tensor], threshold: float | None) -> Compared:
        """Return the input of the detection metrics.

        Args:
            boxes: corners ``[N, A, 4]``, as fractions.
            scores: probabilities ``[N, A, C]``.
            inputs: inputs of the loss.
            threshold: overlap above which the lower-scoring of two boxes of a class is dropped; None keeps all.
        """
        labels, objects, *further = inputs
        crowd, areas, sizes = further or (None, None, None)
        detections = Detections(boxes, scores, labels, objects, crowd, areas, sizes, threshold)
        spec = LabelSpec(BOXES, boxes.dtype, (None, None, 4))
        return Compared(boxes, inputs[1], cast(Loss, self), spec, None, detections)


def check_predictions(
    loss: DetectionLoss,
    predictions: Sequence[Tensor],
    names: Sequence[str],
    places: int | None,
    per_box: int,
    layout: tuple[str, str],
) -> int:
    """Return the number of scores of each box, for predictions ``[N, A, per_box]`` and ``[N, A, scores]``.

    Args:
        loss: the loss, for messages.
        predictions: boxes and scores.
        names: names of the two outputs.
        places: expected number of boxes, or None.
        per_box: numbers per box.
        layout: layout of the scores and an extra remedy, for messages.

    Raises:
        ConfigurationError: the predictions have another shape.
    """
    boxes, scores = (floating_shape(loss.name, prediction) for prediction in predictions)
    wanted = [(boxes[1:], (places, per_box)), (scores[1:], (places, None))]
    fits = all(
        len(extents) == 2
        and all(not isinstance(extent, int) or one in (extent, None) for extent, one in zip(extents, asked, strict=True))
        for extents, asked in wanted
    )
    if not fits or not isinstance(scores[2], int):
        count = "boxes" if places is None else str(places)
        raise ConfigurationError(
            f"{loss.name}: '{names[0]}' has shape {list(boxes)} and '{names[1]}' {list(scores)}: the first must be "
            f"[batch, {count}, {per_box}] and the second [batch, {count}, {layout[0]}]; name them in that order "
            f"(outputs=...){layout[1]}"
        )
    return scores[2]


def places_along(tensor: Tensor, axis: int) -> Tensor:
    """Emit 0, 1, ... along an axis, int64."""
    builder = tensor.builder
    extent = builder.op("Shape", tensor, start=axis, end=axis + 1)
    count = builder.op("Squeeze", extent, builder.integers([0]), shape=())
    zero, one = (builder.scalar(number, ir.DataType.INT64) for number in (0, 1))
    dimension = None if tensor.shape is None else tensor.shape.dims[axis]
    return builder.op("Range", zero, count, one, shape=[dimension])


def of_object(tensor: Tensor, index: Tensor) -> Tensor:
    """Gather the entries of objects ``index [N, A]`` from ``[N, M]`` or ``[N, M, K]``: ``[N, A]`` or ``[N, A, K]``."""
    builder = tensor.builder
    if tensor.rank == 2:
        return builder.op("GatherElements", tensor, index, axis=1)
    column = builder.op("Unsqueeze", index, builder.integers([2]))
    return builder.op("GatherND", tensor, column, batch_dims=1)


def in_crowd(anchors: Corners, objects: Objects) -> Tensor | None:
    """Emit True for anchors (corners ``[..., A, 1]``) with at least half their area in one crowd region: bool ``[N, A]``."""
    if objects.crowd is None:
        return None
    builder = anchors.left.builder
    regions = objects.boxes.unsqueezed(2)
    share = intersection_area(anchors, regions) / (box_area(anchors) + 1e-9)
    share = builder.op("Squeeze", share, builder.integers([3]))
    region = builder.op("Unsqueeze", objects.crowd, builder.integers([2]))
    covered = builder.op("And", builder.op("GreaterOrEqual", share, MOSTLY), region)
    return any_along(covered, 1)


def any_along(condition: Tensor, axis: int) -> Tensor:
    """Emit True if any element along an axis is true; the axis is removed."""
    builder = condition.builder
    number = builder.cast(condition, ir.DataType.INT32)
    return builder.op("Greater", builder.op("ReduceMax", number, builder.integers([axis]), keepdims=0), 0)


Grids = tuple[tuple[int, int], ...]


def check_grids(loss: str, grids: Any) -> Grids:
    """Return height and width of each feature map.

    Raises:
        ConfigurationError: they are not pairs of whole numbers above 0.
    """
    pairs = list(grids) if isinstance(grids, Sequence) and not isinstance(grids, str) else []
    sides = [tuple(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else (pair, pair) for pair in pairs]
    if not sides or not all(len(pair) == 2 and all(is_whole(side) and side > 0 for side in pair) for pair in sides):
        raise ConfigurationError(
            f"{loss}: grids are the height and the width of each feature map, in the order of the predictions, such as "
            f"[[38, 38], [19, 19]], not {grids!r}"
        )
    return tuple((int(height), int(width)) for height, width in sides)


def check_numbers(loss: str, option: str, numbers: Any, count: int) -> tuple[float, ...]:
    """Return ``count`` numbers above 0.

    Raises:
        ConfigurationError: ``numbers`` holds anything else.
    """
    values = tuple(numbers) if isinstance(numbers, Sequence) and not isinstance(numbers, str) else ()
    if len(values) != count or not all(is_number(value) and value > 0 for value in values):
        raise ConfigurationError(f"{loss}: {option} must be {count} numbers above 0, not {numbers!r}")
    return tuple(float(value) for value in values)


def default_boxes(grids: Sequence[Any], scales: Sequence[float], ratios: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the default boxes of SSD (Liu et al. 2016), ``[A, 4]``: centre and size as fractions, float64.

    Each cell of map k has, row by row: a square of ``scales[k]``, one of ``sqrt(scales[k] * scales[k + 1])``, and for each ratio
    a in ``ratios[k]`` a box of ``scale * sqrt(a)`` by ``scale / sqrt(a)`` and its upright twin. Sizes are clipped at 1. This is
    the order of torchvision's ``DefaultBoxGenerator``.

    Args:
        grids: height and width of each map.
        scales: one per map, and one more for the second squares of the last map.
        ratios: the aspect ratios above 1 of each map.
    """
    boxes = []
    for (height, width), scale, following, shapes in zip(grids, scales[:-1], scales[1:], ratios, strict=True):
        sizes = [(scale, scale), (math.sqrt(scale * following),) * 2]
        for ratio in shapes:
            wide = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            sizes += [wide, wide[::-1]]
        y, x = np.meshgrid((np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width, indexing="ij")
        centres = np.stack([x, y], axis=-1).reshape(-1, 1, 2).repeat(len(sizes), axis=1)
        shaped = np.clip(np.asarray(sizes), 0, 1)[None].repeat(height * width, axis=0)
        boxes.append(np.concatenate([centres, shaped], axis=2).reshape(-1, 4))
    return np.concatenate(boxes)


def cell_centres(grids: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the centres and the sizes of all cells, in cells of the first map: ``[A, 2]``, x and y, float64."""
    points, sizes = [], []
    for height, width in grids:
        size = np.asarray([grids[0][1] / width, grids[0][0] / height])
        y, x = np.meshgrid(np.arange(height) + 0.5, np.arange(width) + 0.5, indexing="ij")
        points.append(np.stack([x, y], axis=-1).reshape(-1, 2) * size)
        sizes.append(np.broadcast_to(size, (height * width, 2)))
    return np.concatenate(points), np.concatenate(sizes)

"""The loss of anchor-free YOLO detectors, with the task-aligned assigner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import SIGMOID, Compared, LabelSpec, Reading, Term, sum_of
from burnish.losses.binary_cross_entropy import softplus
from burnish.losses.detection import (
    DetectionLoss,
    Objects,
    any_along,
    cell_centres,
    check_grids,
    check_predictions,
    of_object,
    places_along,
)
from burnish.losses.iou import Corners, corners, overlap
from burnish.operators.elementwise import STOP_GRADIENT
from burnish.validation import check_number, is_whole

LEAST = 1e-9
MOST_BIN = 0.01
"""Distance below the last bin at which targets are clipped, so that they lie between two bins."""


class _Assignment(NamedTuple):
    """The target of each cell.

    Attributes:
        place: index of the assigned object, ``[N, A]``.
        found: True if an object is assigned, bool ``[N, A]``.
        quality: target score of the object's class, ``[N, A]``; 0 without an object.
    """

    place: Tensor
    found: Tensor
    quality: Tensor


@dataclass(frozen=True, kw_only=True)
class TaskAligned(DetectionLoss):
    """The loss of YOLOv8: task-aligned assignment (TOOD, Feng et al. 2021) and distribution focal loss (Li et al. 2020).

    It reads the distances from the centres of A cells to the sides of a box (left, top, right, bottom), in cells: ``[N, A, 4
    bins]``, the logits of each distance over 0 ... bins - 1, or with ``bins=1`` the distances themselves, ``[N, A, 4]``; and the
    logits of C classes, ``[N, A, C]``. Each object is assigned the ``candidates`` cells with the largest ``score^alpha *
    CIoU^beta`` whose centre is inside it; a cell wanted by two objects goes to the one that its box overlaps more. The target
    score of the object's class is ``t = measure / largest measure * largest CIoU`` of the object; every other class of every cell
    has target 0::

        boxes     = box_weight      * sum t (1 - CIoU)              / max(sum t, 1)
        distances = distance_weight * sum t DFL, of the four sides' mean / max(sum t, 1)
        classes   = class_weight    * sum binary cross-entropy      / max(sum t, 1)

    Attributes:
        grids: height and width of each feature map, in the order of the predictions, cells row by row.
        bins: number of bins of a distance.
        candidates: largest number of cells per object.
        alpha, beta: exponents of the measure, 0 or more.
        box_weight, class_weight, distance_weight: 0 or more.
        channels_first: True if the predictions are ``[N, 4 bins, A]`` and ``[N, C, A]``.
        suppression: overlap above which metrics drop the less likely of two boxes of a class.
    """

    name = "task_aligned"

    grids: Sequence[Any]
    bins: int = 16
    candidates: int = 10
    alpha: float = 0.5
    beta: float = 6.0
    box_weight: float = 7.5
    class_weight: float = 0.5
    distance_weight: float = 1.5
    channels_first: bool = False
    suppression: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "grids", check_grids(self.name, tuple(self.grids)))
        for option in ("bins", "candidates"):
            number = getattr(self, option)
            if not is_whole(number) or number < 1:
                raise ConfigurationError(f"{self.name}: {option} must be a whole number above 0, not {number!r}")
        for option in ("alpha", "beta", "box_weight", "class_weight", "distance_weight", "suppression"):
            check_number(self.name, option, getattr(self, option), minimum=0)

    @property
    def readings(self) -> tuple[Reading, ...]:
        return Reading(self.output(0)), Reading(self.output(1), SIGMOID, position=1)

    @property
    def cells(self) -> int:
        return sum(height * width for height, width in self.grids)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        layout = "classes", ", or give the grids and the bins of the model, or channels_first=True"
        names = [prediction.name for prediction in predictions]
        predictions = self._cells_first(predictions)
        classes = check_predictions(self, predictions, names, self.cells, 4 * self.bins, layout)
        return self.object_specs(predictions[0], classes)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit the terms ``boxes``, ``distances`` (if they have bins) and ``classes``."""
        self.label_specs(predictions)
        read, scores = self._cells_first(predictions)
        builder = read.builder
        objects = self._in_cells(self.objects(labels))
        distances = self._distances(read)
        boxes = self._boxes(distances)
        assigned = self._assign(boxes, scores, objects)
        goal = self._goals(objects, assigned)
        weight = builder.op("Max", sum_of(assigned.quality), builder.scalar(1.0, read))
        error = 1.0 - builder.op("Squeeze", overlap(boxes, goal, "ciou"), builder.integers([2]))
        terms = [Term(sum_of(error * assigned.quality), weight, self.box_weight, "boxes")]
        if self.bins > 1:
            spread = self._distribution_loss(read, goal)
            terms.append(Term(sum_of(spread * assigned.quality), weight, self.distance_weight, "distances"))
        label = builder.op("Unsqueeze", of_object(objects.labels, assigned.place), builder.integers([2]))
        is_class = builder.cast(builder.op("Equal", label, places_along(scores, 2)), scores.dtype)
        aim = is_class * builder.op("Unsqueeze", assigned.quality, builder.integers([2]))
        entropy = (1.0 - aim) * scores + softplus(-scores)
        if (counted := self._outside_of_crowds(objects, assigned)) is not None:
            entropy = entropy * counted
        terms.append(Term(sum_of(entropy), weight, self.class_weight, "classes"))
        return tuple(terms)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared:
        read, scores = self._cells_first(predictions)
        builder = read.builder
        boxes = self._boxes(self._distances(read)).joined()
        height, width = self.grids[0]
        fractions = builder.constant(np.asarray([1 / width, 1 / height] * 2, read.dtype.numpy()))
        return self.detected(boxes * fractions, builder.op("Sigmoid", scores), labels, self.suppression)

    def _cells_first(self, predictions: Sequence[Tensor]) -> list[Tensor]:
        if not self.channels_first or any(prediction.rank != 3 for prediction in predictions):
            return list(predictions)
        return [prediction.builder.op("Transpose", prediction, perm=[0, 2, 1]) for prediction in predictions]

    def _geometry(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Emit the centres of the cells and their sizes, in cells of the first map: ``[1, A, 2]``."""
        dtype = like.dtype.numpy()
        centres, sizes = (like.builder.constant(array[None].astype(dtype)) for array in cell_centres(self.grids))
        return centres, sizes

    def _in_cells(self, objects: Objects) -> Objects:
        """Emit the objects in cells of the first map, so that width and height have the same unit."""
        height, width = self.grids[0]
        left, top, right, bottom = objects.boxes
        return objects._replace(boxes=Corners(left * width, top * height, right * width, bottom * height))

    def _distances(self, read: Tensor) -> Tensor:
        """Emit the distances, ``[N, A, 4]``: the means of their distributions."""
        if self.bins == 1:
            return read
        builder = read.builder
        numbers = builder.constant(np.arange(self.bins, dtype=read.dtype.numpy()))
        p = builder.op("Softmax", self._by_bin(read), axis=3)
        return builder.op("ReduceSum", p * numbers, builder.integers([3]), keepdims=0)

    def _by_bin(self, read: Tensor) -> Tensor:
        return read.builder.op("Reshape", read, read.builder.integers([0, 0, 4, self.bins]))

    def _boxes(self, distances: Tensor) -> Corners:
        builder = distances.builder
        centres, sizes = self._geometry(distances)
        before, after = builder.op("Split", distances, builder.integers([2, 2]), axis=2, outputs=2)
        return corners(builder.op("Concat", centres - before * sizes, centres + after * sizes, axis=2))

    def _assign(self, boxes: Corners, scores: Tensor, objects: Objects) -> _Assignment:
        builder = scores.builder
        boxes, scores = Corners(*map(STOP_GRADIENT, boxes)), STOP_GRADIENT(scores)
        own, last = objects.boxes.unsqueezed(2), builder.integers([3])
        points, _ = self._geometry(scores)
        x, y = builder.op(
            "Split", builder.op("Unsqueeze", points, builder.integers([1])), builder.integers([1, 1]), axis=3, outputs=2
        )
        room = builder.op("Min", x - own.left, y - own.top, own.right - x, own.bottom - y)
        counts = builder.op("Unsqueeze", objects.counts, builder.integers([2]))
        inside = builder.op("And", builder.op("Greater", builder.op("Squeeze", room, last), LEAST), counts)
        zero = builder.scalar(0.0, scores)
        pairs = builder.op("Squeeze", overlap(own, boxes.unsqueezed(1), "ciou"), last)
        pairs = builder.op("Where", inside, builder.op("Relu", pairs), zero, like=pairs)
        of_class = builder.op("Transpose", builder.op("Sigmoid", scores), perm=[0, 2, 1])
        likelihood = of_object(of_class, objects.labels)
        measure = builder.op("Where", inside, likelihood**self.alpha * pairs**self.beta, zero, like=pairs)
        wanted = builder.op("And", self._largest(measure), inside)
        several = builder.cast(wanted, ir.DataType.INT32)
        several = builder.op("Greater", builder.op("ReduceSum", several, builder.integers([1]), keepdims=1), 1)
        best = builder.op("ArgMax", pairs, axis=1, keepdims=1)
        is_best = builder.op("Equal", best, builder.op("Unsqueeze", places_along(pairs, 1), builder.integers([1])))
        taken = builder.op("And", builder.op("Or", wanted, several), builder.op("Or", is_best, builder.op("Not", several)))
        mask = builder.cast(taken, pairs.dtype)
        measure, pairs = measure * mask, pairs * mask
        row = builder.integers([2])
        share = measure * builder.op("ReduceMax", pairs, row, keepdims=1)
        share = share / (builder.op("ReduceMax", measure, row, keepdims=1) + LEAST)
        index = builder.op("ArgMax", builder.cast(taken, ir.DataType.INT32), axis=1, keepdims=0)
        quality = builder.op("ReduceMax", share, builder.integers([1]), keepdims=0)
        return _Assignment(index, any_along(taken, 1), quality)

    def _largest(self, measure: Tensor) -> Tensor:
        """Emit True for the cells with the largest measures of each object: bool ``[N, M, A]``."""
        builder = measure.builder
        count = builder.integers([min(self.candidates, self.cells)])
        values, places = builder.op("TopK", measure, count, axis=2, outputs=2)
        # Products with 0 give constants of the dynamic shape.
        zeros = measure * 0.0
        chosen = builder.op("ScatterElements", zeros, places, values * 0.0 + 1.0, axis=2)
        return builder.op("Greater", chosen, 0.0)

    def _goals(self, objects: Objects, assigned: _Assignment) -> Corners:
        """Emit the box of each cell's object; for cells without one, a box around the centre."""
        builder = assigned.quality.builder
        box = of_object(objects.boxes.joined(), assigned.place)
        centres, sizes = self._geometry(assigned.quality)
        any_box = builder.op("Concat", centres - sizes, centres + sizes, axis=2)
        found = builder.op("Unsqueeze", assigned.found, builder.integers([2]))
        return corners(builder.op("Where", found, box, any_box, like=box))

    def _distribution_loss(self, read: Tensor, goal: Corners) -> Tensor:
        """Emit the cross-entropy of the two bins next to each distance, weighted by nearness, averaged over the sides."""
        builder = read.builder
        centres, sizes = self._geometry(read)
        first, second = builder.op("Split", goal.joined(), builder.integers([2, 2]), axis=2, outputs=2)
        aim = builder.op("Concat", (centres - first) / sizes, (second - centres) / sizes, axis=2)
        aim = builder.op("Clip", aim, builder.scalar(0.0, aim), builder.scalar(self.bins - 1 - MOST_BIN, aim))
        distance = builder.op("Abs", builder.op("Unsqueeze", aim, builder.integers([3])) - self._numbers(read))
        share = builder.op("Relu", 1.0 - distance)
        log_p = builder.op("LogSoftmax", self._by_bin(read), axis=3)
        entropy = -builder.op("ReduceSum", share * log_p, builder.integers([3]), keepdims=0)
        return builder.op("ReduceMean", entropy, builder.integers([2]), keepdims=0)

    def _numbers(self, like: Tensor) -> Tensor:
        return like.builder.constant(np.arange(self.bins, dtype=like.dtype.numpy()))

    def _outside_of_crowds(self, objects: Objects, assigned: _Assignment) -> Tensor | None:
        """Emit 0 for unassigned cells with the centre in a crowd region, otherwise 1: ``[N, A, 1]``."""
        if objects.crowd is None:
            return None
        builder = assigned.quality.builder
        points, _ = self._geometry(assigned.quality)
        x, y = builder.op(
            "Split", builder.op("Unsqueeze", points, builder.integers([1])), builder.integers([1, 1]), axis=3, outputs=2
        )
        region = objects.boxes.unsqueezed(2)
        room = builder.op("Min", x - region.left, y - region.top, region.right - x, region.bottom - y)
        inside = builder.op("Greater", builder.op("Squeeze", room, builder.integers([3])), LEAST)
        inside = any_along(builder.op("And", inside, builder.op("Unsqueeze", objects.crowd, builder.integers([2]))), 1)
        counted = builder.op("Or", assigned.found, builder.op("Not", inside))
        return builder.op("Unsqueeze", builder.cast(counted, assigned.quality.dtype), builder.integers([2]))


task_aligned = TaskAligned

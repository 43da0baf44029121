"""The MultiBox loss of SSD: boxes matched by overlap, hard negative mining, and smooth L1 loss of the offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Activation, Compared, LabelSpec, Reading, Term, sum_of
from burnish.losses.detection import (
    DetectionLoss,
    Objects,
    check_grids,
    check_numbers,
    check_predictions,
    default_boxes,
    in_crowd,
    of_object,
    places_along,
)
from burnish.losses.iou import Corners, corners, overlap
from burnish.losses.regression import SmoothL1
from burnish.validation import check_number, require

CLASS_AXIS = 2
BACKGROUND = 0
LEAST_SIZE = 1e-6
"""Smallest size of a box, as a fraction of the picture: the logarithm of 0 is infinite."""


class _Match(NamedTuple):
    """The object that each anchor is matched with, ``[N, A]``; ``place`` is meaningless without ``found``."""

    place: Tensor
    found: Tensor


@dataclass(frozen=True, kw_only=True)
class Ssd(DetectionLoss):
    """MultiBox loss (Liu et al. 2016), as torchvision's ``SSD`` computes it.

    It reads offsets ``[N, A, 4]`` from A default boxes and logits ``[N, A, 1 + C]`` of the background and C classes. An anchor is
    matched with the object that it overlaps most, if the overlap reaches ``threshold``; the anchor that overlaps an object most
    is always matched with it. Offsets are ``(x - x_a) / (w_a * v[0])``, ``log(w / w_a) / v[1]``, and the same for y and the
    height::

        boxes   = sum over matched anchors of smooth_l1(offsets) / matched anchors
        classes = sum over matched anchors, and over the negatives_per_positive hardest others of each picture, of cross-entropy
                                                                 / matched anchors

    Attributes:
        grids: height and width of each feature map.
        scales: sizes of the squares of each map, and one more, as fractions of the picture.
        ratios: aspect ratios above 1 of each map's other boxes.
        anchors: the default boxes themselves, centre and size, ``[A, 4]``, instead of these three.
        threshold: between 0 and 1.
        negatives_per_positive: above 0.
        variances: v, above 0.
        beta: bound of the smooth L1 loss, 0 or more.
        suppression: overlap above which metrics drop the less likely of two boxes of a class.
    """

    name = "ssd"

    grids: Sequence[Any] = ()
    scales: Sequence[float] = ()
    ratios: Sequence[Sequence[float]] = ()
    anchors: Any = ()
    threshold: float = 0.5
    negatives_per_positive: float = 3.0
    variances: Sequence[float] = (0.1, 0.2)
    beta: float = 1.0
    suppression: float = 0.45

    def __post_init__(self) -> None:
        super().__post_init__()
        anchors = self.anchors.tolist() if isinstance(self.anchors, np.ndarray) else self.anchors
        for option in ("grids", "scales", "variances"):
            object.__setattr__(self, option, tuple(getattr(self, option)))
        object.__setattr__(self, "ratios", tuple(map(tuple, self.ratios)))
        object.__setattr__(self, "anchors", tuple(map(tuple, anchors)))
        is_share = 0 <= check_number(self.name, "threshold", self.threshold) <= 1
        require(is_share, self.name, "threshold", self.threshold, "between 0 and 1")
        check_number(self.name, "negatives_per_positive", self.negatives_per_positive, above=0)
        check_number(self.name, "beta", self.beta, minimum=0)
        check_number(self.name, "suppression", self.suppression, minimum=0)
        object.__setattr__(self, "variances", check_numbers(self.name, "variances", self.variances, 2))
        if self.anchors:
            if self.grids or self.scales or self.ratios:
                raise ConfigurationError(
                    f"{self.name}: anchors are the default boxes themselves: leave grids, scales and ratios out"
                )
            boxes = tuple(check_numbers(self.name, "a box of anchors", box, 4) for box in self.anchors)
            object.__setattr__(self, "anchors", boxes)
            return
        object.__setattr__(self, "grids", check_grids(self.name, self.grids))
        object.__setattr__(self, "scales", check_numbers(self.name, "scales", self.scales, len(self.grids) + 1))
        ratios = self.ratios or ((),) * len(self.grids)
        if len(ratios) != len(self.grids):
            raise ConfigurationError(
                f"{self.name}: ratios must be a list for each of the {len(self.grids)} grids, not {ratios!r}"
            )
        checked = tuple(check_numbers(self.name, "the ratios of a grid", one, len(one)) for one in ratios)
        object.__setattr__(self, "ratios", checked)

    @property
    def default_boxes(self) -> np.ndarray:
        """The default boxes, ``[A, 4]``: centre and size as fractions of the picture, float64."""
        return np.asarray(self.anchors) if self.anchors else default_boxes(self.grids, self.scales, self.ratios)

    @property
    def readings(self) -> tuple[Reading, ...]:
        softmax = Activation(("Softmax", "LogSoftmax"), CLASS_AXIS)
        return Reading(self.output(0)), Reading(self.output(1), softmax, position=1)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        layout = "1 + classes", ", or give the grids, scales and ratios of the model"
        scores = check_predictions(self, predictions, [one.name for one in predictions], len(self.default_boxes), 4, layout)
        if scores < 2:
            raise ConfigurationError(
                f"{self.name}: the scores '{predictions[1].name}' are of {scores} class, and the first is the background: "
                "nothing would be found"
            )
        return self.object_specs(predictions[0], scores - 1)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit the terms ``boxes`` and ``classes``."""
        self.label_specs(predictions)
        offsets, scores = predictions
        builder = offsets.builder
        objects, anchors = self.objects(labels), self._anchors(offsets)
        match = self._match(objects, corners(anchors, "cxcywh"))
        positive = builder.cast(match.found, offsets.dtype)
        error = SmoothL1(beta=self.beta).elements(offsets, self._offsets(objects, match, anchors))
        location = builder.op("ReduceSum", error, builder.integers([2]), keepdims=0)
        label = of_object(objects.labels, match.place) + 1
        label = builder.op("Where", match.found, label, builder.scalar(BACKGROUND, label), like=label)
        entropy = self._cross_entropy(scores, label)
        hardest = self._hardest_negatives(entropy, match, in_crowd(corners(anchors, "cxcywh").unsqueezed(0), objects))
        count = sum_of(positive)
        return (
            Term(sum_of(location * positive), count, name="boxes"),
            Term(sum_of(entropy * positive) + hardest, count, name="classes"),
        )

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared:
        offsets, scores = predictions
        builder = offsets.builder
        anchors = self._anchors(offsets)
        centre, size = _halves(anchors)
        shift, growth = _halves(offsets)
        placed = shift * self.variances[0] * size + centre
        grown = builder.op("Exp", growth * self.variances[1]) * size
        boxes = corners(builder.op("Concat", placed, grown, axis=2), "cxcywh").joined()
        probabilities = builder.op("Softmax", scores, axis=CLASS_AXIS)
        # Drop the first class, the background.
        ends = (builder.integers([number]) for number in (1, 2**62, CLASS_AXIS))
        return self.detected(boxes, builder.op("Slice", probabilities, *ends), labels, self.suppression)

    def _anchors(self, offsets: Tensor) -> Tensor:
        return offsets.builder.constant(self.default_boxes[None].astype(offsets.dtype.numpy()))

    def _match(self, objects: Objects, anchors: Corners) -> _Match:
        builder = anchors.left.builder
        pairs = overlap(objects.boxes.unsqueezed(2), anchors.unsqueezed(1))
        pairs = builder.op("Squeeze", pairs, builder.integers([3]))
        counts = builder.op("Unsqueeze", objects.counts, builder.integers([2]))
        pairs = builder.op("Where", counts, pairs, builder.scalar(-1.0, pairs), like=pairs)
        best = builder.op("ReduceMax", pairs, builder.integers([1]), keepdims=0)
        index = builder.op("ArgMax", pairs, axis=1, keepdims=0)
        own = builder.op("ArgMax", pairs, axis=2, keepdims=1)
        is_own = builder.op("And", builder.op("Equal", own, places_along(pairs, 2)), counts)
        number = builder.op("Unsqueeze", places_along(pairs, 1), builder.integers([1]))
        # If two objects share their best anchor, the later one gets it.
        forced = builder.op("Where", is_own, number, builder.scalar(-1, number))
        forced = builder.op("ReduceMax", forced, builder.integers([1]), keepdims=0)
        is_forced = builder.op("GreaterOrEqual", forced, 0)
        reaches = builder.op("GreaterOrEqual", best, self.threshold)
        return _Match(builder.op("Where", is_forced, forced, index, like=index), builder.op("Or", is_forced, reaches))

    def _offsets(self, objects: Objects, match: _Match, anchors: Tensor) -> Tensor:
        """Emit the offsets from the anchors to their objects, ``[N, A, 4]``; 0 for unmatched anchors."""
        builder = anchors.builder
        box = of_object(objects.boxes.joined(), match.place)
        sized = corners(box)
        wide = builder.op("Concat", *sized.center, sized.width, sized.height, axis=2)
        found = builder.op("Unsqueeze", match.found, builder.integers([2]))
        wide = builder.op("Where", found, wide, anchors, like=wide)
        centre, size = _halves(wide)
        own_centre, own_size = _halves(anchors)
        least = builder.scalar(LEAST_SIZE, size)
        grown = builder.op("Log", builder.op("Max", size, least, like=size) / own_size) / self.variances[1]
        return builder.op("Concat", (centre - own_centre) / own_size / self.variances[0], grown, axis=2)

    def _cross_entropy(self, scores: Tensor, label: Tensor) -> Tensor:
        builder = scores.builder
        column = builder.integers([CLASS_AXIS])
        log_p = builder.op("LogSoftmax", scores, axis=CLASS_AXIS)
        picked = builder.op("GatherElements", log_p, builder.op("Unsqueeze", label, column), axis=CLASS_AXIS)
        return -builder.op("Squeeze", picked, column, shape=label.shape)

    def _hardest_negatives(self, entropy: Tensor, match: _Match, ignored: Tensor | None) -> Tensor:
        """Emit the sum of the largest cross-entropies of unmatched anchors, over all pictures."""
        builder = entropy.builder
        excluded = match.found if ignored is None else builder.op("Or", match.found, ignored)
        row = builder.integers([1])
        ordered, _ = builder.op(
            "TopK",
            builder.op("Where", excluded, builder.scalar(-1.0, entropy), entropy, like=entropy),
            builder.op("Shape", entropy, start=1, end=2),
            axis=1,
            outputs=2,
        )
        positives = builder.op("ReduceSum", builder.cast(match.found, entropy.dtype), row, keepdims=1)
        others = builder.op("ReduceSum", 1.0 - builder.cast(excluded, entropy.dtype), row, keepdims=1)
        count = builder.op("Min", positives * self.negatives_per_positive, others)
        chosen = builder.op("Less", builder.cast(places_along(entropy, 1), entropy.dtype), count)
        return sum_of(builder.op("Where", chosen, ordered, builder.scalar(0.0, ordered), like=entropy))


def _halves(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Split boxes into centres and sizes, each ``[..., 2]``."""
    first, second = boxes.builder.op("Split", boxes, boxes.builder.integers([2, 2]), axis=-1, outputs=2)
    return first, second


ssd = Ssd

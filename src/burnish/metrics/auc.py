"""The area under the ROC curve: how often a positive scores higher than a negative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.losses import CLASS_AXIS, Compared
from burnish.metrics.base import MetricBase, divide, tally, wide, widened
from burnish.metrics.classification import (
    Average,
    asks_for_a_class,
    check_average,
    check_classes,
    chosen_class,
    is_yes,
    labelled,
    mean_over_classes,
    mean_over_classes_of,
)
from burnish.operators.loss import class_count
from burnish.validation import is_whole, require

POSITIVES, NEGATIVES = "positives", "negatives"
BINS = 4096
LEAST = 1e-30  # smallest probability in a logarithm; representable in float32


class _Questions(NamedTuple):
    """One row of scores per class, with masks of the positives and the negatives, int64 0 and 1."""

    scores: Tensor
    log_odds: Tensor
    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True)
class AreaUnderCurve(MetricBase):
    """The share of pairs of a positive and a negative in which the positive scores higher; a tie counts half.

    This is the area under the ROC curve (Hanley and McNeil 1982). The figure of one batch is exact, from ranks. Since no fixed
    number of totals holds the ranks of a whole data set, several batches are combined by counting positives and negatives in bins
    of the log odds, and a pair in the same bin counts as a tie. The area is then off by at most half the share of such pairs,
    which ``error_bound`` computes from the totals.

    Bin i of n holds log odds x with ``i <= n / 2 * t < i + 1``, with ``t = 1 / (1 - x)`` below 0 and ``2 - 1 / (1 + x)`` above.
    It is about ``2 / n * (1 + |x|)²`` wide, so that confident answers do not share a few bins. Scores that are not probabilities
    are used as log odds.

    Attributes:
        average: as for precision; with class indices each class is compared with all others by its probability. A class that is
            always or never present has no area and is left out.
        bins: number of bins.
    """

    word: ClassVar[str] = "auc"
    higher_is_better: ClassVar[bool] = True

    average: Average = "binary"
    _: KW_ONLY
    bins: int = BINS

    def __post_init__(self) -> None:
        check_average(self.word, self.average)
        require(is_whole(self.bins) and self.bins >= 2, self.word, "bins", self.bins, "a whole number of at least 2")

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit ``positives`` and ``negatives`` per bin, int64 ``[classes, bins]``, or one row for pooled classes.

        Raises:
            ConfigurationError: the labels are values, or there is no such class.
        """
        asked = self._questions(compared)
        x = asked.log_odds
        builder = x.builder
        # Each piece keeps the order of the scores despite rounding; a quotient x / (1 + |x|) would not.
        distance = 1.0 / (builder.op("Abs", x) + 1.0)
        place = builder.op("Where", builder.op("Less", x, 0.0), distance, 2.0 - distance, like=x)
        index = builder.cast(builder.op("Floor", place * (self.bins / 2)), ir.DataType.INT64)
        index = builder.op("Min", index, builder.scalar(self.bins - 1, ir.DataType.INT64), like=index)
        rows = builder.op("Shape", x, start=0, end=1)
        shape = builder.op("Concat", rows, builder.integers([self.bins]), axis=0)
        return {POSITIVES: tally(shape, index, asked.positives, 1), NEGATIVES: tally(shape, index, asked.negatives, 1)}

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        asked = self._questions(compared)
        builder = asked.scores.builder
        extents = builder.op("Shape", asked.scores)
        width = builder.op("Shape", asked.scores, start=1, end=2)
        ordered, order = builder.op("TopK", asked.scores, width, axis=1, largest=0, sorted=1, outputs=2)
        one = builder.integers([1])
        later = builder.op("Slice", ordered, one, width, one)
        earlier = builder.op("Slice", ordered, builder.integers([0]), builder.integers([-1]), one)
        rises = builder.cast(builder.op("Greater", later, earlier), ir.DataType.INT64)
        first = builder.op("Concat", builder.op("Shape", asked.scores, start=0, end=1), one, axis=0)
        start = builder.op("ConstantOfShape", first, value=ir.tensor(np.zeros(1, np.int64)))
        group = builder.op("CumSum", builder.op("Concat", start, rises, axis=1), builder.scalar(1, ir.DataType.INT64))
        positives, negatives = (tally(extents, group, _in_order(side, order), 1) for side in (asked.positives, asked.negatives))
        below = builder.op("CumSum", negatives, builder.scalar(1, ir.DataType.INT64), exclusive=1)
        won = _row_sums(positives * (below * 2 + negatives))
        there, others = _row_sums(positives), _row_sums(negatives)
        pairs = builder.cast(there * others * 2, wide(dtype))
        areas = divide(builder.cast(won, wide(dtype)), pairs, 0.0)
        has_pairs = builder.cast(builder.op("Greater", pairs, 0.0), ir.DataType.INT64)
        return builder.cast(mean_over_classes(areas, there * has_pairs if self.average == "weighted" else has_pairs), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        positives, negatives = totals[POSITIVES], totals[NEGATIVES]
        below = np.cumsum(negatives, axis=1) - negatives
        return self._mean(totals, (positives * (2 * below + negatives)).sum(axis=1))

    def error_bound(self, totals: Mapping[str, np.ndarray]) -> float:
        """Return the largest error of ``combine``: half the share of pairs in the same bin, averaged like the area."""
        return self._mean(totals, (totals[POSITIVES] * totals[NEGATIVES]).sum(axis=1))

    def _mean(self, totals: Mapping[str, np.ndarray], halves: np.ndarray) -> float:
        there, others = totals[POSITIVES].sum(axis=1), totals[NEGATIVES].sum(axis=1)
        pairs = 2 * there * others
        return mean_over_classes_of(
            halves / np.maximum(pairs, 1), there * (pairs > 0) if self.average == "weighted" else pairs > 0
        )

    def _questions(self, compared: Compared) -> _Questions:
        over_indices = asks_for_a_class(self.name, compared)
        check_classes(self.name, compared, self.average, over_indices)
        emit = self._of_classes if over_indices else self._of_elements
        key = (type(self), self.average, compared.prediction.value, compared.label.value)
        return compared.prediction.builder.once(key, lambda: emit(compared))

    def _of_elements(self, compared: Compared) -> _Questions:
        scores, yes = widened(compared.prediction), is_yes(compared)
        builder = scores.builder
        log_odds = scores
        if compared.scale == "probabilities":
            log_odds = _bounded_log(scores) - _bounded_log(1.0 - scores)
        index = self.average if isinstance(self.average, int) else None
        scores, log_odds, yes = (self._rows(tensor, index) for tensor in (scores, log_odds, yes))
        no = builder.op("Not", yes)
        return _Questions(scores, log_odds, builder.cast(yes, ir.DataType.INT64), builder.cast(no, ir.DataType.INT64))

    def _of_classes(self, compared: Compared) -> _Questions:
        scores = widened(compared.prediction)
        builder = scores.builder
        if compared.scale == "logits":
            scores = builder.op("LogSoftmax", scores, axis=CLASS_AXIS)
        log_odds = scores
        if compared.scale in ("logits", "log_probabilities"):
            log_odds = scores - _bounded_log(1.0 - builder.op("Exp", scores))
        index = chosen_class(self.average)
        if index is None:
            last = builder.op("Squeeze", class_count(scores), shape=())
            classes = builder.op("Range", builder.scalar(0, last), last, builder.scalar(1, last), shape=[None])
        else:
            classes = builder.integers([index])
        labels = labelled(compared)
        assert scores.rank is not None
        column = builder.op("Reshape", classes, builder.integers([-1, *[1] * (scores.rank - 2)]))
        yes = builder.op("Equal", labels.on_class_axis(labels.index), column)
        counted = labels.on_class_axis(labels.is_counted())
        positives = builder.op("And", yes, counted)
        negatives = builder.op("And", builder.op("Not", yes), counted)
        scores, log_odds = (self._rows(tensor, index) for tensor in (scores, log_odds))
        positives, negatives = (self._rows(builder.cast(side, ir.DataType.INT64), None) for side in (positives, negatives))
        return _Questions(scores, log_odds, positives, negatives)

    def _rows(self, tensor: Tensor, index: int | None) -> Tensor:
        """Emit a tensor ``[N, C, d1, ...]`` as one row per class, as one row of class ``index``, or as one row of everything."""
        builder = tensor.builder
        if index is not None:
            tensor = builder.op("Slice", tensor, *(builder.integers([n]) for n in (index, index + 1, CLASS_AXIS)))
        if self.average in ("binary", "micro"):
            return builder.op("Reshape", tensor, builder.integers([1, -1]))
        assert tensor.rank is not None
        swapped = builder.op("Transpose", tensor, perm=[1, 0, *range(2, tensor.rank)])
        return builder.op("Reshape", swapped, builder.integers([0, -1]))


def _row_sums(tensor: Tensor) -> Tensor:
    return tensor.builder.op("ReduceSum", tensor, tensor.builder.integers([1]), keepdims=0)


def _in_order(tensor: Tensor, order: Tensor) -> Tensor:
    """Emit each row with its elements in the order given by the same row of ``order``.

    It indexes the flattened tensor, because the ONNX reference implementation limits GatherElements to 64 elements.
    """
    builder = tensor.builder
    rows, width = (builder.op("Shape", tensor, start=axis, end=axis + 1) for axis in (0, 1))
    numbers = [builder.op("Squeeze", extent, builder.integers([0]), shape=()) for extent in (rows, width)]
    zero, one = (builder.scalar(number, ir.DataType.INT64) for number in (0, 1))
    starts = builder.op("Range", zero, numbers[0], one, shape=[None]) * numbers[1]
    places = order + builder.op("Unsqueeze", starts, builder.integers([1]))
    return builder.op("Gather", builder.op("Reshape", tensor, builder.integers([-1])), places, axis=0, like=tensor)


def _bounded_log(p: Tensor) -> Tensor:
    builder = p.builder
    return builder.op("Log", builder.op("Max", p, builder.scalar(LEAST, p), like=p))


auc = AreaUnderCurve

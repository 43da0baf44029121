"""Precision, recall, F1 and mean intersection over union."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import CLASS_AXIS, Compared
from burnish.metrics.base import MetricBase, divide, tally, wide
from burnish.metrics.classification import (
    EVEN_ODDS,
    Average,
    asks_for_a_class,
    best_class,
    check_average,
    check_classes,
    chosen_class,
    is_yes,
    labelled,
    mean_over_classes,
    mean_over_classes_of,
    says_yes,
)
from burnish.operators.loss import class_count
from burnish.validation import is_number, require

HITS, FOUND, THERE = "hits", "found", "there"


@dataclass(frozen=True)
class Retrieval(MetricBase):
    """A ratio of counts of each class: found (predicted), there (in the labels), and hits (both).

    If a denominator is 0 the ratio is 0. A class that is neither found nor there has no ratio: ``macro`` leaves it out, and the
    figure is NaN if all classes are such. Ignored labels do not count.

    Attributes:
        average: for class indices, ``binary``: class 1 of two; an integer: that class; ``macro``: mean over the classes;
            ``weighted``: mean weighted by how often each class is there; ``micro``: counts summed over the classes first. For
            yes-or-no targets ``binary`` and ``micro`` count all elements; the others have one class per index of axis 1.
        threshold: for yes-or-no targets, the probability above which an element is found.
    """

    higher_is_better: ClassVar[bool] = True

    average: Average = "binary"
    _: KW_ONLY
    threshold: float = EVEN_ODDS

    def __post_init__(self) -> None:
        check_average(self.word, self.average)
        is_share = is_number(self.threshold) and 0 < self.threshold < 1
        require(is_share, self.word, "threshold", self.threshold, "a number between 0 and 1")

    @abstractmethod
    def ratio(self, hits: Any, found: Any, there: Any) -> tuple[Any, Any]:
        """Return numerator and denominator, from tensors or arrays."""

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        """Emit ``hits``, ``found`` and ``there``, int64: one count per class, or one for all.

        Raises:
            ConfigurationError: the labels are values, a class does not exist, or the threshold has no meaning.
        """
        over_indices = asks_for_a_class(self.name, compared)
        check_classes(self.name, compared, self.average, over_indices)
        return self._of_classes(compared) if over_indices else self._of_elements(compared)

    def figure(self, compared: Compared, totals: Mapping[str, Tensor], dtype: ir.DataType) -> Tensor:
        builder = compared.prediction.builder
        hits, found, there = (totals[part] for part in (HITS, FOUND, THERE))
        above, below = (builder.cast(part, wide(dtype)) for part in self.ratio(hits, found, there))
        weights = there if self.average == "weighted" else self._present(found + there)
        return builder.cast(mean_over_classes(divide(above, below, 0.0), weights), dtype)

    def combine(self, totals: Mapping[str, np.ndarray]) -> float:
        hits, found, there = (totals[part] for part in (HITS, FOUND, THERE))
        above, below = self.ratio(hits, found, there)
        weights = there if self.average == "weighted" else found + there > 0
        return mean_over_classes_of(above / np.maximum(below, 1), weights)

    def _present(self, appearances: Tensor) -> Tensor:
        builder = appearances.builder
        return builder.cast(builder.op("Greater", appearances, 0), ir.DataType.INT64)

    def _of_classes(self, compared: Compared) -> dict[str, Tensor]:
        if self.threshold != EVEN_ODDS:
            raise ConfigurationError(
                f"{self.name}: the loss {compared.loss.name} compares class indices, of which the likeliest is found whatever "
                "the threshold: leave threshold out"
            )
        builder = compared.prediction.builder
        flat = builder.integers([-1])
        labels = labelled(compared)
        counted = builder.op("Reshape", builder.cast(labels.is_counted(), ir.DataType.INT64), flat)
        label = builder.op("Reshape", labels.index, flat)
        found = builder.op("Reshape", best_class(compared.prediction), flat)
        hits = counted * builder.cast(builder.op("Equal", found, label), ir.DataType.INT64)
        shape = builder.op("Reshape", class_count(compared.prediction), builder.integers([1]))
        counts = {
            HITS: tally(shape, label, hits, 0),
            FOUND: tally(shape, found, counted, 0),
            THERE: tally(shape, label, counted, 0),
        }
        if self.average == "micro":
            return {part: builder.op("ReduceSum", count, keepdims=1) for part, count in counts.items()}
        return self._chosen(counts, chosen_class(self.average))

    def _of_elements(self, compared: Compared) -> dict[str, Tensor]:
        prediction, builder = compared.prediction, compared.prediction.builder
        found, there = says_yes(self.name, compared, self.threshold), is_yes(compared)
        assert prediction.rank is not None
        axes = [axis for axis in range(prediction.rank) if axis != CLASS_AXIS]
        counts = {}
        for part, condition in {HITS: builder.op("And", found, there), FOUND: found, THERE: there}.items():
            ones = builder.cast(condition, ir.DataType.INT64)
            if self.average in ("binary", "micro"):
                total = builder.op("ReduceSum", ones, keepdims=0)
                counts[part] = builder.op("Reshape", total, builder.integers([1]))
            else:
                counts[part] = builder.op("ReduceSum", ones, builder.integers(axes), keepdims=0)
        return self._chosen(counts, self.average if isinstance(self.average, int) else None)

    def _chosen(self, counts: dict[str, Tensor], index: int | None) -> dict[str, Tensor]:
        if index is None:
            return counts
        return {
            part: count.builder.op("Gather", count, count.builder.integers([index]), axis=0) for part, count in counts.items()
        }


@dataclass(frozen=True)
class Precision(Retrieval):
    """The share of found positives that are right: hits / found; see ``Retrieval``."""

    word: ClassVar[str] = "precision"

    def ratio(self, hits: Any, found: Any, there: Any) -> tuple[Any, Any]:
        return hits, found


@dataclass(frozen=True)
class Recall(Retrieval):
    """The share of positives that were found: hits / there; see ``Retrieval``."""

    word: ClassVar[str] = "recall"

    def ratio(self, hits: Any, found: Any, there: Any) -> tuple[Any, Any]:
        return hits, there


@dataclass(frozen=True)
class F1(Retrieval):
    """The harmonic mean of precision and recall: 2 hits / (found + there) (van Rijsbergen 1979); see ``Retrieval``."""

    word: ClassVar[str] = "f1"

    def ratio(self, hits: Any, found: Any, there: Any) -> tuple[Any, Any]:
        return hits * 2, found + there


@dataclass(frozen=True)
class MeanIntersectionOverUnion(Retrieval):
    """Intersection over union of predicted and true classes, hits / (found + there - hits); see ``Retrieval``.

    By default it is the mean over the classes. The counts of a whole data set are added up first, as PASCAL VOC and Cityscapes
    report it for segmentation.
    """

    word: ClassVar[str] = "mean_iou"

    average: Average = "macro"

    def ratio(self, hits: Any, found: Any, there: Any) -> tuple[Any, Any]:
        return hits, found + there - hits


mean_iou = MeanIntersectionOverUnion
precision = Precision
recall = Recall
f1 = F1

"""Accuracy and top-k accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses import CLASS_AXIS, Compared, CrossEntropy
from burnish.metrics.base import COUNT, SUM, Quotient, does_not_fit, how_many
from burnish.metrics.classification import asks_for_a_class, best_class, is_yes, labelled, says_yes
from burnish.validation import is_whole


@dataclass(frozen=True)
class Accuracy(Quotient):
    """Share of right answers.

    With class indices, a position is right if its largest score along axis 1 is the label's (the first of equal scores);
    positions with an ignored label do not count. With probabilities of classes, as in ``cross_entropy:probabilities=true``, a
    position is right if its largest score is that of the most probable class. With yes-or-no targets, an element is right if its
    probability is on the same side of 1/2 as the target.
    """

    word: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        builder = compared.prediction.builder
        if isinstance(compared.loss, CrossEntropy) and compared.loss.probabilities:
            is_right = builder.op("Equal", best_class(compared.prediction), best_class(compared.label))
            return {SUM: how_many(is_right), COUNT: builder.op("Size", is_right)}
        if not asks_for_a_class(self.name, compared):
            is_right = builder.op("Equal", says_yes(self.name, compared), is_yes(compared))
            return {SUM: how_many(is_right), COUNT: builder.op("Size", compared.prediction)}
        counted = labelled(compared).is_counted()
        is_right = builder.op("Equal", best_class(compared.prediction), compared.label)
        return {SUM: how_many(builder.op("And", is_right, counted)), COUNT: how_many(counted)}


@dataclass(frozen=True)
class TopK(Quotient):
    """Share of positions whose label is among the k largest scores along axis 1; of equal scores the first ones count.

    Positions with an ignored label do not count.
    """

    word: ClassVar[str] = "top_k"
    higher_is_better: ClassVar[bool] = True

    k: int

    def __post_init__(self) -> None:
        if not is_whole(self.k) or self.k < 1:
            raise ConfigurationError(f"top_k: k must be at least 1, not {self.k}")

    @property
    def name(self) -> str:
        return f"top_{self.k}"

    def totals(self, compared: Compared) -> dict[str, Tensor]:
        prediction, builder = compared.prediction, compared.prediction.builder
        if compared.spec.name != "labels":
            raise does_not_fit(self.name, "class indices", compared, "mean_absolute_error")
        classes = prediction.dimension(CLASS_AXIS)
        if classes is not None and self.k > classes:
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has {classes} classes: choose k of at most {classes}"
            )
        counted = labelled(compared).is_counted()
        _, indices = builder.op("TopK", prediction, builder.integers([self.k]), axis=CLASS_AXIS, outputs=2)
        expected = builder.op("Unsqueeze", compared.label, builder.integers([CLASS_AXIS]))
        hit = builder.cast(builder.op("Equal", indices, expected), ir.DataType.INT64)
        # The k indices of a position differ, so at most one is the label.
        hits = builder.op("ReduceSum", hit, builder.integers([CLASS_AXIS]), keepdims=0)
        total = builder.op("ReduceSum", hits * builder.cast(counted, ir.DataType.INT64), keepdims=0)
        return {SUM: total, COUNT: how_many(counted)}


accuracy = Accuracy
top_k = TopK

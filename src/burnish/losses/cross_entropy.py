"""Softmax cross-entropy, from logits over class indices or over probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    SOFTMAX,
    Compared,
    Extents,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Scale,
    Term,
    check_reduction,
    check_same_shape,
    sum_of,
)
from burnish.losses.classes import (
    check_class_weight,
    check_ignore_index,
    class_labels,
    class_weight_column,
    classified_shape,
    positions,
)
from burnish.operators.loss import CLASS_AXIS, SOFTMAX_CROSS_ENTROPY, class_count
from burnish.validation import is_number, require

LAST_AXIS = -1


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(LossBase):
    """Softmax cross-entropy from logits ``[N, C, d1, ...]``, or ``[N, d1, ..., C]`` with ``class_axis=-1``.

    With log p = LogSoftmax(logits), y the label, w the class weights (1 where none are given) and s the smoothing, over class
    indices (``labels``, ``[N, d1, ...]``)::

        term   = (1 - s) * w[y] * -log p[y]  +  s / C * sum_c w[c] * -log p[c]
        loss   = sum(term) / sum(w[y])      over the positions whose label is not ignore_index

    and over probabilities q (``targets``, ``[N, C, d1, ...]``)::

        term   = sum_c ((1 - s) * q[c] + s / C) * w[c] * -log p[c]
        loss   = sum(term) / number of positions

    These are the semantics of ``torch.nn.functional.cross_entropy``, with one difference: where every label of a batch is
    ignored, the sum of weights is 0 and PyTorch's mean is NaN; ``average`` gives loss 0 and gradients 0.

    Attributes:
        ignore_index: positions with this label add neither a term nor a weight; of no meaning for probabilities.
        label_smoothing: share s of the target that is spread evenly over all classes, in [0, 1].
        weight: one finite number >= 0 per class, or None.
        probabilities: compare with probabilities in place of class indices.
        class_axis: 1, or -1 for a model whose classes are along the last axis, as those of language models are.
        reduction: ``mean`` as above; ``sum`` leaves the division out (the sum of weights is the constant 1).
    """

    name = "cross_entropy"

    ignore_index: int = -100
    label_smoothing: float = 0.0
    weight: Sequence[float] | None = None
    probabilities: bool = False
    class_axis: int = CLASS_AXIS
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        if isinstance(self.class_axis, bool) or self.class_axis not in (CLASS_AXIS, LAST_AXIS):
            raise ConfigurationError(f"{self.name}: class_axis must be 1 or -1, not {self.class_axis!r}")
        is_share = is_number(self.label_smoothing) and 0.0 <= self.label_smoothing <= 1.0
        require(is_share, self.name, "label_smoothing", self.label_smoothing, "between 0 and 1")
        check_ignore_index(self.name, self.ignore_index)
        object.__setattr__(self, "weight", check_class_weight(self.name, self.weight))

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(activation=replace(SOFTMAX, axis=self.class_axis)),)

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return () if self.probabilities else ("accuracy",)

    @property
    def scale(self) -> Scale | None:
        return None if self.probabilities else "logits"

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the spec of ``labels`` (the prediction's shape without the class axis) or of ``targets`` (its shape).

        Raises:
            ConfigurationError: the prediction is not floating-point, has no class axis, or not one class per weight.
        """
        (prediction,) = predictions
        if not self.probabilities:
            return (class_labels(self.name, prediction, self.ignore_index, self.weight, self.class_axis),)
        shape = self._shape(prediction)
        return (LabelSpec("targets", prediction.dtype, shape, minimum=0, maximum=1),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term.

        Args:
            predictions: logits ``[N, C, d1, ...]`` (``[N, d1, ..., C]``), floating-point.
            labels: class indices ``[N, d1, ...]``, int64, each in [0, C) or ``ignore_index``; or probabilities of the logits'
                shape and dtype.

        Raises:
            ConfigurationError: as ``label_specs``, or logits and probabilities whose shapes are known to differ.
        """
        self._shape(predictions[0])
        prediction, label = self._by_position(predictions[0], labels[0])
        return (self._over_probabilities(prediction, label) if self.probabilities else self._over_indices(prediction, label),)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared:
        (spec,) = self.label_specs(predictions)
        return Compared(*self._by_position(predictions[0], labels[0]), self, spec, self.scale)

    def _shape(self, prediction: Tensor) -> Extents:
        return classified_shape(self.name, prediction, self.weight, class_axis=self.class_axis)

    def _by_position(self, prediction: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return both with the classes along axis 1; where they are along the last, as one row of classes for each position.

        The elements stay where they are in memory: a softmax goes along lines without gaps.
        """
        if self.class_axis == CLASS_AXIS:
            return prediction, label
        builder, last = prediction.builder, len(self._shape(prediction)) - 1
        if self.probabilities:
            check_same_shape(self.name, prediction, label)
            label = builder.op("Flatten", label, axis=last)
        else:
            label = builder.op("Reshape", label, builder.integers([-1]))
        return builder.op("Flatten", prediction, axis=last), label

    def _over_indices(self, logits: Tensor, label: Tensor) -> Term:
        builder = logits.builder
        weights = None if self.weight is None else builder.constant(np.asarray(self.weight, logits.dtype.numpy()))
        smoothing = ir.tensor(np.float64(self.label_smoothing)) if self.label_smoothing else None
        total, counted, _ = SOFTMAX_CROSS_ENTROPY.emit(
            logits, label, weights, ignore_index=self.ignore_index, smoothing=smoothing
        )
        return Term(total, builder.scalar(1.0, logits) if self.reduction == "sum" else counted)

    def _over_probabilities(self, logits: Tensor, target: Tensor) -> Term:
        check_same_shape(self.name, logits, target)
        builder = logits.builder
        log_p = builder.op("LogSoftmax", logits, axis=CLASS_AXIS)
        if self.label_smoothing:
            share = builder.scalar(self.label_smoothing, log_p) / builder.cast(class_count(log_p), log_p.dtype)
            target = target * (1.0 - self.label_smoothing) + share
        total = sum_of(-(target * self._weighted(log_p)))
        return Term(total, builder.scalar(1.0, log_p) if self.reduction == "sum" else positions(log_p))

    def _weighted(self, log_p: Tensor) -> Tensor:
        return log_p if self.weight is None else log_p * class_weight_column(self.weight, log_p)


cross_entropy = CrossEntropy

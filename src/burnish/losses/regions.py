"""What losses of segmentation have in common: probabilities and targets of each class over positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import SOFTMAX, LabelSpec, LossBase, Reading, Scale, floating_shape
from burnish.losses.classes import check_ignore_index, class_labels
from burnish.operators.loss import CLASS_AXIS, Labelled


@dataclass(frozen=True, kw_only=True)
class RegionLoss(LossBase):
    """A loss of logits ``[N, C, d1, ...]``, with p their softmax, and class indices ``[N, d1, ...]``.

    Attributes:
        ignore_index: positions with this label count neither as predicted nor as there.
    """

    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_ignore_index(self.name, self.ignore_index)

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(activation=SOFTMAX),)

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return ("accuracy",)

    @property
    def scale(self) -> Scale | None:
        return "logits"

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the spec of ``labels``.

        Raises:
            ConfigurationError: the prediction is not floating-point, has no positions, or an unknown number of classes.
        """
        (prediction,) = predictions
        check_positions(self.name, prediction)
        if prediction.dimension(CLASS_AXIS) is None:
            raise ConfigurationError(
                f"{self.name}: the number of classes of the prediction '{prediction.name}' (axis 1 of {prediction.shape}) is not "
                "known: give the model's output a fixed extent there"
            )
        return (class_labels(self.name, prediction, self.ignore_index),)

    def probabilities_and_targets(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Emit the softmax, and 1 for the class of each position; both ``[N, C, d1, ...]``, and 0 where a label is ignored.

        Raises:
            ConfigurationError: as ``label_specs``.
        """
        self.label_specs((logits,))
        builder = logits.builder
        classes, rank = logits.dimension(CLASS_AXIS), logits.rank
        assert classes is not None
        assert rank is not None
        p = builder.op("Softmax", logits, axis=CLASS_AXIS)
        numbers = builder.constant(np.arange(classes, dtype=np.int64).reshape(-1, *[1] * (rank - 2)))
        labelled = Labelled(logits, label, self.ignore_index)
        there = builder.cast(builder.op("Equal", labelled.on_class_axis(label), numbers), logits.dtype)
        counts = labelled.on_class_axis(labelled.is_counted())
        zero = builder.scalar(0.0, logits)
        counted, targets = (builder.op("Where", counts, tensor, zero, like=logits) for tensor in (p, there))
        return counted, targets


def check_positions(loss: str, prediction: Tensor) -> None:
    """Raise ConfigurationError for a prediction without positions."""
    shape = floating_shape(loss, prediction)
    if len(shape) < 3:
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' has shape {list(shape)}, and the overlap is measured over "
            "positions: the model must give [batch, classes, positions, ...]"
        )


def sum_over_positions(tensor: Tensor) -> Tensor:
    """Emit the sums of ``[N, C, d1, ...]`` over the positions, ``[N, C]``."""
    assert tensor.rank is not None
    axes = tensor.builder.integers(range(CLASS_AXIS + 1, tensor.rank))
    return tensor.builder.op("ReduceSum", tensor, axes, keepdims=0)

"""Connectionist temporal classification, for label sequences that are not aligned with the frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    Activation,
    Compared,
    LabelSpec,
    LossBase,
    Reading,
    Reduction,
    Term,
    check_reduction,
    floating_shape,
    samples_of,
    sum_of,
)
from burnish.operators.ctc import ALIGNMENT_LIKELIHOOD, NEVER
from burnish.validation import is_whole, require

FRAME_CLASS_AXIS = 2
PADDING = -1


@dataclass(frozen=True, kw_only=True)
class ConnectionistTemporalClassification(LossBase):
    """``-log p(labels)``, summed over all alignments, as ``torch.nn.functional.ctc_loss`` (Graves et al. 2006).

    It reads logits ``[N, T, C]`` and applies the softmax itself, which leaves log-probabilities unchanged. The other inputs, all
    int64, are ``labels`` ``[N, S]``, padded with any class or with -1, ``input_lengths [N]``, the number of frames that count,
    and ``target_lengths [N]``, the number of labels that count. The mean divides the loss of each sequence by the number of its
    labels (at least 1) and averages over the sequences.

    Attributes:
        blank: class index of the blank.
        zero_infinity: True for loss and gradient 0, instead of infinity, if a sequence has fewer frames than its labels need.
        time_first: True for logits ``[T, N, C]``.
        reduction: ``mean`` as above; ``sum`` leaves both divisions out.
    """

    name = "ctc"
    readings = (Reading(activation=Activation(("Softmax", "LogSoftmax"), FRAME_CLASS_AXIS)),)

    blank: int = 0
    zero_infinity: bool = False
    time_first: bool = False
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        require(is_whole(self.blank) and self.blank >= 0, self.name, "blank", self.blank, "a class index, 0 or more")

    def check_samples(self, prediction: str, axis: int | None) -> None:
        """Raise ConfigurationError if samples are along the second axis of the logits, which this loss reads as frames."""
        if axis == 1 and not self.time_first:
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction}' has frames along its first axis and samples along the second, and "
                "the loss reads [batch, frames, classes]: choose 'ctc:time_first=true'"
            )

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        return None

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the specs of ``labels``, ``input_lengths`` and ``target_lengths``, all int64.

        Raises:
            ConfigurationError: the prediction is not floating-point, does not have three axes, or has no class ``blank``.
        """
        (prediction,) = predictions
        shape = floating_shape(self.name, prediction)
        layout = "[frames, batch, classes]" if self.time_first else "[batch, frames, classes]"
        if len(shape) != 3:
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has shape {list(shape)}: the model must give {layout}; "
                "name another output (outputs=...), or transpose it"
            )
        batch, frames = (shape[1], shape[0]) if self.time_first else shape[:2]
        classes = shape[FRAME_CLASS_AXIS]
        if isinstance(classes, int) and self.blank >= classes:
            raise ConfigurationError(
                f"{self.name}: blank is {self.blank}, and the prediction '{prediction.name}' has {classes} classes, from 0"
            )
        last = classes - 1 if isinstance(classes, int) else None
        longest = frames if isinstance(frames, int) else None
        return (
            LabelSpec("labels", ir.DataType.INT64, (batch, "label_length"), 0, last, PADDING),
            LabelSpec("input_lengths", ir.DataType.INT64, (batch,), 1, longest),
            LabelSpec("target_lengths", ir.DataType.INT64, (batch,), 0),
        )

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.label_specs(predictions)
        (logits,), (label, input_lengths, target_lengths) = predictions, labels
        builder = logits.builder
        if not self.time_first:
            logits = builder.op("Transpose", logits, perm=[1, 0, 2])
        log_p = builder.op("LogSoftmax", logits, axis=FRAME_CLASS_AXIS)
        likelihood = self._likelihood(log_p, label, input_lengths, target_lengths)
        is_impossible = builder.op("Less", likelihood, NEVER / 2)
        instead = builder.scalar(0.0 if self.zero_infinity else math.inf, likelihood)
        loss = builder.op("Where", is_impossible, instead, -likelihood, like=likelihood)
        if self.reduction == "sum":
            return (Term(sum_of(loss), builder.scalar(1.0, loss)),)
        lengths = builder.cast(builder.op("Max", target_lengths, builder.scalar(1, target_lengths)), loss.dtype)
        return (Term(sum_of(loss / lengths), samples_of(loss, loss.dtype)),)

    def _likelihood(self, log_p: Tensor, label: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """Emit the log-likelihood ``[N]`` of each sequence, from log-probabilities ``[T, N, C]``."""
        builder = log_p.builder
        column = builder.integers([1])
        target_lengths = builder.op("Unsqueeze", target_lengths, column)
        blank = builder.scalar(self.blank, label)
        counts = builder.op("Less", _range(label, 1), target_lengths)
        label = builder.op("Where", counts, label, blank, like=label)
        start, most = builder.integers([0]), builder.integers([-1])
        earlier = builder.op("Slice", label, start, most, column)
        first = builder.op("Slice", label, start, column, column)
        # A column of -1 in the batch's dynamic shape: the first label has no predecessor.
        before = builder.op("Concat", -1 - first * 0, earlier, axis=1)
        states = _with_blanks(label, blank)
        may_skip = _with_blanks(builder.op("Not", builder.op("Equal", label, before)), builder.scalar(False, ir.DataType.BOOL))
        frames = builder.op("Less", builder.op("Unsqueeze", _range(log_p, 0), column), input_lengths)
        position = _range(states, 1)
        last = target_lengths * 2
        is_final = builder.op("Or", builder.op("Equal", position, last), builder.op("Equal", position, last - 1))
        shape = builder.op("Concat", builder.op("Shape", log_p, start=0, end=1), builder.op("Shape", states), axis=0)
        index = builder.op("Expand", states, shape)
        emitted = None if log_p.shape is None else [*log_p.shape.dims[:2], None]
        emission = builder.op("GatherElements", log_p, index, axis=FRAME_CLASS_AXIS, dtype=log_p.dtype, shape=emitted)
        is_live = builder.op("Unsqueeze", frames, builder.integers([2]))
        likelihood, _ = ALIGNMENT_LIKELIHOOD.emit(emission, may_skip, is_live, is_final)
        return likelihood


def _range(tensor: Tensor, axis: int) -> Tensor:
    builder = tensor.builder
    extent = builder.op("Squeeze", builder.op("Shape", tensor, start=axis, end=axis + 1), builder.integers([0]), shape=())
    return builder.op("Range", builder.scalar(0, ir.DataType.INT64), extent, builder.scalar(1, ir.DataType.INT64))


def _with_blanks(tensor: Tensor, blank: Tensor) -> Tensor:
    """Emit ``[N, 2 S + 1]`` from ``[N, S]``: ``blank`` before every column and after the last."""
    builder = tensor.builder
    last = builder.integers([2])
    wide = builder.op("Unsqueeze", tensor, last)
    blanks = builder.op("Expand", blank, builder.op("Shape", wide))
    pairs = builder.op("Reshape", builder.op("Concat", blanks, wide, axis=2), builder.integers([0, -1]))
    zero, one = builder.integers([0]), builder.integers([1])
    column = builder.op("Slice", builder.op("Squeeze", blanks, last), zero, one, one)
    return builder.op("Concat", pairs, column, axis=1)


ctc = ConnectionistTemporalClassification

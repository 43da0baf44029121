"""MixUp and CutMix in the graph: training mixes the samples of a batch, and the loss uses the labels of both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.losses.base import Compared, LabelSpec, Term, Wrapping
from burnish.losses.distillation import Distillation
from burnish.losses.registry import LossLike, get
from burnish.random import ALIKE, symmetric_beta, uniform
from burnish.validation import is_number

Layout = Literal["NCHW", "NHWC"]
STREAM = 2**31 - 16
"""First of the random streams that mixing draws from; nodes of a model are numbered from 0."""
CHANNELS = (1, 3, 4)
"""Extents of an axis that identify it as the channel axis."""


class Draws(NamedTuple):
    """The random numbers of a step.

    Attributes:
        share: share of a sample in its mixture, float32 scalar; the remainder is the other sample's.
        cuts: True if this step pastes a box (CutMix), bool scalar; None if all steps do the same.
        centre: centre of the box, as fractions of height and width, float32 [2].
    """

    share: Tensor
    cuts: Tensor | None
    centre: Tensor


@dataclass(frozen=True, kw_only=True)
class Mixed(Wrapping):
    """A loss wrapper that makes training mix each sample with the previous one in the batch.

    Each step draws a share s from Beta(alpha, alpha), using the program's random key. MixUp (Zhang et al. 2017) gives the model
    ``s x + (1 - s) x'``. CutMix (Yun et al. 2019) copies a box of ``sqrt(1 - s)`` of height and width, around a uniform centre,
    from x'; s is then the share of the picture that remains. If both alphas are set, each step uses either method. The loss of
    classes is ``s loss(y) + (1 - s) loss(y')``, that of values and probabilities ``loss(s y + (1 - s) y')``.

    Evaluation and prediction mix nothing. Metrics of a training step compare with y. With several workers, each mixes its own
    samples.

    Attributes:
        loss: loss of one prediction and one label per sample.
        mixup, cutmix: alphas, 0 for none; at least one is above 0.
        layout: layout of the images that CutMix cuts; None if the number of channels determines it.
    """

    name = "mixed"

    mixup: float = 0.0
    cutmix: float = 0.0
    layout: Layout | None = None

    def __post_init__(self) -> None:
        for option in ("mixup", "cutmix"):
            alpha = getattr(self, option)
            if not is_number(alpha) or not 0 <= alpha < math.inf:
                raise ConfigurationError(f"{self.name}: {option} must be alpha, a finite number of at least 0, not {alpha!r}")
        if not self.mixup and not self.cutmix:
            raise ConfigurationError(f"{self.name}: give mixup=0.2 or cutmix=1, or both: with neither nothing is mixed")
        if self.layout is not None and self.layout not in get_args(Layout):
            raise ConfigurationError(f"{self.name}: layout must be 'NCHW' or 'NHWC', not {self.layout!r}")
        if isinstance(self.loss, Mixed | Distillation) or len(self.loss.readings) != 1:
            raise ConfigurationError(
                f"{self.name}: samples are mixed under a loss of one output and its labels, and {self.loss.name} is another: "
                "give one such as cross_entropy"
            )

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        specs = self.loss.label_specs(predictions)
        if len(specs) != 1 or (not specs[0].dtype.is_floating_point() and len(specs[0].shape) != 1):
            raise ConfigurationError(
                f"{self.name}: {self.loss.name} compares '{predictions[0].name}' with more than a class or values of each "
                "sample, and what a mixture is of then is not said: train without mixing"
            )
        if specs[0].two_values or getattr(self.loss, "log_target", False):
            what = "signs" if specs[0].two_values else "logarithms"
            raise ConfigurationError(
                f"{self.name}: {self.loss.name} compares with {what}, and what is between two of them is another thing than a "
                "mixture: give a loss of classes, values or probabilities, or train without mixing"
            )
        return specs

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.label_specs(predictions)
        return self.loss.terms(predictions, labels)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        return self.loss.compared(predictions, labels)

    def draws(self, builder: Builder, key: Tensor) -> Draws:
        places = builder.constant(np.zeros(3, np.float32))
        flat = uniform(builder, key, STREAM + 3, places, ir.DataType.FLOAT, numbered=ALIKE)
        chosen, centre = (builder.op("Slice", flat, *(builder.integers([end]) for end in ends)) for ends in ((0, 1), (1, 3)))
        cuts, alpha = None, builder.scalar(self.cutmix or self.mixup, ir.DataType.FLOAT)
        if self.mixup and self.cutmix:
            cuts = builder.op("Reshape", builder.op("Less", chosen, 0.5), builder.integers([]))
            alpha = builder.op("Where", cuts, alpha, builder.scalar(self.mixup, alpha), like=alpha)
        share = symmetric_beta(builder, key, STREAM, alpha)
        return Draws(share, cuts, builder.op("Reshape", centre, builder.integers([2])))

    def mixed_inputs(self, x: Tensor, draws: Draws, axis: int = 0) -> tuple[Tensor, Tensor]:
        """Emit the mixed samples for the model, and the share of each sample's own label.

        Args:
            x: samples [N, ...]; four axes for CutMix.
            draws: the result of ``draws``.
            axis: sample axis of ``x``; CutMix supports only 0.

        Returns:
            The mixed samples in the shape and dtype of ``x``, integers rounded to the nearest; and a scalar, float64 if ``x`` is,
            otherwise float32.

        Raises:
            ConfigurationError: CutMix of inputs that are not images, or of images with an unknown layout.
        """
        builder, others = x.builder, rolled(x, axis)
        share = builder.cast(draws.share, ir.DataType.DOUBLE if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT)
        if not self.cutmix:
            return _added(x, others, share), share
        if axis:
            raise ConfigurationError(
                f"{self.name}: CutMix cuts boxes out of images [batch, ...], and the input '{x.name}' has its samples along axis "
                f"{axis}: take mixup, or export the model with its samples first"
            )
        rows, columns, covered = self._box(x, draws, share.dtype)
        inside = builder.op("And", rows, columns)
        cut = builder.op("Where", inside, others, x, like=x)
        left = 1.0 - covered
        if draws.cuts is None:
            return cut, left
        mixture = builder.op("Where", draws.cuts, cut, _added(x, others, share), like=x)
        return mixture, builder.op("Where", draws.cuts, left, share, like=left)

    def mixed_terms(
        self, predictions: Sequence[Tensor], labels: Sequence[Tensor], share: Tensor, axis: int = 0
    ) -> tuple[Term, ...]:
        """Emit the terms of the loss for mixed samples.

        Args:
            predictions, labels: as in ``terms``.
            share: share of a sample in its mixture, from ``mixed_inputs``.
            axis: sample axis of the labels.
        """
        self.label_specs(predictions)
        (label,) = labels
        builder = label.builder
        if label.dtype.is_floating_point():
            return self.loss.terms(predictions, [_added(label, rolled(label, axis), share)])
        own, other = self.loss.terms(predictions, labels), self.loss.terms(predictions, [rolled(label, axis)])
        # The other labels are a permutation of these, so their weights have the same sum.
        return tuple(
            mine._replace(total=mine.total * part + theirs.total * (1.0 - part))
            for mine, theirs in zip(own, other, strict=True)
            for part in (builder.cast(share, mine.total.dtype),)
        )

    def _box(self, x: Tensor, draws: Draws, dtype: ir.DataType) -> tuple[Tensor, Tensor, Tensor]:
        """Emit masks of the rows and columns in the box, which broadcast to images, and the share of the image it covers."""
        builder, axes = x.builder, self._axes(x)
        side = builder.op("Sqrt", 1.0 - draws.share) * 0.5
        masks: list[Tensor] = []
        covered, area = (builder.scalar(1, ir.DataType.INT64) for _ in range(2))
        for index, axis in enumerate(axes):
            extent = builder.op("Reshape", builder.op("Shape", x, start=axis, end=axis + 1), builder.integers([]))
            length = builder.cast(extent, ir.DataType.FLOAT)
            place = builder.op("Gather", draws.centre, builder.scalar(index, ir.DataType.INT64), axis=0)
            middle = builder.op("Min", builder.cast(place * length, ir.DataType.INT64), extent - 1)
            half = builder.cast(side * length, ir.DataType.INT64)
            start = builder.op("Max", middle - half, builder.scalar(0, extent))
            end = builder.op("Min", middle + half, extent)
            places = builder.op("Range", builder.scalar(0, extent), extent, builder.scalar(1, extent))
            mask = builder.op("And", builder.op("GreaterOrEqual", places, start), builder.op("Less", places, end))
            outer = [1 for _ in range(axis + 1, 4)]
            masks.append(builder.op("Reshape", mask, builder.integers([-1, *outer])))
            covered, area = covered * (end - start), area * extent
        return masks[0], masks[1], builder.cast(covered, dtype) / builder.cast(area, dtype)

    def _axes(self, x: Tensor) -> tuple[int, int]:
        if x.rank != 4:
            raise ConfigurationError(
                f"{self.name}: CutMix cuts boxes out of images, and the input '{x.name}' is none of four axes: take mixup"
            )
        layout = self.layout
        if layout is None:
            first, last = x.dimension(1) in CHANNELS, x.dimension(3) in CHANNELS
            layout = "NCHW" if first else "NHWC" if last else None
        if layout is None:
            raise ConfigurationError(
                f"{self.name}: neither axis of the input '{x.name}' has one, three or four channels: say layout='NCHW' or 'NHWC'"
            )
        return (2, 3) if layout == "NCHW" else (1, 2)


def rolled(x: Tensor, axis: int = 0) -> Tensor:
    """Emit a batch rotated by one sample: each sample is replaced by the previous one, the first by the last."""
    builder = x.builder
    last = builder.op("Slice", x, builder.integers([-1]), builder.integers([2**31]), builder.integers([axis]))
    rest = builder.op("Slice", x, builder.integers([0]), builder.integers([-1]), builder.integers([axis]))
    return builder.op("Concat", last, rest, axis=axis, like=x)


def _added(x: Tensor, others: Tensor, share: Tensor) -> Tensor:
    """Emit ``share x + (1 - share) others``; integers are rounded to the nearest."""
    builder = x.builder
    dtype = x.dtype if x.dtype.is_floating_point() else ir.DataType.FLOAT
    part = builder.cast(share, dtype)
    mixture = builder.cast(x, dtype) * part + builder.cast(others, dtype) * (1.0 - part)
    return mixture if dtype == x.dtype else builder.cast(builder.op("Round", mixture), x.dtype)


def mixed(loss: LossLike = "cross_entropy", *, mixup: float = 0.0, cutmix: float = 0.0, layout: Layout | None = None) -> Mixed:
    """Return a loss that makes training mix samples in the graph; see ``Mixed``.

    Args:
        loss: anything that ``get`` takes.
        mixup, cutmix: alphas, such as 0.2 and 1.
        layout: layout of images, needed if their number of channels does not determine it.
    """
    return Mixed(loss=get(loss), mixup=mixup, cutmix=cutmix, layout=layout)

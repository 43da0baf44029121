"""A loss that weighs every element of the outputs by a number of its own, of either sign: for checks of gradients alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from burnish.graph import Tensor
from burnish.losses.base import LabelSpec, LossBase, Reading, Term, floating_shape, size_of, sum_of

PHASE = 0.7548776662466927
"""An irrational number, whose multiples by squares fill the circle evenly and without order."""


@dataclass(frozen=True, kw_only=True)
class Projection(LossBase):
    """``sum_i sin(PHASE (i + seed)²) y_i`` over the elements of all outputs that it reads.

    A sum of outputs by itself would hide errors: the gradient of what a normalization layer gives is zero there.

    Attributes:
        outputs: how many outputs it reads, in the order of ``compile``.
        seed: other weights for another seed.
    """

    name: ClassVar[str] = "projection"

    outputs: int = 1
    seed: int = 0

    @property
    def readings(self) -> tuple[Reading, ...]:
        return tuple(Reading(position=index) for index in range(self.outputs))

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return no spec.

        Raises:
            ConfigurationError: an output is not floating-point, or its rank is not known.
        """
        for prediction in predictions:
            floating_shape(self.name, prediction)
        return ()

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        total = None
        for index, prediction in enumerate(predictions):
            builder = prediction.builder
            count = size_of(prediction, ir.DataType.INT64)
            first = builder.scalar(self.seed + 1000 * index, count)
            positions = builder.cast(builder.op("Range", first, first + count, builder.scalar(1, count)), prediction.dtype)
            weights = builder.op("Sin", positions * positions * PHASE)
            weighted = prediction * builder.op("Reshape", weights, builder.op("Shape", prediction))
            summed = sum_of(weighted)
            total = summed if total is None else total + builder.cast(summed, total.dtype)
        assert total is not None, "a loss reads at least one output"
        return (Term(total, total.builder.scalar(1.0, total)),)

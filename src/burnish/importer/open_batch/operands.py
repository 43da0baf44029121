"""Values of a model that was made for one sample, and where the samples of a batch stand in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

Extent = int | str | None
"""A known number, the name of a dimension, or unknown."""
Shape = tuple[Extent, ...]


@dataclass(frozen=True)
class Batch:
    """Where samples stand.

    Attributes:
        axis: of the value with its samples.
        is_extra: whether the value has this axis more than that of one sample; else it stands in the place of one of extent 1.
    """

    axis: int
    is_extra: bool


FIRST = Batch(0, is_extra=True)
"""Samples along a first axis that a sample does not have."""
STACKED = Batch(0, is_extra=False)
"""Samples along the first axis, in the place of a sample's own."""


@dataclass(frozen=True)
class Operand:
    """A value of the opened graph.

    Attributes:
        value: what stands for it in the opened graph.
        sample_shape: what its shape is for one sample, as the model was made; None where not even the rank is known.
        batch: where its samples stand; None where no sample reaches it, and it is the same for all.
    """

    value: ir.Value
    sample_shape: Shape | None
    batch: Batch | None = None

    @property
    def shape(self) -> Shape:
        """The shape for one sample.

        Raises:
            Refused: it is not known.
        """
        if self.sample_shape is None:
            raise Refused(f"it reads '{self.value.name}', whose rank is not known")
        return self.sample_shape

    @property
    def rank(self) -> int:
        return len(self.shape)


class Refused(Exception):
    """A node that cannot take a batch of any size: the clause that follows its description, and what to do about it.

    Args:
        reason: what stands in the way.
        remedy: what to do, in place of exporting the model again.
    """

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def sample_shape(value: ir.Value) -> Shape | None:
    """The shape of a value of the model as it was made."""
    if value.shape is None:
        return None
    return tuple(extent if isinstance(extent, int) else extent.value for extent in value.shape.dims)


def elements(extents: Sequence[Extent]) -> tuple[int, Counter[str]] | None:
    """The product of extents: an integer, and the names that it is multiplied by; None where an extent is unknown."""
    if None in extents:
        return None
    integers = math.prod(extent for extent in extents if isinstance(extent, int))
    return integers, Counter(extent for extent in extents if isinstance(extent, str))


def broadcast_extents(shapes: Sequence[Shape]) -> Shape:
    """The shape that shapes are broadcast to."""
    rank = max(map(len, shapes))
    return tuple(_wider([shape[axis] for shape in shapes if len(shape) >= -axis]) for axis in range(-rank, 0))


def _wider(extents: Sequence[Extent]) -> Extent:
    others = [extent for extent in extents if extent != 1]
    decided = [extent for extent in others if isinstance(extent, int)]
    if not others or decided:
        return decided[0] if decided else 1
    return others[0] if others.count(others[0]) == len(others) else None

"""Class indices as operands: which positions count, and what each picks. The class axis is 1, whatever the rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from burnish.graph import Tensor

CLASS_AXIS = 1


class Labelled:
    """Class indices beside a prediction: which positions count, what each label picks, and the weight of each position.

    Args:
        prediction: ``[N, C, d1, ...]``, floating-point.
        labels: ``[N, d1, ...]``, int64, each in [0, C) or ``ignore_index``.
        ignore_index: positions with this label are left out; None leaves none out.
        weight: one number per class, as numbers or as a tensor ``[C]``; or None.
    """

    def __init__(
        self, prediction: Tensor, labels: Tensor, ignore_index: int | None, weight: Sequence[float] | Tensor | None = None
    ):
        self._builder = builder = prediction.builder
        self._dtype = prediction.dtype
        self._scores = prediction
        self._ignored: Tensor | None = None
        self.index = labels
        if ignore_index is not None:
            self._ignored = builder.op("Equal", labels, ignore_index)
            # An ignored label may be no class at all; class 0 stands in for it and its term is dropped.
            self.index = builder.op("Where", self._ignored, builder.scalar(0, labels), labels, like=labels)
        self._weights = weight

    @cached_property
    def weight(self) -> Tensor | None:
        """The weight of each position, of the labels' shape; None where all weigh the same."""
        if self._weights is None:
            return None
        table = self._weights
        if not isinstance(table, Tensor):
            table = self._builder.constant(np.asarray(table, dtype=self._dtype.numpy()))
        return self._builder.op("Gather", table, self.index, axis=0, shape=self.index.shape)

    def on_class_axis(self, tensor: Tensor) -> Tensor:
        """Emit a tensor of the labels' shape with a class axis of extent 1."""
        return self._builder.op("Unsqueeze", tensor, self._builder.integers([CLASS_AXIS]))

    def pick(self, tensor: Tensor) -> Tensor:
        """Emit, of a tensor ``[N, C, d1, ...]``, the element of each position's label, ``[N, d1, ...]``."""
        picked = self._builder.op("GatherElements", tensor, self.on_class_axis(self.index), axis=CLASS_AXIS)
        return self._builder.op("Squeeze", picked, self._builder.integers([CLASS_AXIS]), shape=self.index.shape)

    def counted(self, tensor: Tensor) -> Tensor:
        """Emit a tensor of the labels' shape with 0 where the label is ignored."""
        if self._ignored is None:
            return tensor
        return self._builder.op("Where", self._ignored, self._builder.scalar(0.0, tensor), tensor, like=tensor)

    def is_counted(self) -> Tensor:
        """Emit which positions count, bool, of the labels' shape."""
        if self._ignored is None:
            return self._builder.op("Equal", self.index, self.index)
        return self._builder.op("Not", self._ignored)

    def total_weight(self) -> Tensor:
        """Emit the sum of the weights of the positions that count, a scalar of the prediction's dtype."""
        if self.weight is not None:
            return _sum_of(self.counted(self.weight))
        return self.count()

    def count(self) -> Tensor:
        """Emit the number of positions that count, a scalar of the prediction's dtype."""
        if self._ignored is None:
            return self._builder.cast(self._builder.op("Size", self.index), self._dtype)
        return _sum_of(self._builder.cast(self.is_counted(), self._dtype))

    def classes(self) -> Tensor:
        """Emit the number of classes, a scalar of the prediction's dtype."""
        return self._builder.cast(class_count(self._scores), self._dtype)


def class_count(prediction: Tensor) -> Tensor:
    """Emit the extent of the class axis, an int64 scalar."""
    builder = prediction.builder
    extent = builder.op("Shape", prediction, start=CLASS_AXIS, end=CLASS_AXIS + 1)
    return builder.op("Squeeze", extent, builder.integers([0]), shape=())


def _sum_of(tensor: Tensor) -> Tensor:
    return tensor.builder.op("ReduceSum", tensor, keepdims=0)

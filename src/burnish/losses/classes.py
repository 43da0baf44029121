"""What losses over class indices have in common: labels, ignored positions, class weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import CLASS_AXIS, Extents, LabelSpec, floating_shape, size_of, sum_of
from burnish.settings import is_number, is_whole


def classified_shape(loss: str, prediction: Tensor, weight: Sequence[float] | None = None, option: str = "weight") -> Extents:
    """Return the extents of a prediction ``[N, C, d1, ...]``, for which ``option`` gave one number per class, or None.

    Raises:
        ConfigurationError: it is not floating-point, has no class axis, or not one class per weight.
    """
    shape = floating_shape(loss, prediction)
    if len(shape) < 2:
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' has shape {list(shape)}, and classes are read along axis 1: "
            "the model must give [batch, classes, ...]; add a batch axis, or name another output (outputs=...)"
        )
    classes = shape[CLASS_AXIS]
    if isinstance(classes, int) and weight is not None and len(weight) != classes:
        raise ConfigurationError(
            f"{loss}: {option} has {len(weight)} numbers, and the prediction '{prediction.name}' has "
            f"{classes} classes: give one number per class"
        )
    return shape


def class_labels(loss: str, prediction: Tensor, ignored: int | None, weight: Sequence[float] | None = None) -> LabelSpec:
    """Return the spec of ``labels``: the prediction's shape without the class axis, int64, 0 to C - 1.

    Raises:
        ConfigurationError: as ``classified_shape``.
    """
    shape = classified_shape(loss, prediction, weight)
    classes = shape[CLASS_AXIS]
    return LabelSpec(
        "labels",
        ir.DataType.INT64,
        (*shape[:CLASS_AXIS], *shape[CLASS_AXIS + 1 :]),
        minimum=0,
        maximum=classes - 1 if isinstance(classes, int) else None,
        ignored=ignored,
    )


def check_class_weight(loss: str, weight: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return class weights as floats.

    Raises:
        ConfigurationError: one is no finite number, or negative.
    """
    if weight is None:
        return None
    if not all(is_number(number) and number >= 0 for number in weight):
        raise ConfigurationError(f"{loss}: weight must hold finite numbers that are not negative, not {weight}")
    return tuple(float(number) for number in weight)


def check_ignore_index(loss: str, ignore_index: object) -> None:
    """Raise ConfigurationError for what is no integer."""
    if not is_whole(ignore_index):
        raise ConfigurationError(f"{loss}: ignore_index must be an integer, not {ignore_index!r}")


def class_weight_column(weight: Sequence[float], like: Tensor) -> Tensor:
    """Emit class weights as a constant that broadcasts along the class axis of ``like``."""
    assert like.rank is not None
    shape = (-1, *([1] * (like.rank - 2)))
    return like.builder.constant(np.asarray(weight, dtype=like.dtype.numpy()).reshape(shape))


class Labelled:
    """Class indices beside a prediction: which positions count, what each label picks, and the weight of each position.

    Args:
        prediction: ``[N, C, d1, ...]``, floating-point.
        labels: ``[N, d1, ...]``, int64, each in [0, C) or ``ignore_index``.
        ignore_index: positions with this label are left out; None leaves none out.
        weight: one number per class, or None.
    """

    def __init__(self, prediction: Tensor, labels: Tensor, ignore_index: int | None, weight: Sequence[float] | None = None):
        self._builder = builder = prediction.builder
        self._dtype = prediction.dtype
        self._scores = prediction
        self._ignored: Tensor | None = None
        self.index = labels
        if ignore_index is not None:
            self._ignored = builder.op("Equal", labels, ignore_index)
            # An ignored label may be no class at all; class 0 stands in for it and its term is dropped.
            self.index = builder.op("Where", self._ignored, builder.scalar(0, labels), labels, like=labels)
        self.weight: Tensor | None = None
        if weight is not None:
            table = builder.constant(np.asarray(weight, dtype=prediction.dtype.numpy()))
            self.weight = builder.op("Gather", table, self.index, axis=0, shape=labels.shape)

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
            return sum_of(self.counted(self.weight))
        return self.count()

    def count(self) -> Tensor:
        """Emit the number of positions that count, a scalar of the prediction's dtype."""
        if self._ignored is None:
            return size_of(self.index, self._dtype)
        return sum_of(self._builder.cast(self.is_counted(), self._dtype))

    def classes(self) -> Tensor:
        """Emit the number of classes, a scalar of the prediction's dtype."""
        return self._builder.cast(class_count(self._scores), self._dtype)


def positions(prediction: Tensor) -> Tensor:
    """Emit the number of positions of ``[N, C, d1, ...]``: of elements without the class axis, in the prediction's dtype."""
    builder = prediction.builder
    return builder.cast(builder.op("Size", prediction) / class_count(prediction), prediction.dtype)


def class_count(prediction: Tensor) -> Tensor:
    """Emit the extent of the class axis, an int64 scalar."""
    builder = prediction.builder
    extent = builder.op("Shape", prediction, start=CLASS_AXIS, end=CLASS_AXIS + 1)
    return builder.op("Squeeze", extent, builder.integers([0]), shape=())

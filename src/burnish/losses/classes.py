"""What losses over class indices have in common: the shapes of predictions and labels, and class weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import Extents, LabelSpec, floating_shape
from burnish.operators.loss import CLASS_AXIS, class_count
from burnish.settings import plain
from burnish.validation import is_number, is_whole, require


def classified_shape(
    loss: str,
    prediction: Tensor,
    weight: Sequence[float] | None = None,
    option: str = "weight",
    class_axis: int = CLASS_AXIS,
) -> Extents:
    """Return the extents of a prediction ``[N, C, d1, ...]``, for which ``option`` gave one number per class, or None.

    Its classes are along ``class_axis``, 1 or -1.

    Raises:
        ConfigurationError: it is not floating-point, has no class axis, or not one class per weight.
    """
    shape = floating_shape(loss, prediction)
    if len(shape) < 2:
        expected = "[batch, classes, ...]" if class_axis == CLASS_AXIS else "[batch, ..., classes]"
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' has shape {list(shape)}, and classes are read along axis {class_axis}: "
            f"the model must give {expected}; add a batch axis, or name another output (outputs=...)"
        )
    classes = shape[class_axis]
    if isinstance(classes, int) and weight is not None and len(weight) != classes:
        raise ConfigurationError(
            f"{loss}: {option} has {len(weight)} numbers, and the prediction '{prediction.name}' has "
            f"{classes} classes: give one number per class"
        )
    return shape


def class_labels(
    loss: str,
    prediction: Tensor,
    ignored: int | None,
    weight: Sequence[float] | None = None,
    class_axis: int = CLASS_AXIS,
) -> LabelSpec:
    """Return the spec of ``labels``: the prediction's shape without the class axis, int64, 0 to C - 1.

    Raises:
        ConfigurationError: as ``classified_shape``.
    """
    shape = classified_shape(loss, prediction, weight, class_axis=class_axis)
    axis = class_axis % len(shape)
    classes = shape[axis]
    return LabelSpec(
        "labels",
        ir.DataType.INT64,
        (*shape[:axis], *shape[axis + 1 :]),
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
    weight = plain(tuple(weight))
    if not all(is_number(number) and number >= 0 for number in weight):
        raise ConfigurationError(f"{loss}: weight must hold finite numbers that are not negative, not {weight}")
    return tuple(float(number) for number in weight)


def check_ignore_index(loss: str, ignore_index: object) -> None:
    """Raise ConfigurationError for what is no integer, or one that labels cannot hold."""
    fits = is_whole(ignore_index) and -(2**63) <= ignore_index < 2**63
    require(fits, loss, "ignore_index", ignore_index, "an integer that int64 holds")


def class_weight_column(weight: Sequence[float], like: Tensor) -> Tensor:
    """Emit class weights as a constant that broadcasts along the class axis of ``like``."""
    assert like.rank is not None
    shape = (-1, *([1] * (like.rank - 2)))
    return like.builder.constant(np.asarray(weight, dtype=like.dtype.numpy()).reshape(shape))


def positions(prediction: Tensor) -> Tensor:
    """Emit the number of positions of ``[N, C, d1, ...]``: of elements without the class axis, in the prediction's dtype."""
    builder = prediction.builder
    return builder.cast(builder.op("Size", prediction) / class_count(prediction), prediction.dtype)

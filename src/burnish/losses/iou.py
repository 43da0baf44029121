"""Corners, areas and overlaps of boxes, and losses that are one minus the overlap of a predicted box and its target.

Boxes are along the last axis, ``[..., 4]``; everything here broadcasts over the axes before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    LabelSpec,
    LossBase,
    Reduction,
    Term,
    check_reduction,
    check_same_shape,
    floating_shape,
    mean_or_sum,
)
from burnish.operators.elementwise import STOP_GRADIENT
from burnish.validation import check_number

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
OverlapKind = Literal["iou", "giou", "diou", "ciou"]
EPSILON = 1e-7
"""Added to denominators, as in torchvision's losses: boxes without an area have no overlap."""


class Corners(NamedTuple):
    """Boxes by their sides, each ``[..., 1]``."""

    left: Tensor
    top: Tensor
    right: Tensor
    bottom: Tensor

    @property
    def width(self) -> Tensor:
        return self.right - self.left

    @property
    def height(self) -> Tensor:
        return self.bottom - self.top

    @property
    def center(self) -> tuple[Tensor, Tensor]:
        return (self.left + self.right) * 0.5, (self.top + self.bottom) * 0.5

    def joined(self) -> Tensor:
        return self.left.builder.op("Concat", *self, axis=-1)

    def unsqueezed(self, axis: int) -> Corners:
        """Emit the boxes with a new axis of extent 1, to broadcast along."""
        builder = self.left.builder
        return Corners(*(builder.op("Unsqueeze", side, builder.integers([axis])) for side in self))


def check_box_format(loss: str, box_format: object) -> None:
    """Raise ConfigurationError for an unknown box format."""
    if box_format not in get_args(BoxFormat):
        raise ConfigurationError(
            f"{loss}: box_format must be 'xyxy' (two corners), 'xywh' (a corner and the size) or 'cxcywh' (the centre and the "
            f"size), not {box_format!r}"
        )


def corners(boxes: Tensor, box_format: BoxFormat = "xyxy") -> Corners:
    """Emit the sides of boxes ``[..., 4]``."""
    builder = boxes.builder
    first, second, third, fourth = builder.op("Split", boxes, builder.integers([1, 1, 1, 1]), axis=-1, outputs=4)
    if box_format == "xyxy":
        return Corners(first, second, third, fourth)
    if box_format == "xywh":
        return Corners(first, second, first + third, second + fourth)
    half_width, half_height = third * 0.5, fourth * 0.5
    return Corners(first - half_width, second - half_height, first + half_width, second + half_height)


def box_area(boxes: Corners) -> Tensor:
    """Emit the areas, ``[..., 1]``."""
    return boxes.width * boxes.height


def intersection_area(one: Corners, other: Corners) -> Tensor:
    """Emit the area that two boxes share, ``[..., 1]``: 0 if they do not touch."""
    builder = one.left.builder
    width = builder.op("Min", one.right, other.right) - builder.op("Max", one.left, other.left)
    height = builder.op("Min", one.bottom, other.bottom) - builder.op("Max", one.top, other.top)
    return builder.op("Relu", width) * builder.op("Relu", height)


def overlap(one: Corners, other: Corners, kind: OverlapKind = "iou", epsilon: float = EPSILON) -> Tensor:
    """Emit the overlap of boxes, ``[..., 1]``: 1 for identical boxes.

    ``iou`` is intersection over union. ``giou`` subtracts the share of the enclosing box that neither covers (Rezatofighi et al.
    2019). ``diou`` subtracts the squared distance of the centres over the squared diagonal of the enclosing box. ``ciou`` also
    subtracts ``alpha * v``, with v the squared difference of the angles of the diagonals and ``alpha = v / (1 - iou + v)``, which
    passes no gradient (Zheng et al. 2020).
    """
    builder = one.left.builder
    shared = intersection_area(one, other)
    union = box_area(one) + box_area(other) - shared
    iou = shared / (union + epsilon)
    if kind == "iou":
        return iou
    width = builder.op("Max", one.right, other.right) - builder.op("Min", one.left, other.left)
    height = builder.op("Max", one.bottom, other.bottom) - builder.op("Min", one.top, other.top)
    if kind == "giou":
        around = width * height
        return iou - (around - union) / (around + epsilon)
    (x, y), (other_x, other_y) = one.center, other.center
    across, down = x - other_x, y - other_y
    diou = iou - (across * across + down * down) / (width * width + height * height + epsilon)
    if kind == "diou":
        return diou
    difference = _angle(other) - _angle(one)
    v = difference * difference * (4 / math.pi**2)
    alpha = STOP_GRADIENT(v / (1.0 - iou + v + epsilon))
    return diou - alpha * v


def _angle(boxes: Corners) -> Tensor:
    """Emit the angle of the diagonals, ``atan(width / height)``; 0, without a gradient, for a box of height 0.

    A head that bounds distances from below outputs such boxes, and 0 / 0 would turn the whole loss into NaN.
    """
    builder = boxes.left.builder
    width, height = boxes.width, boxes.height
    is_flat = builder.op("Equal", height, 0.0)
    # Replace the height before dividing: an unselected NaN would still reach the gradient.
    height = builder.op("Where", is_flat, builder.scalar(1.0, height), height, like=height)
    angle = _arc_tangent(width, height)
    return builder.op("Where", is_flat, builder.scalar(0.0, angle), angle, like=angle)


def _arc_tangent(width: Tensor, height: Tensor) -> Tensor:
    """Emit ``atan(width / height)``.

    ONNX Runtime has Atan only in float32. In float64 the angle is halved four times, to below 0.1, where nine terms of the series
    are exact to the last digits: ``tan(a / 2) = tan(a) / (1 + sqrt(1 + tan(a)^2))``.
    """
    builder = width.builder
    if width.dtype != ir.DataType.DOUBLE:
        return builder.op("Atan", width / height)
    tangent = width / (height + builder.op("Sqrt", width * width + height * height))
    for _ in range(3):
        tangent = tangent / (builder.op("Sqrt", tangent * tangent + 1.0) + 1.0)
    square = tangent * tangent
    series = builder.scalar(1 / 17, tangent)
    for odd in range(15, 0, -2):
        series = 1 / odd - square * series
    return tangent * series * 16.0


@dataclass(frozen=True, kw_only=True)
class BoxLoss(LossBase):
    """``1 - overlap`` of predicted boxes ``[..., 4]`` and ``targets`` of the same shape, box by box.

    Attributes:
        box_format: format of both: ``xyxy``, two corners; ``xywh``, a corner and the size; ``cxcywh``, the centre and the size.
        epsilon: added to denominators, above 0.
        reduction: ``mean`` over the boxes, or ``sum``.
    """

    kind: ClassVar[OverlapKind]

    box_format: BoxFormat = "xyxy"
    epsilon: float = EPSILON
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)
        check_box_format(self.name, self.box_format)
        check_number(self.name, "epsilon", self.epsilon, above=0)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        (prediction,) = predictions
        shape = floating_shape(self.name, prediction)
        if not shape or (isinstance(shape[-1], int) and shape[-1] != 4):
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has shape {list(shape)}: boxes are along the last axis, which "
                "must be 4; name another output (outputs=...), or transpose it"
            )
        return (LabelSpec("targets", prediction.dtype, shape),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        self.label_specs(predictions)
        (prediction,), (target,) = predictions, labels
        check_same_shape(self.name, prediction, target)
        boxes, targets = (corners(tensor, self.box_format) for tensor in (prediction, target))
        element = 1.0 - overlap(boxes, targets, self.kind, self.epsilon)
        return mean_or_sum(element, self.reduction)


@dataclass(frozen=True, kw_only=True)
class IntersectionOverUnion(BoxLoss):
    """``1 - IoU``, with gradient 0 if two boxes do not touch; see ``BoxLoss``."""

    name = "iou"
    kind = "iou"


@dataclass(frozen=True, kw_only=True)
class GeneralizedIoU(BoxLoss):
    """``1 - GIoU`` (Rezatofighi et al. 2019), as ``torchvision.ops.generalized_box_iou_loss``; see ``BoxLoss``."""

    name = "giou"
    kind = "giou"


@dataclass(frozen=True, kw_only=True)
class DistanceIoU(BoxLoss):
    """``1 - DIoU`` (Zheng et al. 2020), as ``torchvision.ops.distance_box_iou_loss``; see ``BoxLoss``."""

    name = "diou"
    kind = "diou"


@dataclass(frozen=True, kw_only=True)
class CompleteIoU(BoxLoss):
    """``1 - CIoU`` (Zheng et al. 2020), as ``torchvision.ops.complete_box_iou_loss``; see ``BoxLoss``."""

    name = "ciou"
    kind = "ciou"


ciou = CompleteIoU
diou = DistanceIoU
giou = GeneralizedIoU
iou = IntersectionOverUnion

"""Losses of boxes: one minus how far a predicted box overlaps its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import (
    LabelSpec,
    LossBase,
    Reduction,
    Term,
    check_number,
    check_reduction,
    check_same_shape,
    floating_shape,
    size_of,
    sum_of,
)
from burnish.losses.boxes import EPSILON, BoxFormat, OverlapKind, check_box_format, corners, overlap


@dataclass(frozen=True, kw_only=True)
class BoxLoss(LossBase):
    """``1 - overlap`` of predicted boxes ``[..., 4]`` and ``targets`` of that shape, each box beside its own target.

    Attributes:
        box_format: of both: ``xyxy``, two corners; ``xywh``, a corner and the size; ``cxcywh``, the centre and the size.
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
        """Return the spec of ``targets``: dtype and shape of the prediction.

        Raises:
            ConfigurationError: the prediction is not floating-point, or does not end in an axis of 4.
        """
        (prediction,) = predictions
        shape = floating_shape(self.name, prediction)
        if not shape or (isinstance(shape[-1], int) and shape[-1] != 4):
            raise ConfigurationError(
                f"{self.name}: the prediction '{prediction.name}' has shape {list(shape)}: boxes are along the last axis, which "
                "must be 4; name another output (outputs=...), or transpose it"
            )
        return (LabelSpec("targets", prediction.dtype, shape),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term, from boxes and targets of one shape ``[..., 4]``.

        Raises:
            ConfigurationError: as ``label_specs``, or shapes that are known to differ.
        """
        self.label_specs(predictions)
        (prediction,), (target,) = predictions, labels
        check_same_shape(self.name, prediction, target)
        boxes, targets = (corners(tensor, self.box_format) for tensor in (prediction, target))
        element = 1.0 - overlap(boxes, targets, self.kind, self.epsilon)
        one = prediction.builder.scalar(1.0, prediction)
        return (Term(sum_of(element), one if self.reduction == "sum" else size_of(element, element.dtype)),)


@dataclass(frozen=True, kw_only=True)
class IntersectionOverUnion(BoxLoss):
    """``1 - IoU``: its gradient is 0 where two boxes do not touch; see ``BoxLoss``."""

    name: ClassVar[str] = "iou"
    kind: ClassVar[OverlapKind] = "iou"


@dataclass(frozen=True, kw_only=True)
class GeneralizedIoU(BoxLoss):
    """``1 - GIoU`` (Rezatofighi et al. 2019), as ``torchvision.ops.generalized_box_iou_loss``; see ``BoxLoss``."""

    name: ClassVar[str] = "giou"
    kind: ClassVar[OverlapKind] = "giou"


@dataclass(frozen=True, kw_only=True)
class DistanceIoU(BoxLoss):
    """``1 - DIoU`` (Zheng et al. 2020), as ``torchvision.ops.distance_box_iou_loss``; see ``BoxLoss``."""

    name: ClassVar[str] = "diou"
    kind: ClassVar[OverlapKind] = "diou"


@dataclass(frozen=True, kw_only=True)
class CompleteIoU(BoxLoss):
    """``1 - CIoU`` (Zheng et al. 2020), as ``torchvision.ops.complete_box_iou_loss``; see ``BoxLoss``."""

    name: ClassVar[str] = "ciou"
    kind: ClassVar[OverlapKind] = "ciou"


def iou(*, box_format: BoxFormat = "xyxy", epsilon: float = EPSILON, reduction: Reduction = "mean") -> IntersectionOverUnion:
    """Return one minus intersection over union; see ``IntersectionOverUnion``."""
    return IntersectionOverUnion(box_format=box_format, epsilon=epsilon, reduction=reduction)


def giou(*, box_format: BoxFormat = "xyxy", epsilon: float = EPSILON, reduction: Reduction = "mean") -> GeneralizedIoU:
    """Return the generalized IoU loss; see ``GeneralizedIoU``."""
    return GeneralizedIoU(box_format=box_format, epsilon=epsilon, reduction=reduction)


def diou(*, box_format: BoxFormat = "xyxy", epsilon: float = EPSILON, reduction: Reduction = "mean") -> DistanceIoU:
    """Return the distance IoU loss; see ``DistanceIoU``."""
    return DistanceIoU(box_format=box_format, epsilon=epsilon, reduction=reduction)


def ciou(*, box_format: BoxFormat = "xyxy", epsilon: float = EPSILON, reduction: Reduction = "mean") -> CompleteIoU:
    """Return the complete IoU loss; see ``CompleteIoU``."""
    return CompleteIoU(box_format=box_format, epsilon=epsilon, reduction=reduction)

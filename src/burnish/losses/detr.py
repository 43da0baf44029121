"""The set loss of DETR, which assigns each object to one prediction at the lowest total cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.losses.base import SIGMOID, Activation, Compared, LabelSpec, Reading, Term, sum_of
from burnish.losses.binary_cross_entropy import softplus
from burnish.losses.detection import DetectionLoss, Objects, check_predictions, of_object, places_along
from burnish.losses.iou import BoxFormat, Corners, check_box_format, corners, overlap
from burnish.operators.elementwise import STOP_GRADIENT
from burnish.operators.linear_assignment import LINEAR_ASSIGNMENT
from burnish.validation import check_number, require

ClassLoss = Literal["cross_entropy", "focal"]
CLASS_AXIS = 2
LEAST = 1e-8
"""Added to a probability before the logarithm in the focal cost, as in Deformable DETR."""


@dataclass(frozen=True, kw_only=True)
class Detr(DetectionLoss):
    """The set loss of DETR (Carion et al. 2020), and with ``focal`` of Deformable DETR (Zhu et al. 2021).

    It reads boxes ``[N, Q, 4]``, centre and size as fractions, and logits ``[N, Q, C + 1]`` whose last class means "no object",
    or ``[N, Q, C]`` with ``focal``. Each object gets its own prediction, such that the sum of the costs is smallest (the
    Hungarian method, in the graph; it passes no gradient)::

        cost    = class_cost * -p[label]  +  l1_weight * |box - object|_1  -  giou_weight * GIoU
        classes = sum of w[label] * -log p[label] / sum of w, with w = no_object_weight for no object, otherwise 1
        l1      = l1_weight * sum over objects of |box - object|_1 / objects
        giou    = giou_weight * sum over objects of (1 - GIoU) / objects

    With ``focal`` each class is a yes-or-no question under the focal loss, divided by the number of objects, and the class cost
    is the focal loss of yes minus that of no. If a picture has more objects than predictions, the most expensive ones get none.

    Attributes:
        class_loss: ``cross_entropy`` or ``focal``.
        class_weight, l1_weight, giou_weight: weights of the terms, 0 or more.
        class_cost: weight of the class in the assignment, 0 or more.
        no_object_weight: weight of predictions without an object, above 0.
        alpha, gamma: parameters of the focal loss.
        box_format: format of the model's boxes.
    """

    name = "detr"

    class_loss: ClassLoss = "cross_entropy"
    class_weight: float = 1.0
    l1_weight: float = 5.0
    giou_weight: float = 2.0
    class_cost: float = 1.0
    no_object_weight: float = 0.1
    alpha: float = 0.25
    gamma: float = 2.0
    box_format: BoxFormat = "cxcywh"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_box_format(self.name, self.box_format)
        require(self.class_loss in get_args(ClassLoss), self.name, "class_loss", self.class_loss, "'cross_entropy' or 'focal'")
        for option in ("class_weight", "l1_weight", "giou_weight", "class_cost", "gamma"):
            check_number(self.name, option, getattr(self, option), minimum=0)
        check_number(self.name, "no_object_weight", self.no_object_weight, above=0)
        require(0 <= check_number(self.name, "alpha", self.alpha) <= 1, self.name, "alpha", self.alpha, "between 0 and 1")

    @property
    def is_focal(self) -> bool:
        return self.class_loss == "focal"

    @property
    def readings(self) -> tuple[Reading, ...]:
        softmax = Activation(("Softmax", "LogSoftmax"), CLASS_AXIS)
        return Reading(self.output(0)), Reading(self.output(1), SIGMOID if self.is_focal else softmax, position=1)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        scores = check_predictions(
            self, predictions, [one.name for one in predictions], None, 4, ("classes" if self.is_focal else "classes + 1", "")
        )
        classes = scores if self.is_focal else scores - 1
        if classes < 1:
            raise ConfigurationError(
                f"{self.name}: the scores '{predictions[1].name}' are of {scores} class, and the last is of no object: nothing "
                "would be found; with class_loss='focal' every score is one of a class"
            )
        return self.object_specs(predictions[0], classes)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit the terms ``classes``, ``l1`` and ``giou``."""
        self.label_specs(predictions)
        boxes, scores = predictions
        builder = boxes.builder
        objects = self.objects(labels)
        row = LINEAR_ASSIGNMENT(self._cost(STOP_GRADIENT(boxes), STOP_GRADIENT(scores), objects), objects.counts)
        found = builder.op("GreaterOrEqual", row, 0)
        index = builder.op("Max", row, builder.scalar(0, row), like=row)
        mask = builder.cast(found, boxes.dtype)
        count = sum_of(builder.cast(objects.counts, boxes.dtype))
        column = builder.op("Unsqueeze", found, builder.integers([2]))
        sides = corners(boxes, self.box_format)
        goal = of_object(objects.boxes.joined(), index)
        goal = builder.op("Where", column, goal, STOP_GRADIENT(sides.joined()), like=goal)
        distance = builder.op("Abs", _centred(sides) - _centred(corners(goal)))
        distance = builder.op("ReduceSum", distance, builder.integers([2]), keepdims=0)
        error = 1.0 - builder.op("Squeeze", overlap(sides, corners(goal), "giou"), builder.integers([2]))
        return (
            self._classes(scores, of_object(objects.labels, index), found, count),
            Term(sum_of(distance * mask), count, self.l1_weight, "l1"),
            Term(sum_of(error * mask), count, self.giou_weight, "giou"),
        )

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared:
        boxes, scores = predictions
        builder = boxes.builder
        sides = corners(boxes, self.box_format).joined()
        if self.is_focal:
            return self.detected(sides, builder.op("Sigmoid", scores), labels, None)
        # Drop the last class, which means no object.
        ends = (builder.integers([number]) for number in (0, -1, CLASS_AXIS))
        return self.detected(sides, builder.op("Slice", builder.op("Softmax", scores, axis=CLASS_AXIS), *ends), labels, None)

    def _cost(self, boxes: Tensor, scores: Tensor, objects: Objects) -> Tensor:
        """Emit the cost of assigning each prediction to each object, ``[N, M, Q]``."""
        builder = boxes.builder
        by_class = builder.op("Transpose", self._class_cost(scores), perm=[0, 2, 1])
        sides = corners(boxes, self.box_format)
        distance = builder.op("Unsqueeze", _centred(objects.boxes), builder.integers([2])) - builder.op(
            "Unsqueeze", _centred(sides), builder.integers([1])
        )
        distance = builder.op("ReduceSum", builder.op("Abs", distance), builder.integers([3]), keepdims=0)
        shared = overlap(objects.boxes.unsqueezed(2), sides.unsqueezed(1), "giou")
        shared = builder.op("Squeeze", shared, builder.integers([3]))
        return of_object(by_class, objects.labels) * self.class_cost + distance * self.l1_weight - shared * self.giou_weight

    def _class_cost(self, scores: Tensor) -> Tensor:
        builder = scores.builder
        if not self.is_focal:
            return -builder.op("Softmax", scores, axis=CLASS_AXIS)
        p = builder.op("Sigmoid", scores)
        yes = (1.0 - p) ** self.gamma * -builder.op("Log", p + LEAST) * self.alpha
        return yes - p**self.gamma * -builder.op("Log", 1.0 - p + LEAST) * (1 - self.alpha)

    def _classes(self, scores: Tensor, label: Tensor, found: Tensor, count: Tensor) -> Term:
        builder = scores.builder
        column = builder.integers([CLASS_AXIS])
        if self.is_focal:
            is_label = builder.op("Equal", builder.op("Unsqueeze", label, column), places_along(scores, CLASS_AXIS))
            is_yes = builder.op("And", is_label, builder.op("Unsqueeze", found, column))
            yes = builder.cast(is_yes, scores.dtype)
            no = 1.0 - yes
            wrong = builder.op("Sigmoid", scores) * no + builder.op("Sigmoid", -scores) * yes
            element = (no * scores + softplus(-scores)) * wrong**self.gamma * (yes * self.alpha + no * (1 - self.alpha))
            return Term(sum_of(element), count, self.class_weight, "classes")
        last = builder.op("Squeeze", builder.op("Shape", scores, start=CLASS_AXIS) - builder.integers([1]), shape=())
        label = builder.op("Where", found, label, last, like=label)
        log_p = builder.op("LogSoftmax", scores, axis=CLASS_AXIS)
        picked = builder.op("GatherElements", log_p, builder.op("Unsqueeze", label, column), axis=CLASS_AXIS)
        picked = builder.op("Squeeze", picked, column, shape=label.shape)
        rest, one = builder.scalar(self.no_object_weight, picked), builder.scalar(1.0, picked)
        weight = builder.op("Where", found, one, rest, like=picked)
        return Term(sum_of(-picked * weight), sum_of(weight), self.class_weight, "classes")


def _centred(boxes: Corners) -> Tensor:
    return boxes.left.builder.op("Concat", *boxes.center, boxes.width, boxes.height, axis=-1)


detr = Detr

"""The interface of a loss: the outputs it reads, the labels it compares them with, and the terms it adds up.

Every term is ``coefficient * total / weight``. Totals and weights stay separate so that batches, replicas and clients of any size
add up exactly. ``average`` does the division, ``combined`` sums the terms.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast, runtime_checkable

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor, same_shape
from burnish.operators.loss import CLASS_AXIS
from burnish.settings import NamedSettings
from burnish.validation import check_choice

Reduction = Literal["mean", "sum"]
Scale = Literal["logits", "probabilities", "log_probabilities", "scores"]
"""Encodings of a class or a yes-or-no answer in a prediction; scores are only compared, with each other or with 0."""
Extents = tuple[int | str | None, ...]


@dataclass(frozen=True)
class LabelSpec:
    """An input that a loss compares predictions with.

    Attributes:
        name: name of the graph input: ``labels`` (class indices), ``targets`` (values), or another input of the loss.
        dtype: ONNX element type.
        shape: extents; a string is a symbolic dimension (the batch), None an unknown one.
        minimum, maximum: smallest and largest valid value; None if unbounded or unknown.
        ignored: for class indices, the one value outside that range that is also valid.
        two_values: True if only the minimum and the maximum are valid, and nothing between them.
    """

    name: str
    dtype: ir.DataType
    shape: Extents
    minimum: int | None = None
    maximum: int | None = None
    ignored: int | None = None
    two_values: bool = False


@dataclass(frozen=True)
class Activation:
    """An activation that a loss applies itself; at the end of a model, ``compile`` steps over it.

    Attributes:
        operators: the standard operators that compute it.
        axis: the axis of the operators, -1 for the last; None if they work elementwise.
    """

    operators: tuple[str, ...]
    axis: int | None = None


SOFTMAX = Activation(("Softmax", "LogSoftmax"), CLASS_AXIS)
SIGMOID = Activation(("Sigmoid",))


@dataclass(frozen=True)
class Reading:
    """One output of the model that a loss reads.

    Attributes:
        output: name of the output; None leaves the choice to ``compile`` and its ``outputs``.
        activation: an activation to step over at the end of the model.
        position: index into the outputs given to ``compile``; unused if ``output`` is set.
        takes: scale that the loss expects if it applies no activation; None for any numbers.
        class_axis: axis of the classes, for a loss that applies no activation along it.
    """

    output: str | None = None
    activation: Activation | None = None
    position: int = 0
    takes: Scale | None = None
    class_axis: int | None = None

    @property
    def classes_along(self) -> int | None:
        """The axis of the classes, -1 for the last; None if elements are read one by one."""
        return self.class_axis if self.activation is None else self.activation.axis


class Term(NamedTuple):
    """One summand of a loss: ``coefficient * total / weight``.

    Attributes:
        total: the sum over a batch, a scalar in the prediction's dtype.
        weight: the divisor of that sum, a scalar of the same dtype.
        coefficient: factor of the summand in the loss.
        name: name in reports; empty if the loss has only this term.
        of_batch: True for a figure of the whole batch, with no number of samples to weigh it by. Reports then show its average
            over batches, although its weight is 1.
    """

    total: Tensor
    weight: Tensor
    coefficient: float = 1.0
    name: str = ""
    of_batch: bool = False


class Detections(NamedTuple):
    """Input of the detection metrics, for N pictures with A boxes, C classes and at most M objects each.

    Attributes:
        boxes: two corners, as fractions of a picture, ``[N, A, 4]``.
        scores: probabilities, ``[N, A, C]``.
        labels: classes of the objects, int64 ``[N, M]``, -1 for no object.
        objects: boxes of the objects, ``[N, M, 4]``.
        crowd: 1 for an object that does not count, int64 ``[N, M]``; None if all count.
        areas: areas of the objects in pixels, ``[N, M]``; None if unknown.
        sizes: height and width of the pictures, ``[N, 2]``; None if unknown.
        suppression: overlap above which the less likely of two boxes of a class is dropped; None keeps all.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    objects: Tensor
    crowd: Tensor | None
    areas: Tensor | None
    sizes: Tensor | None
    suppression: float | None


class Compared(NamedTuple):
    """Input of a metric: a prediction, its label, and the loss that compares them.

    Attributes:
        prediction: the prediction as the loss reads it.
        label: the label or target.
        loss: the loss.
        spec: the valid values of the label.
        scale: how the prediction encodes a class or a yes-or-no answer; None if it does neither.
        detections: the detections, for losses of detectors.
    """

    prediction: Tensor
    label: Tensor
    loss: Loss
    spec: LabelSpec
    scale: Scale | None = None
    detections: Detections | None = None


@runtime_checkable
class Loss(Protocol):
    """The protocol of a loss; ``LossBase`` implements the parts that most losses share.

    Attributes:
        name: name in ``burnish.losses.get``.
        readings: the outputs of the model that it reads.
        default_metrics: names of the metrics reported if the user asks for none.
    """

    @property
    def name(self) -> str: ...

    @property
    def readings(self) -> tuple[Reading, ...]: ...

    @property
    def default_metrics(self) -> tuple[str, ...]: ...

    def bind(self, outputs: Sequence[str]) -> Loss:
        """Return the loss for a model with outputs of these names; most losses return themselves."""
        ...

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        """Return the inputs that the predictions (one per reading) are compared with.

        Raises:
            ConfigurationError: the loss cannot read such a prediction.
        """
        ...

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit the terms, from one prediction per reading and one label per spec.

        Raises:
            ConfigurationError: the loss cannot read such a prediction.
        """
        ...

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        """Return the input of the metrics, or None if there is nothing to compare."""
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values, from which ``get`` rebuilds the loss."""
        ...


class LossBase(NamedSettings):
    """Base of losses that are frozen dataclasses: they read one prediction, and their fields are the settings."""

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return ()

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (Reading(),)

    @property
    def scale(self) -> Scale | None:
        """The encoding of the prediction for metrics; None if it encodes neither a class nor yes or no."""
        return None

    def bind(self, outputs: Sequence[str]) -> Self:
        return self

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        if not labels:
            return None
        loss = cast(Loss, self)
        return Compared(predictions[0], labels[0], loss, loss.label_specs(predictions)[0], self.scale)


def average(total: Tensor, weight: Tensor) -> Tensor:
    """Emit ``total / weight``, and 0 (with gradient 0) if both are 0, as in a batch of ignored labels."""
    builder = total.builder
    nothing = builder.op("Equal", weight, 0.0)
    # With weight 0 the total is 0 too: dividing by 1 gives loss 0 and gradient 0.
    return total / builder.op("Where", nothing, builder.scalar(1.0, weight), weight, like=weight)


def combined(terms: Sequence[Term]) -> Tensor:
    """Emit the loss: the sum of ``coefficient * average(total, weight)``, a scalar of the first term's dtype."""
    loss: Tensor | None = None
    for term in terms:
        summand = average(term.total, term.weight)
        if term.coefficient != 1.0:
            summand = summand * term.coefficient
        loss = summand if loss is None else loss + summand.builder.cast(summand, loss.dtype)
    assert loss is not None, "a loss has at least one term"
    return loss


def sum_of(tensor: Tensor) -> Tensor:
    """Emit the sum of all elements, a scalar."""
    return tensor.builder.op("ReduceSum", tensor, keepdims=0)


def size_of(tensor: Tensor, dtype: ir.DataType) -> Tensor:
    """Emit the number of elements, a scalar of ``dtype``."""
    return tensor.builder.cast(tensor.builder.op("Size", tensor), dtype)


def mean_or_sum(elements: Tensor, reduction: str) -> tuple[Term, ...]:
    """Emit the term of a loss that is the mean or the sum of its elements."""
    one = elements.builder.scalar(1.0, elements)
    return (Term(sum_of(elements), one if reduction == "sum" else size_of(elements, elements.dtype)),)


def samples_of(tensor: Tensor, dtype: ir.DataType, axis: int = 0) -> Tensor:
    """Emit the extent along an axis, a scalar of ``dtype``."""
    builder = tensor.builder
    extent = builder.op("Squeeze", builder.op("Shape", tensor, start=axis, end=axis + 1), builder.integers([0]), shape=())
    return builder.cast(extent, dtype)


def check_reduction(loss: str, reduction: object, reductions: Sequence[str] = ("mean", "sum")) -> None:
    """Raise ConfigurationError for a reduction that is not in ``reductions``."""
    check_choice(loss, "reduction", reduction, reductions)


def floating_shape(loss: str, prediction: Tensor) -> Extents:
    """Return the extents of a prediction.

    Raises:
        ConfigurationError: the prediction is not floating-point, or its rank is unknown.
    """
    if not prediction.dtype.is_floating_point():
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' is {prediction.dtype.name}, not floating-point: "
            "name the output that holds the model's scores or values (outputs=...)"
        )
    if prediction.shape is None:
        raise ConfigurationError(
            f"{loss}: the shape of the prediction '{prediction.name}' is not known, not even its rank: "
            "give the model's output a shape, in which any dimension may be symbolic"
        )
    return tuple(dimension if isinstance(dimension, int) else dimension.value for dimension in prediction.shape.dims)


def check_same_shape(loss: str, prediction: Tensor, other: Tensor) -> None:
    """Raise ConfigurationError if two shapes are known to differ."""
    if prediction.shape is None or other.shape is None or same_shape(prediction.shape, other.shape):
        return
    left, right = prediction.shape.dims, other.shape.dims
    pairs = zip(left, right, strict=False)
    if len(left) != len(right) or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
        raise ConfigurationError(
            f"{loss}: the prediction '{prediction.name}' has shape {prediction.shape} and '{other.name}' {other.shape}: "
            "they must be the same, and are not broadcast"
        )


@dataclass(frozen=True, kw_only=True)
class ElementwiseLoss(LossBase):
    """A loss with one number per element; its input ``targets`` has the prediction's dtype and shape.

    Attributes:
        label_range: smallest and largest valid target, None for no bound.
        are_two_values: True if no target between them is valid.
        reduction: ``mean`` over every element of the batch, or ``sum`` (the sum of weights is then the constant 1).
    """

    label_range: ClassVar[tuple[int | None, int | None]] = (None, None)
    are_two_values: ClassVar[bool] = False

    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.name, self.reduction)

    @abstractmethod
    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emit the loss of each element, in the prediction's shape."""

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        (prediction,) = predictions
        minimum, maximum = self.label_range
        shape = floating_shape(self.name, prediction)
        return (LabelSpec("targets", prediction.dtype, shape, minimum, maximum, two_values=self.are_two_values),)

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit one term: the sum over all elements, and their number. Both inputs have the same shape.

        Raises:
            ConfigurationError: the prediction is not floating-point, or the shapes are known to differ.
        """
        (prediction,), (target,) = predictions, labels
        floating_shape(self.name, prediction)
        check_same_shape(self.name, prediction, target)
        return (Term(sum_of(self.elements(prediction, target)), self.weight(prediction)),)

    def weight(self, prediction: Tensor) -> Tensor:
        """Emit the divisor of the sum, a scalar of the prediction's dtype."""
        if self.reduction == "sum":
            return prediction.builder.scalar(1.0, prediction)
        return size_of(prediction, prediction.dtype)


@dataclass(frozen=True, kw_only=True)
class Wrapping(NamedSettings):
    """Base of losses that wrap another loss and read the same outputs.

    Attributes:
        loss: the wrapped loss.
    """

    loss: Loss

    @property
    def readings(self) -> tuple[Reading, ...]:
        return self.loss.readings

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return self.loss.default_metrics

    @property
    def scale(self) -> Scale | None:
        return getattr(self.loss, "scale", None)

    def bind(self, outputs: Sequence[str]) -> Self:
        return replace(self, loss=self.loss.bind(outputs))

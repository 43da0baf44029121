"""Knowledge distillation: a model learns from a larger one, with or without labels."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import onnx
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor, model_proto
from burnish.importer import load
from burnish.losses.base import (
    Compared,
    LabelSpec,
    Loss,
    Reading,
    Scale,
    Term,
    check_same_shape,
    floating_shape,
    size_of,
    sum_of,
)
from burnish.losses.cross_entropy import CrossEntropy
from burnish.losses.onnx_losses import inlined
from burnish.losses.registry import LossLike, get
from burnish.operators.elementwise import STOP_GRADIENT
from burnish.operators.loss import CLASS_AXIS
from burnish.settings import PlainSettings
from burnish.validation import check_number, require

TEACHER_LOGITS = "teacher_logits"
Projection = Literal["auto", "never", "always"]
TeacherSource = str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model


@dataclass(frozen=True)
class Hint(PlainSettings):
    """A value of the student that learns to match a value of the teacher.

    Attributes:
        student, teacher: their names in the two models.
        projected: the student's value after the projection that ``compile`` added; empty without one.
    """

    student: str
    teacher: str
    projected: str = ""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A teacher prepared by ``compile``: in inference form, with only the values to read as outputs.

    Attributes:
        model: a model whose outputs are the logits, then one value per hint.
        inputs: input of the teacher -> input of the student that it reads.
        limit: the student's dimension that must be 1 because the teacher takes one sample, and why it cannot be opened; None if
            the teacher takes as many samples as the student.
    """

    model: ir.Model
    inputs: Mapping[str, str]
    limit: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Distillation(PlainSettings):
    """Knowledge distillation (Hinton et al. 2015), with hints on layers (Romero et al. 2015, FitNets)::

        alpha * T^2 * KL(softmax(teacher / T) || softmax(student / T))  +  (1 - alpha) * loss  +  hint_weight * sum of hints

    The divergence is averaged over samples and positions, except positions with a label that the loss ignores. T^2 keeps the
    gradients of the first two summands at the same scale for any T. A hint is the mean squared difference of a student's and a
    teacher's value, over all elements. The teacher gets no gradient: its weights are constants of the program.

    Attributes:
        loss: loss of the labels; with alpha = 1 it is unused, and the data need no labels.
        teacher: path or bytes of an ONNX file; None if the data hold ``teacher_logits``, in the shape of the student's logits.
        temperature: T, above 0; larger values give small probabilities more weight.
        alpha: between 0 and 1.
        hints: pairs of values.
        hint_weight: 0 or more.
        projection: when to pass a student's hint through a learned projection of its channels (a 1x1 convolution, or a matrix
            over the last axis): ``auto``, if the channels differ; ``always``; or ``never``.
        teacher_output: the output with the teacher's logits; None if only one output qualifies.
        prepared: the teacher as ``compile`` prepared it.
    """

    name = "distill"

    loss: Loss
    teacher: str | bytes | None = None
    temperature: float = 4.0
    alpha: float = 0.5
    hints: tuple[Hint, ...] = ()
    hint_weight: float = 1.0
    projection: Projection = "auto"
    teacher_output: str | None = None
    prepared: Teacher | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_number(self.name, "temperature", self.temperature, above=0)
        check_number(self.name, "hint_weight", self.hint_weight, minimum=0)
        require(0 <= check_number(self.name, "alpha", self.alpha) <= 1, self.name, "alpha", self.alpha, "between 0 and 1")
        require(self.projection in get_args(Projection), self.name, "projection", self.projection, "'auto', 'never' or 'always'")
        if self.alpha == 0 and not (self.hints and self.hint_weight):
            raise ConfigurationError(f"{self.name}: alpha=0 learns nothing of the teacher: give one above 0, or layers")
        if self.hint_weight != 1 and not self.hints:
            raise ConfigurationError(f"{self.name}: hint_weight={self.hint_weight:g} is for layers: give some, or leave it out")
        if not reads_classes(self.loss):
            raise ConfigurationError(
                f"{self.name}: a student learns the probabilities of classes, and the loss {self.loss.name} reads no logits of "
                "classes: give a loss such as cross_entropy, focal or dice"
            )
        if self.teacher is None and (self.hints or self.teacher_output is not None):
            option = "layers" if self.hints else "teacher_output"
            raise ConfigurationError(
                f"{self.name}: {option} is of a teacher, and there is none: give teacher='teacher.onnx', or leave {option} out"
            )

    @property
    def readings(self) -> tuple[Reading, ...]:
        return (*self.loss.readings, *(Reading(hint.projected or hint.student) for hint in self.hints))

    @property
    def default_metrics(self) -> tuple[str, ...]:
        return self.loss.default_metrics if self.alpha < 1 else ()

    @property
    def scale(self) -> Scale | None:
        return getattr(self.loss, "scale", None)

    @property
    def axis(self) -> int:
        activation = self.loss.readings[0].activation
        assert activation is not None
        assert activation.axis is not None
        return activation.axis

    def bind(self, outputs: Sequence[str]) -> Distillation:
        return replace(self, loss=self.loss.bind(outputs))

    def source(self, batch: str | None = None) -> ir.Model:
        """Return the model of the teacher; ``batch`` as in ``burnish.load``.

        Raises:
            ModelError: the teacher is not a valid ONNX model.
            ConfigurationError, UnsupportedOperatorError: its batch cannot be opened.
        """
        assert self.teacher is not None
        return load(self.teacher, batch=batch)

    def label_specs(self, predictions: Sequence[Tensor]) -> tuple[LabelSpec, ...]:
        specs = self.loss.label_specs(predictions[:1]) if self.alpha < 1 else ()
        if self.teacher is not None:
            return specs
        prediction = predictions[0]
        return (*specs, LabelSpec(TEACHER_LOGITS, prediction.dtype, floating_shape(self.name, prediction)))

    def terms(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> tuple[Term, ...]:
        """Emit the terms ``soft``, ``hard`` and ``hint:<value>``, as far as alpha and the hints enable them.

        Raises:
            ConfigurationError: ``label_specs`` rejects the predictions, or logits or hints differ in shape from the teacher's.
        """
        hard = list(labels) if self.teacher is not None else list(labels[:-1])
        logits, *values = predictions
        theirs, *hints = self._teacher_outputs(logits) if self.teacher is not None else (labels[-1],)
        own = self.loss.terms([logits], hard) if self.alpha < 1 else ()
        terms = []
        if self.alpha > 0:
            check_same_shape(f"{self.name}: the teacher", logits, theirs)
            terms.append(self._soft(logits, theirs, hard, own))
        for term in own:
            name = f"hard:{term.name}" if term.name else "hard"
            terms.append(term._replace(coefficient=term.coefficient * (1 - self.alpha), name=name))
        for hint, value, aim in zip(self.hints, values, hints, strict=True):
            check_same_shape(f"{self.name}: the hint for '{hint.student}'", value, aim)
            difference = value - value.builder.cast(aim, value.dtype)
            total = sum_of(difference * difference)
            terms.append(Term(total, size_of(value, value.dtype), self.hint_weight, f"hint:{hint.student}"))
        return tuple(terms)

    def compared(self, predictions: Sequence[Tensor], labels: Sequence[Tensor]) -> Compared | None:
        if self.alpha == 1:
            return None
        hard = labels if self.teacher is not None else labels[:-1]
        return self.loss.compared(predictions[:1], hard)

    def options(self) -> dict[str, Any]:
        teacher = self.teacher
        return {
            "name": self.name,
            "teacher": {"model": base64.b64encode(teacher).decode()} if isinstance(teacher, bytes) else teacher,
            "temperature": self.temperature,
            "alpha": self.alpha,
            "loss": self.loss.options(),
            "layers": [list(asdict(hint).values()) for hint in self.hints],
            "hint_weight": self.hint_weight,
            "projection": self.projection,
            "teacher_output": self.teacher_output,
        }

    def _soft(self, logits: Tensor, theirs: Tensor, labels: Sequence[Tensor], own: Sequence[Term]) -> Term:
        builder = logits.builder
        axis = self.axis
        log_p = builder.op("LogSoftmax", logits / self.temperature, axis=axis)
        log_q = builder.op("LogSoftmax", STOP_GRADIENT(builder.cast(theirs, logits.dtype)) / self.temperature, axis=axis)
        divergence = builder.op("ReduceSum", builder.op("Exp", log_q) * (log_q - log_p), builder.integers([axis]), keepdims=0)
        weight = size_of(divergence, divergence.dtype)
        ignored = self.loss.label_specs([logits])[0].ignored if labels else None
        if ignored is not None:
            counts = builder.cast(builder.op("Not", builder.op("Equal", labels[0], ignored)), divergence.dtype)
            divergence, weight = divergence * counts, sum_of(counts)
        if own and isinstance(self.loss, CrossEntropy) and self.loss.weight is None and self.loss.reduction == "mean":
            weight = own[0].weight  # the same number, so that an accumulation weighs both terms alike
        return Term(sum_of(divergence), weight, self.alpha * self.temperature**2, "soft")

    def _teacher_outputs(self, logits: Tensor) -> tuple[Tensor, ...]:
        builder = logits.builder
        if self.prepared is None:
            raise ConfigurationError(
                f"{self.name}: the teacher reads the inputs of the model, which burnish.compile knows: compile with this loss"
            )
        inputs = {value.name: builder.tensor(value) for value in builder.graph.inputs}
        read = {theirs: inputs[ours] for theirs, ours in self.prepared.inputs.items()}
        outputs = inlined(self.prepared.model, builder, read, f"{self.name}: the teacher")
        return tuple(STOP_GRADIENT(output) for output in outputs)


def reads_classes(loss: Loss) -> bool:
    """True if a loss reads only logits of classes, so that a student can also learn a teacher's probabilities."""
    readings = loss.readings
    return len(readings) == 1 and readings[0].activation is not None and readings[0].activation.axis is not None


def distill(
    teacher: TeacherSource | Mapping[str, str] | None = None,
    *,
    temperature: float = 4.0,
    alpha: float = 0.5,
    loss: LossLike = "cross_entropy",
    layers: Mapping[str, str] | Sequence[Sequence[str]] = (),
    hint_weight: float = 1.0,
    projection: Projection = "auto",
    teacher_output: str | None = None,
) -> Distillation:
    """Return the loss of a student that learns from a teacher; see ``Distillation``.

    Args:
        teacher: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; None if the data hold ``teacher_logits``. A program stores
            the path of a file, and the whole model otherwise.
        temperature, alpha, hint_weight, projection, teacher_output: see ``Distillation``.
        loss: loss of the labels; anything that ``get`` takes.
        layers: ``{value of the student: value of the teacher}``, or such pairs.

    Raises:
        ConfigurationError: an option out of range, layers that are not pairs of names, or a loss that reads no classes.
        ModelError: a teacher in memory that is not a valid ONNX model.
    """
    return Distillation(
        loss=get(loss),
        teacher=_teacher(teacher),
        temperature=temperature,
        alpha=alpha,
        hints=_hints(layers),
        hint_weight=hint_weight,
        projection=projection,
        teacher_output=teacher_output,
    )


def _teacher(teacher: TeacherSource | Mapping[str, str] | None) -> str | bytes | None:
    if teacher is None or isinstance(teacher, str | bytes):
        return teacher
    if isinstance(teacher, os.PathLike):
        return os.fspath(teacher)
    if isinstance(teacher, Mapping):
        return base64.b64decode(teacher["model"])
    return model_proto(load(teacher)).SerializeToString(deterministic=True)


def _hints(layers: Any) -> tuple[Hint, ...]:
    pairs = layers.items() if isinstance(layers, Mapping) else layers
    hints = []
    for pair in pairs if isinstance(pairs, Sequence) or isinstance(layers, Mapping) else [pairs]:
        names = tuple(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else ()
        if len(names) not in (2, 3) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"{Distillation.name}: layers are {{value of the student: value of the teacher}}, or pairs of such names, "
                f"not {layers!r}"
            )
        hints.append(Hint(*names))
    return tuple(hints)


def channel_axis(rank: int) -> int:
    """Return the channel axis of a layer's value: axis 1 for pictures, otherwise the last."""
    return CLASS_AXIS if rank > 3 else rank - 1

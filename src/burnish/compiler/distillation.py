"""Prepare the teacher of a distillation loss: its inference form, checks, and projections of the student's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from burnish.compiler.predictions import find_predictions
from burnish.compiler.selection import ModelState
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.graph import Builder, Names, same_dimension
from burnish.graph.annotations import CLASSES, PIXELS, TEXT
from burnish.graph.shapes import has_sixteen_bit_values
from burnish.losses import Distillation, Loss, Reading, WeightedSum
from burnish.losses.distillation import Hint, Teacher, channel_axis
from burnish.modes import bind_inference
from burnish.norms import ExtentRule
from burnish.rewriting.change_dtypes import compute_in_float32
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.stages import RECOGNIZED

SAME_DATA = {PIXELS: "pixels", TEXT: "texts", CLASSES: "classes"}
"""Metadata that both models must agree on, with the word for the data in messages."""


def prepare_teachers(loss: Loss, forms: Sequence[ir.Model]) -> Loss:
    """Return the loss with its teachers, ready to be put into a graph together with the student.

    Args:
        loss: the loss.
        forms: the student, in each form that graphs are built from; projections are added to them, and their values do not
            change.

    Raises:
        ModelError: a teacher is not a valid ONNX model.
        ConfigurationError: a teacher reads other inputs or other data than the student, or an output or layer does not exist.
    """
    if isinstance(loss, WeightedSum):
        summands = (replace(summand, loss=prepare_teachers(summand.loss, forms)) for summand in loss.summands)
        return WeightedSum(tuple(summands))
    if not isinstance(loss, Distillation) or loss.teacher is None:
        return loss
    student = forms[-1]
    teacher, limit = _teacher_of(loss, student.graph)
    RECOGNIZED.run(teacher, None)
    inputs = _shared_inputs(student.graph, teacher.graph)
    _check_data(student, teacher)
    if has_sixteen_bit_values(teacher):
        teacher = teacher.clone()
        compute_in_float32(teacher)
    readings = (loss.loss.readings[0], *(Reading(hint.teacher) for hint in loss.hints))
    try:
        read = find_predictions(teacher, loss.teacher_output, readings, loss.name)
    except ConfigurationError as error:
        raise ConfigurationError(f"{loss.name}: the teacher: {error} (teacher_output, layers)") from error
    teacher.graph.outputs.clear()
    teacher.graph.outputs.extend(prediction.value for prediction in read)
    fold_constants(teacher)
    bind_inference(teacher.graph)
    hints = tuple(_projected(loss, hint, prediction.value, forms) for hint, prediction in zip(loss.hints, read[1:], strict=True))
    return replace(loss, prepared=Teacher(model=teacher, inputs=inputs, limit=limit), hints=hints)


def _teacher_of(loss: Distillation, student: ir.Graph) -> tuple[ir.Model, tuple[str, str] | None]:
    """Return the teacher of a loss and its ``limit``. A teacher for a single sample is opened if the student takes any number."""
    teacher = loss.source()
    pairs = _shared_inputs(student, teacher.graph)
    ours, theirs = ({value.name or "": value.shape for value in graph.inputs} for graph in (student, teacher.graph))
    opens = [_open_for_one(theirs[name], ours[other]) for name, other in pairs.items()]
    if not any(opens):
        return teacher, None
    try:
        return loss.source(batch="open"), None
    except (ConfigurationError, UnsupportedOperatorError) as error:
        return teacher, (next(filter(None, opens)), str(error))


def _open_for_one(teacher: ir.Shape | None, student: ir.Shape | None) -> str | None:
    """Return the first open dimension of the student's input if the teacher has an extent of 1 there; else None."""
    pairs = () if teacher is None or student is None else zip(teacher.dims, student.dims, strict=False)
    own, extent = next(((own, extent) for own, extent in pairs if not isinstance(extent, int)), (None, None))
    return extent.value if own == 1 and extent is not None else None


def teacher_rules(loss: Loss) -> tuple[ExtentRule, ...]:
    """Return the rules that the teachers of a loss set for the batch."""
    if isinstance(loss, WeightedSum):
        return tuple(rule for summand in loss.summands for rule in teacher_rules(summand.loss))
    if not isinstance(loss, Distillation) or loss.prepared is None or loss.prepared.limit is None:
        return ()
    dimension, cause = loss.prepared.limit
    return (ExtentRule(dimension, loss.name, maximum=1, cause=cause),)


def has_teacher(loss: Loss) -> bool:
    """True if a loss runs a teacher on the inputs of the student."""
    if isinstance(loss, WeightedSum):
        return any(has_teacher(summand.loss) for summand in loss.summands)
    return isinstance(loss, Distillation) and loss.teacher is not None


def with_projections(state: ModelState, graph: ir.Graph, loss: Loss) -> ModelState:
    """Return the state with the weights of projections. They always train, because no output of the model reads them."""
    if isinstance(loss, WeightedSum):
        for summand in loss.summands:
            state = with_projections(state, graph, summand.loss)
        return state
    if not isinstance(loss, Distillation):
        return state
    values = {output.name: node for node in graph for output in node.outputs}
    readers = (values[hint.projected].inputs[1] for hint in loss.hints if hint.projected)
    weights = tuple(weight.name or "" for weight in readers if weight is not None)
    return replace(
        state,
        parameters=(*state.parameters, *(name for name in weights if name not in state.parameters)),
        trainable=(*state.trainable, *(name for name in weights if name not in state.trainable)),
        unreached=tuple(name for name in state.unreached if name not in weights),
    )


def _shared_inputs(student: ir.Graph, teacher: ir.Graph) -> dict[str, str]:
    """Return the student's input for each input of the teacher: the one of the same name, or the only one of both."""
    ours, theirs = ({value.name or "": value for value in graph.inputs} for graph in (student, teacher))
    pairs = dict(zip(theirs, ours, strict=True)) if len(ours) == len(theirs) == 1 else {name: name for name in theirs}
    for name, other in pairs.items():
        if other not in ours:
            raise ConfigurationError(
                f"distill: the teacher reads '{name}', and the inputs of the model are {', '.join(map(repr, ours))}: both read "
                "the same batch, so rename its input, or compute its logits before (teacher_logits in the data, without a "
                "teacher)"
            )
        value, own = theirs[name], ours[other]
        if value.dtype != own.dtype or not _fits(value.shape, own.shape):
            raise ConfigurationError(
                f"distill: the teacher reads '{name}' as {value.dtype} of shape {value.shape}, and the model's input '{other}' "
                f"is {own.dtype} of shape {own.shape}: both read the same batch, so take a teacher for such inputs, or compute "
                "its logits before (teacher_logits in the data, without a teacher)"
            )
    return pairs


def _fits(one: ir.Shape | None, other: ir.Shape | None) -> bool:
    if one is None or other is None:
        return True
    pairs = list(zip(one.dims, other.dims, strict=False))
    return len(one) == len(other) and all(not isinstance(a, int) or not isinstance(b, int) or a == b for a, b in pairs)


def _check_data(student: ir.Model, teacher: ir.Model) -> None:
    for annotation, what in SAME_DATA.items():
        key = annotation.key
        ours, theirs = student.metadata_props.get(key), teacher.metadata_props.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigurationError(
                f"distill: the teacher was made for other {what} than the model: its metadata '{key}' are {theirs}, and those of "
                f"the model {ours}. Both read the same batch: make the two alike, or compute the teacher's logits before "
                "(teacher_logits in the data, without a teacher)"
            )


def _projected(loss: Distillation, hint: Hint, aim: ir.Value, forms: Sequence[ir.Model]) -> Hint:
    """Add a projection to the teacher's channels after a value of the student, if the hint asks for one."""
    value = find_predictions(forms[-1], None, (Reading(hint.student),), loss.name)[0].value
    shapes = value.shape, aim.shape
    if shapes[0] is None or shapes[1] is None or len(shapes[0]) != len(shapes[1]) or len(shapes[0]) < 2:
        raise ConfigurationError(
            f"{loss.name}: the layer '{hint.student}' has shape {shapes[0]}, and '{hint.teacher}' of the teacher {shapes[1]}: a "
            "hint compares values of one shape but for the channels, [batch, channels, height, width] or [batch, ..., channels]"
        )
    axis = channel_axis(len(shapes[0]))
    ours, theirs = (shape.dims[axis] for shape in shapes if shape is not None)
    if loss.projection == "never" or (loss.projection == "auto" and same_dimension(ours, theirs)):
        return replace(hint, projected="")
    if not isinstance(ours, int) or not isinstance(theirs, int):
        raise ConfigurationError(
            f"{loss.name}: the channels of '{hint.student}' ({ours}) or of '{hint.teacher}' ({theirs}) are not known, and a "
            "projection needs both: give the models static channels, or projection='never'"
        )
    for form in dict.fromkeys(forms):
        taken = Names.of(form.graph)
        weight, projected = taken.take(f"{hint.student}:projection"), taken.take(f"{hint.student}:projected")
        _add_projection(form.graph, hint.student, weight, projected, (ours, theirs, len(shapes[0])))
    return replace(hint, projected=projected)


def _add_projection(graph: ir.Graph, layer: str, weight: str, projected: str, sizes: tuple[int, int, int]) -> None:
    """Emit ``projected``, with the teacher's channels: a 1x1 convolution for images, else a matrix over the last axis.

    Its weight is drawn from a uniform distribution with bound ``1 / sqrt(channels)``, as for a linear layer of PyTorch.
    """
    channels, others, rank = sizes
    value = next(output for node in graph for output in node.outputs if output.name == layer)
    assert value.dtype is not None
    drawn = np.random.default_rng(0).uniform(-1, 1, (channels, others)) / np.sqrt(channels)
    array = drawn.T.reshape(others, channels, *[1] * (rank - 2)) if rank > 3 else drawn
    tensor = ir.tensor(np.ascontiguousarray(array, value.dtype.numpy()), name=weight)
    initializer = ir.Value(name=weight, type=ir.TensorType(value.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(initializer)
    builder = Builder(graph)
    operands = builder.tensor(value), builder.tensor(initializer)
    output = builder.op("Conv", *operands, kernel_shape=[1] * (rank - 2)) if rank > 3 else builder.op("MatMul", *operands)
    output.value.name = projected

"""The task of a file and data: classes of samples, values, yes-or-no labels, masks of pixels, boxes of objects, or language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from burnish import losses
from burnish.data import Dataset, DataSource, DataSpec, ImageAugmentation, as_dataset, open_dataset
from burnish.data.annotated.masks import VOID, MaskImages, mask_files, mask_values
from burnish.data.annotated.voc import has_masks
from burnish.data.batches import is_batches
from burnish.data.formats import format_of
from burnish.data.image.augmentation import read_augmentation
from burnish.errors import ConfigurationError, DataError
from burnish.files.metadata import read_objective
from burnish.finetuning.decoders import OutputLayer, output_layer
from burnish.finetuning.detectors import find_detector
from burnish.finetuning.labels import VALUES, asks_yes_or_no, kind_of, labels_of
from burnish.graph import FLOATING, Builder, replace_node
from burnish.losses.ctc import ConnectionistTemporalClassification
from burnish.losses.detection import DetectionLoss
from burnish.surgery import Head, find_head, replace_head
from burnish.surgery.class_layers import ClassLayers, class_layers, replace_class_layers
from burnish.surgery.linear_sources import linear_sources

Kind = Literal["classes", "values", "questions", "masks", "objects", "tokens"]
LANGUAGE: Kind = "tokens"
CROSS_ENTROPY, YES_OR_NO = "cross_entropy", "bce_with_logits"
CLASSES_OF_PLACES = "cross_entropy:class_axis=-1"
SHOWN = 5
"""Most classes named in a line."""
METRICS: dict[Kind, tuple[str, ...]] = {
    "classes": ("accuracy",),
    "values": ("mean_absolute_error", "r2"),
    "questions": ("f1:macro", "accuracy"),
    "masks": ("mean_iou", "pixel_accuracy"),
    "objects": ("coco_map", "coco_map:0.5"),
    "tokens": ("perplexity", "accuracy"),
}
AnyHead = Head | ClassLayers | OutputLayer
MEAN_SQUARED_ERROR = "mse"


@dataclass(frozen=True)
class Task:
    """The task of a model.

    Attributes:
        kind: ``classes`` of samples, ``values``, yes-or-no ``questions``, ``masks`` of pixels, ``objects`` with boxes, or
            ``tokens`` of a language.
        head: the layer that gives the classes, for objects the layers; for a language model the layer that gives a score for each
            token, which is kept.
        outputs: values that the loss reads.
        loss: the loss.
        metrics: reported metrics; the first decides which epoch is best.
        others: number of scores for the background.
        is_yes_or_no: True if each score is a separate yes-or-no question.
        scores: for masks, scores per pixel that the loss reads; None: as many as the file gives.
        doubt: assumption that neither file nor data confirm, in words; None if there is none.
        reason: reason to learn values or questions, in words; None for other kinds.
        is_other: True if an operator after the head, such as a softmax, was removed, so that the old head is of no use.
    """

    kind: Kind
    head: AnyHead
    outputs: str | tuple[str, ...]
    loss: losses.Loss
    metrics: tuple[str, ...]
    others: int = 0
    is_yes_or_no: bool = False
    scores: int | None = None
    doubt: str | None = None
    reason: str | None = None
    is_other: bool = False

    @property
    def classes(self) -> int:
        """The number of classes of the file."""
        return (self.head.scores if isinstance(self.head, ClassLayers) else self.head.classes) - self.others

    @property
    def called(self) -> str:
        """The head as the subject of a message."""
        if isinstance(self.head, Head):
            return f"'{self.head.weight.name}' is"
        if isinstance(self.head, OutputLayer):
            return f"'{self.head.output if self.head.weight is None else self.head.weight.name}' is"
        weights = self.head.weights
        return f"'{weights[0].name}' is" if len(weights) == 1 else f"'{weights[0].name}' and {len(weights) - 1} more are"

    def replaced(self, model: ir.Model, classes: int, seed: int) -> tuple[ir.Model, Task]:
        """Return the model with a re-initialized head for other classes, and its task."""
        if isinstance(self.head, Head):
            model = replace_head(model, classes, self.head.output, seed)
            return model, replace(self, head=find_head(model, self.head.output))
        assert isinstance(self.head, ClassLayers)
        scores = classes + self.others
        replace_class_layers(model, self.head, scores, seed, self.is_yes_or_no)
        return model, replace(self, head=replace(self.head, scores=scores))

    def head_in(self, model: ir.Model) -> AnyHead:
        """Return the same head in another form of the model."""
        if isinstance(self.head, OutputLayer):
            return output_layer(model, self.head.output)
        if isinstance(self.head, Head):
            return find_head(model, self.head.output)
        scores = next(value for node in model.graph for value in node.outputs if value.name == self.head.output)
        return class_layers(scores, self.head.scores)

    def occurring(self, dataset: Dataset, spec: DataSpec) -> list[int]:
        """Return the classes that occur in data without class names, in ascending order; for yes-or-no labels, all scores.

        Raises:
            DataError: the data have no labels.
        """
        if spec.label is None:
            raise DataError("the data give no labels: fine-tuning learns classes")
        if not is_of_classes(spec):  # one target for each score
            width = dataset.batch(np.arange(1))[spec.label.name].shape[1:]
            return list(range(width[0] if len(width) == 1 else self.classes))
        # The head of a CTC also has a blank class, under any number.
        classes = {self.loss.blank} if isinstance(self.loss, ConnectionistTemporalClassification) else set()
        for begin in range(0, len(dataset), 1024):
            indices = np.arange(begin, min(begin + 1024, len(dataset)))
            if isinstance(dataset, MaskImages):  # reads no images
                labels = dataset.annotations(indices.tolist(), np.zeros(len(indices), bool))[spec.label.name]
            else:
                labels = dataset.batch(indices)[spec.label.name]
            classes.update(np.unique(labels[labels != spec.label.ignored]).tolist())
        return sorted(classes)


def is_of_classes(spec: DataSpec) -> bool:
    """True if a program compares with class indices, False if with a target for each score."""
    return spec.label is None or not spec.label.dtype.is_floating_point()


def absent_classes(occurring: Sequence[int]) -> str | None:
    """Return a line on classes below the largest that no sample has; None if there are none.

    Args:
        occurring: classes that samples have, in ascending order.
    """
    absent = sorted({*range(occurring[-1] if occurring else 0)}.difference(occurring))
    if not absent:
        return None
    if absent[0] == 0 and len(absent) == occurring[0]:
        return (
            f"classes: the labels begin at {occurring[0]}, and no sample has a class below: where they are numbered from "
            f"{occurring[0]}, subtract it, or the head has outputs that nothing trains"
        )
    listed = ", ".join(map(str, absent[:SHOWN])) + (f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else "")
    return f"classes: no sample has {listed} of 0 to {occurring[-1]}; the head has an output for each all the same"


def task_of(
    model: ir.Model,
    data: DataSource,
    output: str | Sequence[str] | None = None,
    loss: losses.LossLike | None = None,
    metrics: Sequence[str] | None = None,
    augment: str | ImageAugmentation | None = None,
    language: OutputLayer | None = None,
    reading: Mapping[str, Any] | None = None,
) -> Task:
    """Return the task of a canonical model on data.

    Args:
        model: the model; for values, the activation after its head is removed.
        data: objects in the form of COCO or VOC, images with masks, or other data with classes, values or yes-or-no labels.
        output: output that the loss reads; for a detector boxes and scores.
        loss, metrics: replacements for the defaults.
        augment: MixUp and CutMix in it become part of the loss.
        language: output layer of a language model, if the data are texts to learn.
        reading: options for opening the data.

    Raises:
        ConfigurationError: the model has no head for such data, or an option is needed.
    """
    if language is not None:
        if augment is not None:
            raise ConfigurationError(
                "augment: it changes images and rows of tables, and a language model reads texts: leave it out"
            )
        chosen = losses.get(CLASSES_OF_PLACES if loss is None else loss)
        return Task(LANGUAGE, language, language.output, chosen, METRICS[LANGUAGE] if metrics is None else tuple(metrics))
    kind = format_of(data).name if isinstance(data, str | Path) else None
    path = Path(data) if isinstance(data, str | Path) else Path()
    if kind == "voc" and has_masks(path) and _is_of_pixels(model, output, loss):
        kind = "masks"
    if kind in ("coco", "voc"):
        task = _objects(model, output, loss)
    elif output is not None and not isinstance(output, str):
        raise ConfigurationError(f"head_output: the classes come from one output, not from {list(output)}: name that one")
    else:
        head = find_head(model, output or output_of(model))
        if kind == "masks":
            task = _masks(model, head, loss, path)
        else:
            asked = None if loss is None else losses.get(loss)
            labels = labels_of(data, reading or {})
            learned, reason = kind_of(labels, asked, head.classes)
            is_whole = labels is not None and labels.array is not None and labels.array.dtype.kind in "iu"
            if asked is None and is_whole and _is_of_places(model, head):
                learned, reason = "classes", None
            task = _classes(model, head, asked) if learned == "classes" else _numbers(model, head, asked, learned, reason)
    if metrics is not None:
        task = replace(task, metrics=tuple(metrics))
    changes = None if augment is None else read_augmentation(augment)
    if changes is not None and changes.mixes:
        if task.kind in ("masks", "objects"):
            raise ConfigurationError(
                "augment: mixup and cutmix mix samples that have one class each, and these data have masks or objects: leave "
                "them out; flip is there"
            )
        task = replace(task, loss=losses.mixed(task.loss, mixup=changes.mixup, cutmix=changes.cutmix))
    return task


def _is_of_places(model: ir.Model, head: Head) -> bool:
    """True if the head is a product with more than two axes: its last axis holds the classes of each step or token."""
    output = next((value for value in model.graph.outputs if value.name == head.output), None)
    return head.node.op_type == "MatMul" and output is not None and len(output.shape or ()) > 2


def _classes(model: ir.Model, head: Head, loss: losses.LossLike | None) -> Task:
    is_of_places = loss is None and _is_of_places(model, head)
    chosen = losses.get(CLASSES_OF_PLACES if is_of_places else CROSS_ENTROPY if loss is None else loss)
    # No metric knows the alignments of a CTC, so the loss decides which epoch is best.
    metrics = () if isinstance(chosen, ConnectionistTemporalClassification) else METRICS["classes"]
    doubt = f"task: a class for each place of '{head.output}': {CLASSES_OF_PLACES}" if is_of_places else None
    return Task("classes", head, head.output, chosen, metrics, doubt=doubt)


def _numbers(
    model: ir.Model, head: Head, loss: losses.Loss | None, kind: Literal["values", "questions"], reason: str | None
) -> Task:
    """The task of values or yes-or-no labels, one number of the output for each.

    Raises:
        ConfigurationError: the output has more than one row for each sample, or is not a result of the head.
    """
    output = next(value for value in model.graph.outputs if value.name == head.output)
    if kind == "values" and (output.dtype not in FLOATING or output.shape is None or len(output.shape) > 2):
        raise ConfigurationError(
            f"finetune: values are to be learned ({reason}), and the output '{head.output}' has shape {output.shape} of "
            f"{output.dtype}: fine-tuning learns one row of values for each sample, [batch, values]. Train the file with its own "
            "outputs, by burnish train --loss mse; where the labels are classes, say so (loss='cross_entropy', --loss "
            "cross_entropy)"
        )
    removed = _without_activation(model, head, kind)
    chosen = losses.get(MEAN_SQUARED_ERROR if kind == "values" else YES_OR_NO) if loss is None else loss
    metrics = METRICS[kind]
    if kind == "questions" and (output.shape is None or len(output.shape) < 2):
        metrics = ("accuracy",)
    return Task(kind, head, head.output, chosen, metrics, is_yes_or_no=kind == "questions", reason=reason, is_other=bool(removed))


def _without_activation(model: ir.Model, head: Head, kind: Literal["values", "questions"]) -> list[str]:
    """Remove, in place, operators that turn the head's result into probabilities, and return their names.

    For questions a Sigmoid stays, and replaces a Softmax, so that the file still gives probabilities.
    """
    removed: list[str] = []
    value: ir.Value | None = next(value for value in model.graph.outputs if value.name == head.output)
    while value is not None and (node := value.producer()) is not None and node is not head.node:
        before = node.inputs[0]
        if node.op_type in ("Softmax", "LogSoftmax") or (node.op_type == "Sigmoid" and kind == "values"):
            removed.append(node.op_type)
            builder = Builder(model.graph, before=node)
            assert before is not None
            passed = builder.op("Identity" if kind == "values" else "Sigmoid", builder.tensor(before))
            replace_node(node, passed)
            value = passed.value
        value = before
    return removed


def _is_of_pixels(model: ir.Model, output: str | Sequence[str] | None, loss: losses.LossLike | None) -> bool:
    """True if a model gives classes for each pixel, and no boxes."""
    if output is not None and not isinstance(output, str):
        return False
    try:
        find_detector(model, None, loss)
    except ConfigurationError:
        with suppress(ConfigurationError):
            head = find_head(model, output or output_of(model))
            shape = next(value for value in model.graph.outputs if value.name == head.output).shape
            return shape is not None and len(shape) == 4
    return False


def _masks(model: ir.Model, head: Head, loss: losses.LossLike | None, folder: Path) -> Task:
    output = next(value for value in model.graph.outputs if value.name == head.output)
    if output.shape is None or len(output.shape) != 4:
        raise ConfigurationError(
            f"finetune: the data are masks, with a class for each pixel, and the output '{head.output}' has shape "
            f"{output.shape}: name the one that is [batch, classes, height, width] (head_output=..., --outputs)"
        )
    chosen = None if loss is None else losses.get(loss)
    scores, is_yes_or_no = _scores_of_pixels(head, chosen, folder)
    if chosen is None:
        plain = losses.get(YES_OR_NO if is_yes_or_no else CROSS_ENTROPY)
        sides = list(output.shape.dims[2:])
        pictures = [list(value.shape.dims) for value in model.graph.inputs if value.shape is not None and len(value.shape) == 4]
        is_whole = all(isinstance(side, int) for side in sides) and any(
            dims[2:] == sides or dims[1:3] == sides for dims in pictures
        )
        chosen = plain if is_whole else losses.resized(plain)
    return Task("masks", head, head.output, chosen, METRICS["masks"], is_yes_or_no=is_yes_or_no, scores=scores)


def _scores_of_pixels(head: Head, loss: losses.Loss | None, folder: Path) -> tuple[int, bool]:
    """Return the scores per pixel to learn, and True for a yes-or-no mask.

    If a file gives more than one, the number is settled when the data are read.
    """
    if loss is not None and asks_yes_or_no(loss):
        return 1, True
    if head.classes > 1 or isinstance(loss, VALUES):
        return head.classes, False
    values = {int(value) for mask in mask_values(mask_files(folder)) for value in mask} - {0}
    if loss is None and len(values) <= 1:
        return 1, True
    return max(values - {VOID}, default=1) + 1, False


def _objects(model: ir.Model, output: str | Sequence[str] | None, loss: losses.LossLike | None) -> Task:
    named = [output] if isinstance(output, str) else output
    if loss is None and named is None:
        named, loss = _recorded_detector(model)
    found = find_detector(model, named, loss)
    scores = class_layers(found.scores, found.score_count)
    shared = {node for node in scores.nodes if node in _layers_of(found.boxes)}
    if shared:
        raise ConfigurationError(
            f"finetune: '{next(iter(shared)).name}' gives boxes and scores at once, so that the scores cannot be re-initialized "
            "alone: train the file with its own classes (burnish train --loss ...)"
        )
    read, metrics = (found.outputs, found.loss), METRICS["objects"]
    return Task("objects", scores, *read, metrics, found.background, found.is_yes_or_no, doubt=found.doubt)


def _recorded_detector(model: ir.Model) -> tuple[list[str] | None, losses.Loss | None]:
    """Return the outputs and the loss for objects recorded in a burnish file, or None for both."""
    recorded = read_objective(model.metadata_props)
    loss = losses.get(recorded["loss"]) if recorded else None
    names = {value.name for node in model.graph for value in node.outputs}
    if not isinstance(loss, DetectionLoss) or not names.issuperset(recorded["outputs"]):
        return None, None
    return recorded["outputs"], loss


def _layers_of(value: ir.Value) -> list[ir.Node]:
    """Return the linear layers that compute a value; none if it is computed otherwise."""
    node = value.producer()
    if node is not None and node.op_type == "Sigmoid" and node.inputs[0] is not None:
        value = node.inputs[0]
    return linear_sources(value) or []


def output_of(model: ir.Model) -> str | None:
    """Return the output with the classes if only one head leads to outputs; None otherwise."""
    heads: dict[ir.Node, str] = {}
    for value in model.graph.outputs:
        if value.dtype in FLOATING:
            with suppress(ConfigurationError):
                head = find_head(model, value.name)
                heads.setdefault(head.node, head.output)
    return next(iter(heads.values())) if len(heads) == 1 else None


OF_FILES = ("image_size", "sound")
"""Options for data in files."""
OF_TABLES = ("label", "label_separator", "missing", "columns")
"""Options for tables, in files and in memory."""


def open_source(source: DataSource, spec: DataSpec, classes: Sequence[str] | None = None, **options: Any) -> Dataset:
    """Open data by path (``open_dataset``), or wrap data in memory (``as_dataset``).

    Args:
        source: data for ``Trainer``, except an iterable of batches.
        spec: inputs of the program.
        classes: names of the classes in the order of their indices.
        options: options of ``open_dataset``; for data in memory ``pixels``, ``text``, ``split`` and the options of tables.

    Raises:
        DataError: the data cannot be read, do not fit, or are batches.
        ConfigurationError: an option for files is given with data in memory.
    """
    if isinstance(source, str | Path):
        return open_dataset(source, spec, classes=classes, **options)
    if is_batches(source):
        raise DataError(
            f"data: a value of type {type(source).__name__} gives batches as they come, and fine-tuning looks up classes, counts "
            "samples and finds a learning rate before it trains: give (x, y), arrays by input name, a data set or a path; or "
            "train on batches by burnish.compile and burnish.Trainer"
        )
    named = next((name for name in OF_FILES if options.get(name) is not None), None)
    if named is not None:
        raise ConfigurationError(f"{named}: that is for data that are read from files, and these lie in memory: leave it out")
    given = {name: options[name] for name in ("pixels", "text", "split", *OF_TABLES) if options.get(name) is not None}
    return as_dataset(source, spec, classes, **given)


def name_of(source: DataSource) -> str:
    """Return the name of data in messages."""
    return str(source) if isinstance(source, str | Path) else "data"

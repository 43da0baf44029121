"""A model's predictions for samples: a class with its probability, yes or no, a score, or values; and tables of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from burnish import losses, metrics
from burnish.compiler.predictions import Prediction, find_predictions
from burnish.compiler.probabilities import is_open
from burnish.data import Dataset
from burnish.data.image.decoding import resized_sides
from burnish.data.preprocessing import Preprocessing
from burnish.errors import BurnishError, ConfigurationError
from burnish.graph import FLOATING, describe_node
from burnish.losses import Activation, Reading
from burnish.losses.base import SIGMOID, SOFTMAX, Wrapping
from burnish.losses.detection import BOXES, LABELS, PADDING, SIZES, DetectionLoss
from burnish.metrics.average_precision import FOUND, PICTURE, THERE, AveragePrecision, Picture, pictures_of
from burnish.metrics.base import rows_name
from burnish.training.predictor_options import check_activation
from burnish.training.trained_model import TrainedModel

Kind = Literal["classes", "questions", "scores", "values"]
CLASS_AXIS = 1


@dataclass(frozen=True)
class Answer:
    """The interpretation of an output.

    Attributes:
        output: its name.
        kind: ``classes``: one of them is right; ``questions``: a yes or no for each; ``scores`` of classes that are not
            probabilities; or ``values``.
        activation: function that gives probabilities: ``softmax`` along axis 1, ``sigmoid``, ``exp`` of logarithms; None to use
            the output unchanged.
        reason: the reason, in words.
    """

    output: str
    kind: Kind
    activation: str | None
    reason: str

    def text(self) -> str:
        """Return a line with the interpretation and its reason."""
        made = "" if self.activation is None else f"; {self.activation} makes probabilities of it"
        return f"output '{self.output}': {self.reason}{made}"

    @property
    def least_yes(self) -> float:
        """The threshold of the raw output for a yes: one half of a probability, or 0 before a sigmoid."""
        return 0.5 if self.activation is None else 0.0

    def is_of_pixels(self, array: np.ndarray) -> bool:
        """Return True if an output has class or yes-or-no scores for each pixel: [samples, classes, height, width]."""
        is_map = array.ndim == 4 and array.shape[2] * array.shape[3] > 1
        return is_map and (self.kind in ("classes", "scores") or (self.kind == "questions" and array.shape[CLASS_AXIS] == 1))

    def is_of_rows(self, array: np.ndarray) -> bool:
        """Return True if an output has one row for each sample: [samples], or [samples, classes or values] with trailing ones."""
        return all(extent == 1 for extent in array.shape[2:])

    def numbers(self, array: np.ndarray) -> np.ndarray:
        """Return probabilities, scores or values: [samples, classes] or [samples, values], float64.

        Raises:
            ConfigurationError: the output has more than one row for each sample.
        """
        values = array.astype(np.float64)
        if not self.is_of_rows(array):
            raise ConfigurationError(
                f"the output '{self.output}' has shape {list(array.shape[1:])} for each sample, which no table has a row for: "
                "write the outputs as they are (-o FILE.npz)"
            )
        values = values.reshape(len(values), -1)
        if self.activation == "softmax":
            exponential = np.exp(values - values.max(axis=CLASS_AXIS, keepdims=True))
            return np.asarray(exponential / exponential.sum(axis=CLASS_AXIS, keepdims=True))
        if self.activation == "sigmoid":
            return np.asarray(np.where(values >= 0, 1, np.exp(-np.abs(values))) / (1 + np.exp(-np.abs(values))))
        return np.exp(values) if self.activation == "exp" else values


def read_answer(model: TrainedModel, output: str | None = None, activation: str | None = None) -> Answer:
    """Return the interpretation of a model's output: by its training loss, by its graph, or as requested.

    Args:
        model: the model.
        output: name of the output; None if the loss reads one, or there is only one.
        activation: ``softmax``, ``sigmoid`` or ``none``, to override the model.

    Raises:
        ConfigurationError: there is no such output or activation, or several outputs to choose from.
    """
    check_activation(activation)
    name = _output(model, output)
    if activation == "none":
        return Answer(name, "values", None, "as it is")
    if activation is not None:
        return Answer(name, "classes" if activation == "softmax" else "questions", activation, "as asked for")
    read = next((one for one in model.options.get("predictions", ()) if one["output"] == name), None)
    if "loss" in model.options and (read is not None or output is None):
        return _by_loss(model, name, losses.get(model.options["loss"]))
    return _by_graph(model, name)


def refuse_language(model: TrainedModel, name: str) -> None:
    """Raise ConfigurationError if an output has a causal decoder's scores for each token.

    Args:
        model: the model.
        name: name of the output.
    """
    text = model.described.text
    shape = next(value.shape for value in model.predict_graph.graph.outputs if value.name == name)
    if text is not None and text.task == "causal" and shape is not None and len(shape) == 3:
        raise ConfigurationError(
            f"the model is a language model: '{name}' has scores of the next token at each token, and burnish generates no text. "
            "Run the file with the program that ran the original, or write the scores as they are (-o FILE.npz)"
        )


def _output(model: TrainedModel, asked: str | None) -> str:
    values = {value.name or "": value for value in model.predict_graph.graph.outputs}
    if asked is not None and asked not in values:
        raise ConfigurationError(f"outputs: the model has no output '{asked}'; it has {', '.join(map(repr, values))}")
    read = [one["output"] for one in model.options.get("predictions", ()) if one["output"] in values]
    floating = [name for name, value in values.items() if value.dtype in FLOATING]
    chosen = [asked] if asked is not None else read[:1] or floating
    if len(chosen) != 1:
        raise ConfigurationError(f"the model has the outputs {', '.join(map(repr, values))}: say which one is shown (--outputs)")
    return chosen[0]


def _found(model: TrainedModel, name: str, activation: Activation | None) -> Prediction:
    graph = model.predict_graph.clone()
    return find_predictions(graph, name, (Reading(activation=activation),), "of the table")[0]


def _by_loss(model: TrainedModel, name: str, loss: losses.Loss) -> Answer:
    activation = loss.readings[0].activation if loss.readings else None
    scale = getattr(loss, "scale", None)
    inner = loss
    while isinstance(inner, Wrapping):
        inner = inner.loss
    why = f"trained with {inner.name}"
    if activation is not None:
        kind: Kind = "classes" if activation.axis is not None else "questions"
        return _of_activation(_found(model, name, activation), name, kind, "softmax" if kind == "classes" else "sigmoid", why)
    if scale == "log_probabilities":
        return Answer(name, "classes", "exp", f"logarithms of probabilities, {why}")
    if scale == "probabilities":
        return Answer(name, "questions", None, f"probabilities, {why}")
    has_classes = bool(loss.default_metrics) and "accuracy" in loss.default_metrics and _width(model, name) != 1
    return Answer(name, "scores" if scale == "scores" and has_classes else "values", None, why)


def _by_graph(model: TrainedModel, name: str) -> Answer:
    for activation, kind in ((SOFTMAX, "classes"), (SIGMOID, "questions")):
        prediction = _found(model, name, activation)
        if prediction.stepped_over is not None:
            return _of_activation(prediction, name, kind, None, "by its graph")  # type: ignore[arg-type]
    if prediction.bounded_by is not None:
        return Answer(name, "questions", None, f"{describe_node(prediction.bounded_by)} bounds it to [0, 1]")
    width = _width(model, name)
    inputs = model.to_predict.data
    is_of_images = len(inputs) == 1 and len(inputs[0].extents) == 4
    if width is not None and width > 1 and is_of_images and is_open(prediction.value):
        return Answer(name, "classes", "softmax", "taken for logits of classes (--activation none shows its values)")
    return Answer(
        name, "values", None, "the model does not say what it is (--activation softmax or sigmoid where it holds logits)"
    )


def _of_activation(prediction: Prediction, name: str, kind: Kind, otherwise: str | None, why: str) -> Answer:
    """Interpret an output that ends in an activation, is bounded by another node, or has neither."""
    if prediction.stepped_over is not None:
        node = describe_node(prediction.stepped_over)
        if prediction.stepped_over.op_type == "LogSoftmax":
            return Answer(name, kind, "exp", f"logarithms of probabilities, by {node}")
        return Answer(name, kind, None, f"probabilities, by {node}")
    if prediction.bounded_by is not None:
        return Answer(name, kind, None, f"{describe_node(prediction.bounded_by)} bounds it to [0, 1]")
    return Answer(name, kind, otherwise, why)


def _width(model: TrainedModel, name: str) -> int | None:
    """The numbers that the model gives for each sample; None if they are not one row, or unknown."""
    shape = model.shape_of(name)
    if shape is None or len(shape) < 2 or any(extent != 1 for extent in shape[2:]):
        return 1 if shape is not None and len(shape) == 1 else None
    extent = shape[1]
    return extent if isinstance(extent, int) else None


def class_names(classes: Sequence[str] | None, count: int) -> list[str]:
    """Return names for so many classes: the known names first, numbers for the others.

    A model may have more outputs than its training data had classes.
    """
    named = [] if classes is None or len(classes) > count else list(classes)
    return [*named, *map(str, range(len(named), count))]


def masks_of(answer: Answer, array: np.ndarray, classes: Sequence[str] | None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class of each pixel, int64 [samples, height, width], and the names of the classes.

    Args:
        answer: interpretation of the output.
        array: the output, ``[samples, classes, height, width]``, or one yes-or-no score.
        classes: names of the classes; a class without a name gets its number.
    """
    if array.shape[CLASS_AXIS] == 1:
        return (array[:, 0] > answer.least_yes).astype(np.int64), ("no", "yes")
    return array.argmax(axis=CLASS_AXIS), tuple(class_names(classes, array.shape[CLASS_AXIS]))


def is_detector(model: TrainedModel) -> bool:
    """Return True if a model was trained with a detection loss."""
    return "loss" in model.options and isinstance(losses.get(model.options["loss"]), DetectionLoss)


def precision_of(model: TrainedModel) -> str | None:
    """Return the name of an average-precision metric of the model, or None."""
    for name in model.options.get("metrics", ()) if "loss" in model.options else ():
        try:
            metric = metrics.get(name)
        except BurnishError:
            continue
        if isinstance(metric, AveragePrecision):
            return metric.name
    return None


def pictures_in(model: TrainedModel, batch: Mapping[str, np.ndarray]) -> list[Picture]:
    """Return a model's boxes for the pictures of a batch, after the metric's suppression, and the true objects.

    Args:
        model: model with a metric of average precision, in its present state.
        batch: inputs of its loss.

    Raises:
        ConfigurationError: there is no such metric.
    """
    metric = precision_of(model)
    if metric is None:
        raise ConfigurationError(
            f"{model.name} says which boxes it finds by a metric of average precision, and it was trained with none: train "
            "with metrics=('coco_map',) (--metrics coco_map), or read its raw outputs"
        )
    totals = model.totals(batch)
    return pictures_of({part: totals[rows_name(metric, part)] for part in (FOUND, THERE, PICTURE)})


def found_in(model: TrainedModel, dataset: Dataset, batch_size: int = 32) -> Iterator[Picture]:
    """Yield a model's boxes for each picture of a data set without labels, as ``pictures_in``.

    Args:
        model: as in ``pictures_in``.
        dataset: inputs of the model.
        batch_size: pictures at once; a fixed batch size of the model takes precedence.
    """
    fixed = model.fixed_batch("evaluate")
    size = batch_size if fixed is None else fixed
    for begin in range(0, len(dataset), size):
        places = np.arange(begin, begin + size)
        count = min(size, len(dataset) - begin)
        # With a fixed batch size, the last picture is repeated, and results of the copies are dropped.
        batch = dict(dataset.batch(np.minimum(places, len(dataset) - 1) if fixed is not None else places[:count]))
        yield from pictures_in(model, batch | _nothing_there(model, len(next(iter(batch.values())))))[:count]


def _nothing_there(model: TrainedModel, count: int) -> dict[str, np.ndarray]:
    spec = model.to_evaluate
    arrays = {}
    for entry in (spec.label, *spec.further_labels):
        assert entry is not None
        shape = (count, 2) if entry.name == SIZES else (count, 1, 4) if entry.name == BOXES else (count, 1)
        value = PADDING if entry.name == LABELS else 1 if entry.name == SIZES else 0
        arrays[entry.name] = np.full(shape, value, entry.numpy_dtype)
    return arrays


def in_pixels(boxes: np.ndarray, size: tuple[int, int], preprocessing: Preprocessing | None) -> np.ndarray:
    """Return boxes in pixels of the picture's file, clipped to the picture.

    Args:
        boxes: left, top, right, bottom as fractions of the model's input, ``[boxes, 4]``.
        size: width and height of the picture.
        preprocessing: preprocessing of the picture, or None.
    """
    width, height = size
    sides, corner = (size, None) if preprocessing is None else resized_sides(width, height, preprocessing)
    fractions = boxes
    if corner is not None:
        assert preprocessing is not None
        assert preprocessing.size is not None
        fractions = (boxes * [*preprocessing.size[::-1], *preprocessing.size[::-1]] + [*corner, *corner]) / [*sides, *sides]
    return np.clip(fractions, 0.0, 1.0) * [width, height, width, height]

"""Predictions of a saved model, one object for each sample: ``Predictor`` and ``Prediction``.

``burnish.Predictor``, ``Finetuned.predict`` and the command ``burnish predict`` use this module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from burnish.data import Dataset, DataSource, Text, as_dataset, open_dataset
from burnish.data.given_samples import Given, SampleReader
from burnish.data.splitting import SPLIT, EvalSplit, held_out, parts, read_split
from burnish.data.unlabelled import Samples
from burnish.errors import ConfigurationError, DataWarning, EngineError
from burnish.graph import FLOATING
from burnish.metrics.average_precision import Picture
from burnish.metrics.classification import EVEN_ODDS
from burnish.options import takes
from burnish.training.predictions import (
    Answer,
    class_names,
    found_in,
    in_pixels,
    is_detector,
    masks_of,
    read_answer,
)
from burnish.training.predictor_options import PredictorOptions
from burnish.training.run_data import within_the_opened
from burnish.training.run_files import read_record
from burnish.training.trained_model import TrainedModel, open_model, text_of_model
from burnish.validation import is_whole
from burnish.warn import warn

BATCH_SIZE = 32
UNSAID = (None, "error", "auto")
"""Values of options that leave the choice to the run."""
NO_AND_YES = ("no", "yes")
SHOWN = 6
"""Most values or boxes named in a text."""
Kind = Literal["class", "labels", "values", "boxes", "mask", "outputs"]
AxisFirst = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """The prediction of a model for one sample.

    Attributes:
        name: name of the sample: its file, its text, or its row, counted from 0.
        label: the most probable class; for yes-or-no labels a tuple of those with yes; for boxes a tuple of their classes; for a
            mask the class of most pixels. None if the model gives values, or NaN for a class.
        score: probability or score of ``label``, the highest if there are several; for a mask the share of pixels. None if there
            is no label.
        scores: scores of all ``classes``, float64 [classes]; for boxes one each, float64 [boxes].
        classes: names of the classes that the model knows, in the order of their indices.
        values: values, if the model gives values, float64 [values].
        boxes: left, top, right and bottom of each box, the most certain first, float64 [boxes, 4]: in pixels of the picture; for
            ``.npz`` files in fractions of the model's input.
        mask: class of each pixel at the model's input size, int64 [height, width].
        outputs: all outputs of the model by name, without the sample axis.

    Example:
        >>> import numpy as np
        >>> from burnish.training.predictor import Prediction
        >>> found = Prediction("a.png", "cat", 0.8, np.array([0.8, 0.2]), ("cat", "dog"))
        >>> print(found)
        cat 0.8000
        >>> found.as_dict()
        {'name': 'a.png', 'label': 'cat', 'score': 0.8, 'scores': {'cat': 0.8, 'dog': 0.2}}
    """

    name: str
    label: str | tuple[str, ...] | None = None
    score: float | None = None
    scores: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    values: np.ndarray | None = None
    boxes: np.ndarray | None = None
    mask: np.ndarray | None = None
    outputs: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """The kind: ``class``, ``labels``, ``values``, ``boxes``, ``mask``, or ``outputs`` if the interpretation is unknown."""
        if self.boxes is not None:
            return "boxes"
        if self.mask is not None:
            return "mask"
        if self.values is not None:
            return "values"
        if self.scores is None:
            return "outputs"
        return "labels" if isinstance(self.label, tuple) else "class"

    def top(self, count: int | None = None) -> list[tuple[str, float]]:
        """Return the classes with the highest scores and these scores, in order; None for all. Empty if there are none."""
        if self.scores is None or self.boxes is not None:
            return []
        order = np.argsort(-self.scores, kind="stable")[:count]
        return [(self.classes[int(index)], float(self.scores[index])) for index in order]

    def as_dict(self, top: int | None = None) -> dict[str, Any]:
        """Return the prediction as JSON-compatible values, as ``burnish predict --format jsonl`` writes it.

        Args:
            top: number of classes in ``scores``, the highest first; None: all, in their order.

        Returns:
            ``name``, with ``label``, ``score`` and ``scores`` by class; or ``boxes``, each with ``label``, ``score`` and ``box``;
            or ``values``; or, if the interpretation is unknown, ``outputs`` by name.
        """
        said: dict[str, Any] = {"name": self.name}
        if self.kind == "values":
            assert self.values is not None
            return said | {"values": self.values.tolist()}
        if self.kind == "outputs":
            return said | {"outputs": {name: array.tolist() for name, array in self.outputs.items()}}
        if self.boxes is not None:
            found = [{"label": label, "score": score, "box": box.tolist()} for label, score, box in self.found()]
            return said | {"boxes": found}
        assert self.scores is not None
        scores = dict(self.top(top)) if top is not None else dict(zip(self.classes, self.scores.tolist(), strict=True))
        label = list(self.label) if isinstance(self.label, tuple) else self.label
        return said | {"label": label, "score": self.score, "scores": scores}

    def found(self) -> list[tuple[str, float, np.ndarray]]:
        """Return class, score and box of each box, the most certain first; empty if there are none."""
        if self.boxes is None or self.scores is None or not isinstance(self.label, tuple):
            return []
        return list(zip(self.label, self.scores.tolist(), self.boxes, strict=True))

    def __str__(self) -> str:
        if self.boxes is not None:
            return _some([f"{label} {score:.4f}" for label, score, _ in self.found()]) or "no boxes"
        if self.mask is not None:
            return _some([f"{name} {share:.4f}" for name, share in self.top() if share])
        if isinstance(self.label, tuple):
            yes = {*self.label}
            return _some([f"{name} {score:.4f}" for name, score in self.top() if name in yes]) or "none"
        if self.values is not None:
            return _numbers(self.values)
        if self.scores is not None:
            return f"{self.label} {self.score:.4f}"
        return ", ".join(f"{name} {list(array.shape)}" for name, array in self.outputs.items())

    def __repr__(self) -> str:
        said: dict[str, Any] = {"name": _short(self.name)}
        if self.scores is not None and self.boxes is None:
            said["label"] = self.label
            said["score"] = None if self.score is None else round(self.score, 4)
        if self.values is not None:
            return f"Prediction(name={said['name']!r}, values={_numbers(self.values)})"
        if self.boxes is not None or self.kind == "outputs":
            return f"Prediction(name={said['name']!r}, {'boxes' if self.boxes is not None else 'outputs'}: {self})"
        return f"Prediction({', '.join(f'{name}={value!r}' for name, value in said.items())})"


class Predictor:
    """A saved model for predictions: an ONNX file, the folder of a run or of a program, or a checkpoint.

    Samples are read as the model's training data were: pixels, classes, columns and tokens. The model stays open until ``close``;
    a predictor is also a context manager.

    Args:
        path: the tuned or any other ONNX file; the folder of a run; a checkpoint; a saved program.
        engine: name (``auto``, ``onnxruntime``, ``torch``, ``reference``, or one that a package registers) or an Engine.
        threads: threads used inside one operator; None is the engine's choice.
        program: saved program of a checkpoint that is not in the folder of its run.
        best: for a run, the best epoch or the latest state; None: the exported one.
        average: True to read the averaged weights of the optimizer; None: as the run exported.
        sample_axis: for an ONNX file, as in ``burnish.compile``.
        outputs: output to read; None: the one that the loss reads, or the only one.
        activation: function that gives probabilities: ``softmax``, ``sigmoid`` or ``none``; None: according to the model.
        score: lowest score of a detector's boxes.
        loss, metrics: objective to evaluate an ONNX file, as in ``burnish.compile``; None: according to the file.
        label: label column of a table, which is not an input.
        image_size, pixels, text, sound, missing: as in ``burnish.data.open_dataset``; None: according to the model.

    Raises:
        ModelError, CheckpointError: the model cannot be read.
        ConfigurationError: an option is out of range, or does not fit the model.
        EngineError: the engine is not available.

    Example:
        >>> import numpy as np
        >>> import onnx
        >>> import burnish
        >>> onnx.save(burnish.models.create("mlp", classes=3, input_shape=(4,)), "flowers.onnx")
        >>> with burnish.Predictor("flowers.onnx", activation="softmax") as predictor:
        ...     one = predictor.predict(np.zeros(4, np.float32))
        ...     several = predictor.predict(np.zeros((2, 4), np.float32))
        >>> one.label in ("0", "1", "2"), one.scores.shape, len(several)
        (True, (3,), 2)
    """

    @takes(PredictorOptions)
    def __init__(self, path: str | Path, options: PredictorOptions):
        if not isinstance(path, str | os.PathLike):
            raise ConfigurationError(
                f"A predictor opens a file or the folder of a run, not a {type(path).__name__}: give its path"
            )
        self.path, self._options = Path(path), options
        self._asked_text: Text | None = options.text  # type: ignore[assignment]  # the options have checked it
        self._model: TrainedModel | None = open_model(self.path, **self._opening, to_evaluate=False)
        self._evaluating: TrainedModel | None = self._model if self._model.evaluates and not self._objective else None

    def predict(self, x: Any, *, batch_size: int | None = None) -> Prediction | list[Prediction]:
        """Return the prediction for one sample, or for several, in order.

        Args:
            x: a path: an image, a folder of images, a table, a file of texts, an ``.npz`` file, or another path for
                ``burnish.data.open_dataset``. An array with the sample axis, or without it for one sample; a Pillow image, or its
                bytes, uint8 [height, width, channels], of any size. Arrays by input name. Columns of a table by name, a data
                frame, or a list of rows by column. A text, for a model of texts. A list of paths, of texts, of images or of
                arrays.
            batch_size: samples at once; None: 32. A fixed batch size of the model takes precedence.

        Returns:
            One prediction for one sample given by itself: an image, a text, an array without the sample axis, a row as a dict of
                numbers. Otherwise a list, even for one sample.

        Raises:
            DataError: a path is missing, there are no samples, or they do not fit the model.
            InputError: the model gives no prediction for each sample.
            EngineError: the engine cannot run it, or the predictor is closed.
        """
        given = self.read(x)
        for note in given.notes:
            warn(DataWarning(note))
        found = list(self.predictions(given, batch_size))
        return found[0] if given.is_one else found

    def evaluate(self, data: DataSource | None = None, *, batch_size: int | None = None) -> dict[str, float]:
        """Return loss and metrics over labelled data, by name, in inference mode.

        Args:
            data: a path for ``burnish.data.open_dataset``, ``(x, y)``, arrays by input name, a data set, or a Hugging Face data
                set. None: for a run of ``burnish train`` or ``burnish finetune``, its evaluation data: ``eval_data``, or the
                held-out part (``eval_split``).
            batch_size: samples at once; None: 32.

        Raises:
            ConfigurationError: the file does not record its loss, and none was given; or no data are given, and the run had no
                evaluation data.
            DataError: the data cannot be read or do not fit the model.
            InputError: nothing in the data counts.
            EngineError: the engine cannot run it, or the predictor is closed.
        """
        dataset, notes = self.read_evaluation()[:2] if data is None else self.read_labelled(data)
        for note in notes:
            warn(DataWarning(note))
        return self.evaluated.evaluate(dataset, _batch_size(batch_size))

    def close(self) -> None:
        """Free the engine's resources. The predictor cannot be used any more."""
        for model in {id(each): each for each in (self._model, self._evaluating) if each is not None}.values():
            model.close()
        self._model = self._evaluating = None

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Predictor({os.fspath(self.path)!r}{', closed' if self._model is None else ''})"

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of their indices; None if the model does not record them."""
        return self.model.described.classes

    @property
    def model(self) -> TrainedModel:
        """The model that predicts.

        Raises:
            EngineError: the predictor is closed.
        """
        if self._model is None:
            raise EngineError(f"The predictor of '{self.path}' is closed: open another one (burnish.Predictor)")
        return self._model

    @property
    def evaluated(self) -> TrainedModel:
        """The model with its loss.

        Raises:
            ConfigurationError, EngineError: as ``evaluate``.
        """
        assert self.model is not None
        if self._evaluating is None:
            self._evaluating = open_model(self.path, **self._opening, **self._objective)
        return self._evaluating

    def answer(self) -> Answer:
        """Return the interpretation of the output.

        Raises:
            ConfigurationError: there are several outputs, and none was given.
        """
        return read_answer(self.model, self._options.outputs, self._options.activation)

    def answer_or_none(self) -> Answer | None:
        """Return the interpretation of the output; None for a detector, or for several outputs without a choice."""
        if self.gives_boxes:
            return None
        if self._options.outputs is None and not self.model.options.get("predictions"):
            floating = [value for value in self.model.predict_graph.graph.outputs if value.dtype in FLOATING]
            if len(floating) != 1:
                return None
        return self.answer()

    @property
    def gives_boxes(self) -> bool:
        """True if boxes of objects are predicted."""
        return self._options.outputs is None and is_detector(self.model)

    def text_of(self, data: str | Path | None = None) -> Text | None:
        """Return the tokenization of data, for None of texts in memory; None if the model was not trained on texts."""
        return text_of_model(self._asked_text, self.model.described.text, self.path, data)

    def read(self, x: Any) -> Given:
        """Open samples without labels for ``predict``.

        Raises:
            DataError: as ``predict``.
        """
        asked = self._options
        reader = SampleReader(
            self.model.to_predict,
            asked.label,
            asked.image_size,
            asked.pixels,
            self.text_of,
            partial(within_the_opened, self.model),
            asked.sound,
        )
        return reader.open(x)

    def read_evaluation(self) -> tuple[Dataset, list[str], str]:
        """Open the evaluation data of a run: ``eval_data``, or the held-out part of its data.

        Returns:
            The data, notes for the user, and the name of the data.

        Raises:
            ConfigurationError, DataError: as ``evaluate``.
        """
        folders = (self.path, *self.path.parents[:2])
        folder = next((each for each in folders if (each / SPLIT).is_file()), None)
        record = read_record(folder or self.path)
        reading = {name: value for name, value in record.get("reading", {}).items() if getattr(self._options, name) in UNSAID}
        if folder is None:
            data = record.get("eval_data")
            if not isinstance(data, str):
                raise ConfigurationError(
                    f"'{self.path}' has no data to evaluate on (eval_split, --eval-split, --eval-data): name labelled data"
                )
            return *self.read_labelled(data, reading=reading), data
        kept = read_split(folder)
        assert kept is not None
        if not isinstance(record.get("data"), str):
            raise ConfigurationError(f"'{folder}' does not say which data it was trained on: name labelled data to evaluate on")
        asked, data = EvalSplit.read(kept["eval_split"]), record["data"]
        dataset, notes = self.read_labelled(data, asked, reading)
        split = held_out(dataset, asked, kept["seed"], self.evaluated.to_evaluate.label, kept)
        return parts(dataset, split)[1], [split.line, *notes], data

    def read_labelled(
        self, data: DataSource, split: EvalSplit | None = None, reading: Mapping[str, Any] | None = None
    ) -> tuple[Dataset, list[str]]:
        """Open labelled data for ``evaluate``, and return them with notes for the user.

        Args:
            data: the data.
            split: held-out part, as in ``open_dataset``.
            reading: options of ``open_dataset`` that override the predictor's.

        Raises:
            ConfigurationError, DataError: as ``evaluate``.
        """
        model, asked = self.evaluated, self._options
        classes = model.described.classes
        if isinstance(data, str | os.PathLike):
            path = Path(data)
            options: dict[str, Any] = {"label": asked.label, "image_size": asked.image_size, "missing": asked.missing}
            text = self.text_of(path)
            options |= {"pixels": asked.pixels, "sound": asked.sound, "split": split, **(reading or {})}
            read = partial(open_dataset, path, model.to_evaluate, classes=classes, **options)
        else:
            text = None if isinstance(data, Dataset) else self._text_in_memory(data)
            read = partial(as_dataset, data, model.to_evaluate, classes, asked.pixels)
        dataset, cut = within_the_opened(model, read(text=text), text, lambda text: read(text=text))
        return dataset, [note for note in (cut, getattr(dataset, "note", None)) if note is not None]

    def predictions(self, given: Given, batch_size: int | None = None, with_outputs: bool = True) -> Iterator[Prediction]:
        """Yield the prediction of each sample, batch by batch.

        Args:
            given: samples opened by ``read``.
            batch_size: samples at once; None: 32.
            with_outputs: False leaves out the outputs of a detector, which need a separate run.

        Raises:
            InputError, EngineError: as ``predict``.
        """
        size = _batch_size(batch_size)
        for part in given.parts:
            if self.gives_boxes:
                yield from self._boxes(part, size, with_outputs)
            else:
                yield from self._answers(part, size)

    @property
    def _opening(self) -> dict[str, Any]:
        names = ("program", "best", "average", "sample_axis", "engine", "threads")
        return {name: getattr(self._options, name) for name in names}

    @property
    def _objective(self) -> dict[str, Any]:
        asked = {name: getattr(self._options, name) for name in ("loss", "metrics", "outputs")}
        return {name: value for name, value in asked.items() if value is not None}

    def _text_in_memory(self, data: Any) -> Text | None:
        """Return the tokenization of labelled texts in memory; None for arrays by input name, which are tokens already."""
        is_of_inputs = isinstance(data, Mapping) and all(entry.name in data for entry in self.model.to_predict.data)
        return None if is_of_inputs else self.text_of(None)

    def _answers(self, part: Samples, batch_size: int) -> Iterator[Prediction]:
        answer = self.answer_or_none()
        names = iter(part.names)
        for outputs in self.model.predictions(part.dataset, batch_size):
            yield from self._of_batch(answer, outputs, names)

    def _of_batch(self, answer: Answer | None, outputs: AxisFirst, names: Iterator[str]) -> Iterator[Prediction]:
        count = len(next(iter(outputs.values())))
        each = [(next(names), {name: array[row] for name, array in outputs.items()}) for row in range(count)]
        array = None if answer is None else outputs[answer.output]
        if answer is None or array is None:
            yield from (Prediction(name, outputs=given) for name, given in each)
        elif answer.is_of_pixels(array):
            masks, known = masks_of(answer, array, self.classes)
            for (name, given), mask in zip(each, masks, strict=True):
                yield _of_mask(name, mask, known, given)
        elif not answer.is_of_rows(array):
            for name, given in each:
                values = given[answer.output].astype(np.float64) if answer.kind == "values" else None
                yield Prediction(name, values=values, outputs=given)
        else:
            for (name, given), numbers in zip(each, answer.numbers(array), strict=True):
                yield _of_numbers(answer, name, numbers, self.classes, given)

    def _boxes(self, part: Samples, batch_size: int, with_outputs: bool) -> Iterator[Prediction]:
        model, names = self.evaluated, part.names
        sizes, known = part.sizes, self.classes
        outputs = _rows_of(self.model.predictions(part.dataset, batch_size)) if with_outputs else None
        for place, picture in enumerate(found_in(model, part.dataset, batch_size)):
            boxes = picture.boxes
            if sizes is not None:
                whole = part.preprocessing if part.sides is None else None
                boxes = in_pixels(boxes, sizes[place], whole)
            given = {} if outputs is None else next(outputs)
            yield _of_boxes(names[place], picture, boxes, known, self._options.score, given)


def _batch_size(asked: int | None) -> int:
    if asked is not None and (not is_whole(asked) or asked < 1):
        raise ConfigurationError(f"batch_size={asked!r}: give a whole number of 1 or more")
    return BATCH_SIZE if asked is None else int(asked)


def _rows_of(batches: Iterable[AxisFirst]) -> Iterator[dict[str, np.ndarray]]:
    for outputs in batches:
        for row in range(len(next(iter(outputs.values())))):
            yield {name: array[row] for name, array in outputs.items()}


def _of_numbers(
    answer: Answer, name: str, numbers: np.ndarray, known: tuple[str, ...] | None, outputs: Mapping[str, np.ndarray]
) -> Prediction:
    if answer.kind == "values" or (len(numbers) == 1 and answer.kind != "questions"):
        return Prediction(name, values=numbers, outputs=outputs)
    is_known = bool(np.isfinite(numbers).all())
    if answer.kind == "questions" and len(numbers) == 1:
        yes = float(numbers[0])
        two = known if known is not None and len(known) == 2 else NO_AND_YES
        scores, chosen = np.array([1 - yes, yes]), int(yes >= EVEN_ODDS)
        return Prediction(name, two[chosen] if is_known else None, float(scores[chosen]), scores, two, outputs=outputs)
    names = tuple(class_names(known, len(numbers)))
    if not is_known:
        return Prediction(name, () if answer.kind == "questions" else None, math.nan, numbers, names, outputs=outputs)
    best = int(np.argmax(numbers))
    label: str | tuple[str, ...] = names[best]
    if answer.kind == "questions":
        label = tuple(each for each, number in zip(names, numbers, strict=True) if number > EVEN_ODDS)
    return Prediction(name, label, float(numbers[best]), numbers, names, outputs=outputs)


def _of_mask(name: str, mask: np.ndarray, names: tuple[str, ...], outputs: Mapping[str, np.ndarray]) -> Prediction:
    shares = np.bincount(mask.reshape(-1), minlength=len(names)) / mask.size
    most = int(np.argmax(shares))
    return Prediction(name, names[most], float(shares[most]), shares, names, mask=mask, outputs=outputs)


def _of_boxes(
    name: str,
    picture: Picture,
    boxes: np.ndarray,
    known: tuple[str, ...] | None,
    least: float,
    outputs: Mapping[str, np.ndarray],
) -> Prediction:
    order = np.argsort(-picture.scores, kind="stable")
    order = order[picture.scores[order] >= least]
    indices = [int(picture.classes[index]) for index in order]
    label = tuple(known[index] if known is not None and index < len(known) else str(index) for index in indices)
    scores = picture.scores[order].astype(np.float64)
    score = float(scores[0]) if len(scores) else None
    return Prediction(name, label, score, scores, known or (), boxes=boxes[order].astype(np.float64), outputs=outputs)


def _some(words: list[str]) -> str:
    rest = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")


def _numbers(values: np.ndarray) -> str:
    if values.size == 1:
        return f"{values.reshape(-1)[0]:.4f}"
    if values.ndim > 1:
        return f"[{', '.join(map(str, values.shape))}]"
    return f"[{_some([f'{value:.4f}' for value in values.tolist()])}]"


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:57]}..."

"""Predictions in the formats of a command: a table, CSV, or a JSON object for each sample."""

from __future__ import annotations

import csv
import json
import math
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from burnish.cli.console import make_folder_of, output, print_table
from burnish.errors import UNSHOWN, ConfigurationError, escaped
from burnish.files.file_writing import replacing

if TYPE_CHECKING:
    from burnish.training.predictions import Answer
    from burnish.training.predictor import Prediction

FORMATS = ("table", "csv", "jsonl")
BOX = ("class", "score", "left", "top", "right", "bottom")
UNKNOWN = ("nan", math.nan)
"""Class and probability of a sample for which a model gives NaN."""
LABELS_BETWEEN = ";"
"""Separator of the labels of a sample."""


class Rows:
    """The columns of predictions, and the rows of each.

    Args:
        kind: name for a sample: ``file`` or ``row``.
        answer: interpretation of the output; None for a detector.
        top: number of classes to show, the most probable first; None: one, or all for yes-or-no labels.
        called: names of the values; by default the name of the output and their indices in it.
    """

    def __init__(self, kind: str, answer: Answer | None, top: int | None, called: Sequence[str] = ()):
        self.kind, self._answer, self._top, self._called = kind, answer, top, called

    def header(self, first: Prediction) -> list[str]:
        """Return the names of the columns, the same for all predictions of a model.

        Raises:
            ConfigurationError: the prediction does not fit into a table row, or the model has fewer classes than requested.
        """
        kind, answer = first.kind, self._answer
        if kind == "boxes":
            return [self.kind, *BOX]
        if kind == "mask":
            return [self.kind, "class", "share of pixels"]
        assert answer is not None
        array = first.outputs[answer.output]
        if kind == "outputs" or (kind == "values" and not answer.is_of_rows(array[None])):
            answer.numbers(array[None])
        number = "score" if answer.kind == "scores" else "probability"
        if kind == "values" and answer.kind == "values":
            assert first.values is not None
            width = len(first.values)
            if len(self._called) == width:
                return [self.kind, *self._called]
            return [self.kind, *([answer.output] if width == 1 else [f"{answer.output}[{at}]" for at in range(width)])]
        if kind == "values" or self._asks_one(first):
            return [self.kind, number]
        top, width = self._top or 1, len(first.classes)
        if top > width:
            raise ConfigurationError(
                f"top: the model has {width} classes, and {top} of them are to be shown: ask for {width} or fewer"
            )
        if kind == "labels" and self._top is None:
            return [self.kind, "labels", *first.classes]
        ranks = [f"_{rank}" if rank > 1 else "" for rank in range(1, top + 1)]
        return [self.kind, *(name + rank for rank in ranks for name in ("class", number))]

    def of(self, prediction: Prediction) -> list[list[Any]]:
        """Return the rows of a prediction: one, or one for each box, or for each class in the mask."""
        name = prediction.name
        if prediction.kind == "boxes":
            return [[name, label, score, *map(float, box)] for label, score, box in prediction.found()]
        if prediction.kind == "mask":
            return [[name, label, share] for label, share in prediction.top() if share]
        if prediction.values is not None:
            return [[name, *map(float, prediction.values)]]
        assert prediction.scores is not None
        if self._asks_one(prediction):
            return [[name, float(prediction.scores[-1])]]
        if prediction.label is None:
            return [[name, *(UNKNOWN * (self._top or 1))]]
        if isinstance(prediction.label, tuple) and self._top is None:
            return [[name, LABELS_BETWEEN.join(prediction.label), *map(float, prediction.scores)]]
        return [[name, *(part for pair in prediction.top(self._top or 1) for part in pair)]]

    def _asks_one(self, prediction: Prediction) -> bool:
        """True for the single probability of an unnamed yes."""
        from burnish.training.predictor import NO_AND_YES

        return prediction.classes == NO_AND_YES and self._answer is not None and self._answer.kind == "questions"


class Writable(Protocol):
    """An object with a ``write`` method for texts."""

    def write(self, text: str, /) -> object: ...


class Lines:
    """A writer of predictions in a format, one after the other."""

    def write(self, prediction: Prediction) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Write output that needs all predictions."""


class TableLines(Lines):
    """A table on the screen with fitted column widths."""

    def __init__(self, rows: Rows):
        self._rows, self._kept = rows, list[list[Any]]()
        self._header: list[str] | None = None

    def write(self, prediction: Prediction) -> None:
        if self._header is None:
            self._header = self._rows.header(prediction)
        self._kept += self._rows.of(prediction)

    def end(self) -> None:
        if self._header is not None:
            print_table(output(), self._header, self._kept)


class CsvLines(Lines):
    """A CSV file, with a header."""

    def __init__(self, file: Writable, rows: Rows, is_shown: bool = False):
        self._writer, self._rows, self._is_shown = csv.writer(file, lineterminator="\n" if is_shown else "\r\n"), rows, is_shown
        self._has_begun = False

    def write(self, prediction: Prediction) -> None:
        if not self._has_begun:
            self._writer.writerow(self._rows.header(prediction))
            self._has_begun = True
        for row in self._rows.of(prediction):
            self._writer.writerow([escaped(cell) if self._is_shown and isinstance(cell, str) else cell for cell in row])


class JsonLines(Lines):
    def __init__(self, file: Writable, top: int | None):
        self._file, self._top = file, top

    def write(self, prediction: Prediction) -> None:
        text = json.dumps(_finite(prediction.as_dict(self._top)), ensure_ascii=False)
        self._file.write(_without_controls(text) + "\n")


class _Screen:
    def write(self, text: str, /) -> None:
        typer.echo(text.encode("utf-8", "backslashreplace").decode(), nl=False)


def shown_lines(form: str, rows: Rows, top: int | None) -> Lines:
    """Return a printer of predictions in a format of ``FORMATS``."""
    if form == "table":
        return TableLines(rows)
    return JsonLines(_Screen(), top) if form == "jsonl" else CsvLines(_Screen(), rows, is_shown=True)


@contextmanager
def written_lines(path: Path, rows: Rows, top: int | None) -> Iterator[Lines]:
    """Yield a writer of predictions into a file, CSV or JSON lines by its suffix; the file appears complete at the end.

    Raises:
        DataError, CheckpointError: the file cannot be written; an earlier one is untouched.
    """
    make_folder_of(path)
    # File names that are not UTF-8 are escaped, as on the screen.
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        yield JsonLines(file, top) if path.suffix == ".jsonl" else CsvLines(file, rows)


@contextmanager
def until_nobody_reads() -> Iterator[None]:
    """Continue silently after this context if nobody reads the output any more, as after ``| head``."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        output().on_broken_pipe()


def _without_controls(text: str) -> str:
    """Return JSON with terminal control characters as JSON escapes."""
    if text.isprintable():
        return text
    return "".join(json.dumps(each)[1:-1] if unicodedata.category(each) in UNSHOWN else each for each in text)


def _finite(value: Any) -> Any:
    """Return JSON-compatible values with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value

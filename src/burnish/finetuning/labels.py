"""The kind of labels, found before their use is known: classes, values, or several yes-or-no labels."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from burnish import losses
from burnish.data import Dataset, DataSource
from burnish.data.formats import format_of, read_table
from burnish.data.huggingface import class_column, is_columnar, named_labels
from burnish.data.label_coding import are_lists, label_columns
from burnish.data.numpy_files import read_npz
from burnish.data.sources import columns_in
from burnish.errors import DataError
from burnish.losses.base import SIGMOID, Wrapping

Kind = Literal["classes", "values", "questions"]
VALUES = (losses.MeanSquaredError, losses.MeanAbsoluteError, losses.Huber, losses.SmoothL1)
"""Losses of values, which have no classes."""
MANY, FEW = 20, 10
"""Whole numbers are values if there are more than ``MANY`` different ones, each in fewer than ``FEW`` samples on average."""
SAMPLES_READ = 4096
"""Samples read of a data set whose labels are not in an array."""


@dataclass(frozen=True)
class Labels:
    """The labels of data.

    Attributes:
        array: [samples], or [samples, values]; None for lists of labels.
        columns: their columns in a table; empty for other data.
        is_of_lists: True if a sample has a list of labels, or a text with separators.
    """

    array: np.ndarray | None
    columns: tuple[str, ...] = ()
    is_of_lists: bool = False

    @property
    def hold(self) -> str:
        """The subject and verb for messages about the labels."""
        if len(self.columns) == 1:
            return f"the label '{self.columns[0]}' holds"
        return f"the labels {', '.join(map(repr, self.columns))} hold" if self.columns else "the labels hold"


def labels_of(data: DataSource, reading: Mapping[str, Any]) -> Labels | None:
    """Return the labels of data; None for data other than tables and arrays, or data that cannot be read (the later full read
    reports the error).

    Args:
        data: as in ``burnish.finetune``.
        reading: options for opening the data.
    """
    label, separator = reading.get("label"), reading.get("label_separator")
    with suppress(DataError, OSError, ValueError, MemoryError):
        found = _of_path(Path(data), label, reading) if isinstance(data, str | Path) else _in_memory(data, label)
        if found is not None and separator is not None and found.array is not None and found.array.dtype.kind in "US":
            return Labels(None, found.columns, True)
        return found
    return None


def _of_path(path: Path, label: str | None, reading: Mapping[str, Any]) -> Labels | None:
    form = format_of(str(path))
    if form.holds == "table":
        chosen: tuple[str, ...] = ()

        def left_out(names: Any) -> set[str]:
            nonlocal chosen
            chosen = label_columns(list(names), label, str(path))
            return set(names) - set(chosen)

        columns, _ = read_table(path, "drop", left_out)
        return _of_columns({name: columns[name] for name in chosen})
    if form.name == "npz":
        return _of_arrays(read_npz(path))
    if form.name in ("npy", "array"):
        places = [path / f"{name}.npy" for name in ("targets", "labels", "y")] if path.is_dir() else []
        if path.is_file() and label is not None:
            places = [Path(label)]
        file = next((place for place in places if place.is_file()), None)
        return None if file is None else Labels(np.load(file, mmap_mode="r", allow_pickle=False))
    return None


def _in_memory(data: Any, label: str | None) -> Labels | None:
    if is_columnar(data):
        names = data.column_names
        chosen = label_columns([*names], label or class_column(data, names), "data")
        return _of_columns({name: named_labels(data, name)[0] for name in chosen})
    columns = columns_in(data)
    if isinstance(data, tuple) and len(data) == 2:
        return Labels(None, (), True) if are_lists(data[1]) else Labels(np.asarray(data[1]))
    if isinstance(data, Mapping) and {"labels", "targets"} & {*data}:
        held = data.get("targets", data.get("labels"))
        if label is None and np.ndim(held) and (columns is None or any(np.ndim(each) > 1 for each in data.values())):
            return Labels(np.asarray(held))
    if columns is not None:
        chosen = label_columns([*columns], label, "data")
        return _of_columns({name: columns[name] for name in chosen})
    if isinstance(data, Mapping):
        return _of_arrays(data)
    if isinstance(data, Dataset) and len(data):
        arrays = getattr(data, "arrays", None)
        return _of_arrays(arrays if isinstance(arrays, Mapping) else data.batch(np.arange(min(len(data), SAMPLES_READ))))
    return None


def _of_columns(columns: Mapping[str, np.ndarray]) -> Labels | None:
    arrays = [*columns.values()]
    if any(array.dtype == object for array in arrays):
        return Labels(None, (*columns,), True)
    if len(arrays) > 1 and any(array.dtype.kind not in "biuf" or array.ndim != 1 for array in arrays):
        return None
    return Labels(arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1), (*columns,))


def _of_arrays(arrays: Mapping[str, np.ndarray]) -> Labels | None:
    held = next((arrays[name] for name in ("targets", "labels", "y") if name in arrays), None)
    return None if held is None else Labels(np.asarray(held))


def innermost(loss: losses.Loss) -> losses.Loss:
    """Return the loss inside its wrappers."""
    while isinstance(loss, Wrapping):
        loss = loss.loss
    return loss


def asks_yes_or_no(loss: losses.Loss) -> bool:
    """Return True if a loss treats each element of its prediction as a yes-or-no question."""
    return any(
        reading.activation == SIGMOID or (reading.takes == "probabilities" and reading.class_axis is None)
        for reading in loss.readings
    )


def kind_of(labels: Labels | None, loss: losses.Loss | None, outputs: int) -> tuple[Kind, str | None]:
    """Return the kind of task for labels, and the reason in words; None as reason for classes, the usual kind.

    A given loss decides. Otherwise text means classes, lists and several columns of 0 and 1 mean yes-or-no labels, and numbers
    with fractions mean values. Whole numbers are values too, if the model has one output and there are more than two of them, or
    if there are more than ``MANY`` different ones in fewer than ``FEW`` samples each; but they are classes if the model has
    exactly the outputs to number them.

    Args:
        labels: labels of the data; None if unknown.
        loss: the loss given, or None.
        outputs: numbers that the model gives for each sample.
    """
    if loss is not None:
        inner = innermost(loss)
        if isinstance(inner, VALUES):
            return "values", f"{inner.name} compares values"
        return ("questions", f"{inner.name} asks for yes or no") if asks_yes_or_no(inner) else ("classes", None)
    if labels is None:
        return "classes", None
    if labels.is_of_lists:
        return "questions", f"{labels.hold} several for each sample"
    array = labels.array
    assert array is not None
    if array.dtype.kind not in "biuf" or array.ndim not in (1, 2) or not array.size:
        return "classes", None
    if array.ndim == 2 and array.shape[1] > 1:
        is_binary = array.dtype.kind == "b" or bool(np.isin(array, (0, 1)).all())
        if not is_binary:
            return "values", f"{labels.hold} {array.shape[1]} numbers for each sample"
        if (np.asarray(array, np.int64).sum(axis=1) == 1).all() and not labels.columns:
            return "classes", None  # one-hot, which the reader rejects with a remedy
        return "questions", f"{labels.hold} {array.shape[1]} times 0 or 1 for each sample"
    numbers = np.asarray(array).reshape(-1)
    if numbers.dtype.kind == "b":
        return "classes", None
    if numbers.dtype.kind == "f" and not (numbers[np.isfinite(numbers)] % 1 == 0).all():
        return "values", f"{labels.hold} numbers with fractions"
    different = np.unique(numbers)
    if len(different) <= 2:
        return "classes", None
    if outputs == 1:
        return "values", f"{labels.hold} {len(different)} different numbers, and the model gives one"
    if len(different) > MANY and len(numbers) < FEW * len(different) and int(different[-1]) + 1 != outputs:
        return "values", f"{labels.hold} {len(different):,} different numbers in {len(numbers):,} samples"
    return "classes", None

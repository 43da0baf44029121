"""Coding of table columns for a model: categories, standardization, and missing values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.data.missing_values import Columns
from burnish.errors import DataError
from burnish.program import Entry
from burnish.settings import is_number_text
from burnish.untrusted_files import memory_excess
from burnish.validation import is_number

UNSEEN = -1
SHOWN = 3
PLACE_BYTES = 8
CONSTANT_SPREAD = 1e-12
"""A smaller standard deviation, relative to the mean, is rounding in a constant column."""


FLOAT32_STEP, BLUR = 2.0**-23, 0.05
"""float32's step near 1, and the share of a standard deviation from which steps are too coarse."""


class Scale(NamedTuple):
    """Scaling of numbers: ``(x - mean) * factor``. The factor is 0 for columns that were constant in training."""

    mean: float
    factor: float

    @property
    def is_blurred(self) -> bool:
        """True if float32 steps near this mean exceed a twentieth of the standard deviation."""
        return abs(self.mean) * FLOAT32_STEP * self.factor > BLUR

    def applied(self, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return scaled numbers, by the operations and dtype of an exported file, for bitwise equality."""
        mean, factor = np.asarray(self.mean, dtype), np.asarray(self.factor, dtype)
        with np.errstate(over="ignore"):
            return np.asarray((numbers.astype(dtype) - mean) * factor)


@dataclass(frozen=True)
class TableDescription:
    """The feature columns that a model was trained on, in order.

    Attributes:
        columns: name and sorted categories of each; None for numbers.
        one_hot: True for one-hot categories in a model's only input; else indices.
        scales: scale of each column's numbers or category indices, or None; empty if there are none.
        fills: number or category for missing values of each column; None if they are errors. Empty if all are.
        in_model: True if the model itself does this and takes raw columns.
    """

    columns: tuple[tuple[str, tuple[str, ...] | None], ...]
    one_hot: bool = False
    scales: tuple[Scale | None, ...] = ()
    fills: tuple[float | str | None, ...] = ()
    in_model: bool = False

    @classmethod
    def of(
        cls,
        features: Columns,
        inputs: Sequence[Entry],
        source: str,
        standardizes: bool = False,
        fill: str | None = None,
        coded: TableDescription | None = None,
    ) -> TableDescription | None:
        """Return the coding of columns for a model; None if they need none.

        For a model with one input, its number of features decides: indices if it equals the number of columns, one-hot if it
        equals the numbers plus categories.

        Args:
            features: the columns; statistics ignore missing values.
            inputs: inputs of the model.
            source: name for errors.
            standardizes: True to scale numbers to mean 0 and standard deviation 1.
            fill: ``mean``, ``median`` or ``most_frequent`` for missing numbers (categories: the most frequent), or None.
            coded: coding of the whole table, whose categories a part takes over.

        Raises:
            DataError: the number of features fits neither, or a column has no values.
        """
        entries = {entry.name: entry for entry in inputs} if len(inputs) != 1 else dict.fromkeys(features, *inputs)
        there = {name: column[~features.gaps[name]] if name in features.gaps else column for name, column in features.items()}
        read = {name: entry for name, entry in entries.items() if name in there and entry.dtype != ir.DataType.STRING}
        known = {} if coded is None else dict(coded.columns)
        columns = tuple(
            (name, known[name] if name in known else _categories(column) if name in read else None)
            for name, column in there.items()
        )
        one_hot = len(inputs) == 1 and bool(read) and _has_places(columns, inputs[0], source)
        is_filled = fill is not None and all(there[name].ndim == 1 for name in read)
        scales, fills = [], []
        for name, categories in columns:
            entry, values = read.get(name), there[name]
            if is_filled and entry is not None and not len(values):
                raise DataError(f"{source}: column '{name}' has no value in any row: remove it")
            is_number = entry is not None and entry.dtype.is_floating_point() and not (categories is not None and one_hot)
            is_place = categories is not None and entry is not None and _features_of(entry) == len(categories) and len(inputs) > 1
            is_scaled = standardizes and is_number and not is_place and values.ndim == 1
            numbers = values if categories is None else _indices(values, categories)
            scales.append(_scale(numbers, raw_dtype(entry)) if is_scaled and entry is not None else None)
            fills.append(_fill(values, fill, entry) if is_filled and fill is not None and entry is not None else None)
        made = cls(
            columns,
            one_hot,
            tuple(scales) if any(scale is not None for scale in scales) else (),
            tuple(fills) if any(value is not None for value in fills) else (),
        )
        return made if made.scales or made.fills or any(categories for _, categories in columns) else None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> TableDescription:
        """Return the coding that ``options`` wrote.

        Raises:
            TypeError, KeyError, ValueError: ``options`` has other contents.
        """
        columns = tuple((name, None if categories is None else tuple(categories)) for name, categories in options["columns"])
        if not all(isinstance(text, str) for name, categories in columns for text in (name, *(categories or ()))):
            raise TypeError("names of columns and categories are texts")
        in_model = options.get("in_model", False)
        if not isinstance(options["one_hot"], bool) or not isinstance(in_model, bool):
            raise TypeError(f"one_hot is {options['one_hot']!r}, and in_model {in_model!r}")
        read = [None if scale is None else [*map(_finite, scale)] for scale in options.get("scales", ())]
        fills = tuple(fill if fill is None or isinstance(fill, str) else _finite(fill) for fill in options.get("fills", ()))
        if any(len(each) not in (0, len(columns)) for each in (read, fills)) or any(
            scale is not None and len(scale) != len(Scale._fields) for scale in read
        ):
            raise ValueError("scales and fills are as many as there are columns")
        for fill, (_, categories) in zip(fills, columns, strict=bool(fills)):
            if isinstance(fill, str) and categories is not None and fill not in categories:
                raise ValueError(f"{fill!r} is no category")
        scales = tuple(None if scale is None else Scale(*scale) for scale in read)
        return cls(columns, options["one_hot"], scales, fills, in_model)

    def options(self) -> dict[str, Any]:
        """Return the coding as JSON-compatible values."""
        written: dict[str, Any] = {
            "columns": [[name, categories and list(categories)] for name, categories in self.columns],
            "one_hot": self.one_hot,
        }
        if self.scales:
            written["scales"] = [scale and list(scale) for scale in self.scales]
        if self.fills:
            written["fills"] = list(self.fills)
        return {**written, "in_model": True} if self.in_model else written

    def scale(self, name: str) -> Scale | None:
        """Return the scale of a column, or None."""
        names = [each for each, _ in self.columns]
        return self.scales[names.index(name)] if self.scales and name in names else None

    def fill(self, name: str) -> float | str | None:
        """Return the replacement of missing values in a column, or None."""
        names = [each for each, _ in self.columns]
        return self.fills[names.index(name)] if self.fills and name in names else None

    def text(self) -> str:
        """Return the coding in words, with doubts about categories that look like numbers."""
        texts = [(name, categories) for name, categories in self.columns if categories is not None]
        coded = ", ".join(f"'{name}' ({len(categories)})" for name, categories in texts)
        said = [f"categories {'have a place each' if self.one_hot else 'become indices'}: {coded}"] if texts else []
        scaled = [name for name, _ in self.columns if self.scale(name) is not None]
        if scaled:
            said.append(f"columns are standardized with mean and standard deviation of the training data: {_some(scaled)}")
        constant = [name for name in scaled if (scale := self.scale(name)) is not None and scale.factor == 0]
        if constant:
            said.append(
                f"{_some(constant)} {'is' if len(constant) == 1 else 'are'} constant in the training data, and 0 from here on"
            )
        return "; ".join([*said, *(stray for name, categories in texts if (stray := _strays(name, categories)) is not None)])

    def filled(self, features: Columns, source: str, notes: list[str]) -> Columns:
        """Return columns with missing values filled, and add a line to ``notes``.

        Raises:
            DataError: a value is missing in a column without a replacement.
        """
        mine = dict(self.columns)
        unfilled = [name for name in features.gaps if name in mine and self.fill(name) is None]
        features.refuse_gaps(unfilled, source)
        held, said = dict(features), []
        for name, mask in features.gaps.items():
            value = self.fill(name)
            if name not in mine or value is None:
                continue
            column = held[name]
            if isinstance(value, str):
                column = column.astype(np.result_type(column.dtype, np.array(value).dtype))
            elif column.dtype.kind != "f" and not value.is_integer():
                column = column.astype(np.float64)
            held[name] = np.where(mask, np.asarray(value, column.dtype), column)
            said.append(
                f"{int(mask.sum()):,} of '{name}' by {value!r}"
                if isinstance(value, str)
                else f"{int(mask.sum()):,} of '{name}' by {value:.6g}"
            )
        if said:
            more = f" and {len(said) - SHOWN} more columns" if len(said) > SHOWN else ""
            notes.append(f"missing values are filled: {', '.join(said[:SHOWN])}{more}")
        return Columns(held, features.rows)

    def matrix(self, features: Columns, source: str, entry: Entry) -> tuple[np.ndarray, list[str]]:
        """Return the features of a model's only input, [rows, features], and notes on categories that training did not have.

        Such a category is all zeros if one-hot, else index -1.

        Raises:
            DataError: a column or value is missing, a column of numbers holds text, or one-hot categories take too much memory.
        """
        self._check_memory(features, source)
        parts, notes, dtype = [], list[str](), raw_dtype(entry)
        features = self.filled(features, source, notes)
        for name, categories in self.columns:
            column = _column(features, name, categories, source)
            scale = None if self.in_model else self.scale(name)
            if categories is None:
                whole = scale is None and np.can_cast(column.dtype, np.int64)
                part = column[:, None].astype(np.int64) if whole else column[:, None].astype(np.float64)
            else:
                indices = _indices(column, categories)
                notes += _unseen_note(name, column, indices)
                places = (indices[:, None] == np.arange(len(categories))).astype(np.int64)
                part = places if self.one_hot else indices[:, None]
            parts.append(part if scale is None else scale.applied(part, dtype))
        return np.concatenate(parts, axis=1), notes

    def _check_memory(self, features: Mapping[str, np.ndarray], source: str) -> None:
        counts = [len(categories) for _, categories in self.columns if categories is not None]
        places, rows = sum(counts) if self.one_hot else len(counts), max(map(len, features.values()), default=0)
        excess = memory_excess(PLACE_BYTES * places * rows, sum(column.nbytes for column in features.values()))
        if excess is not None:
            raise DataError(
                f"{source}: {rows:,} rows with a place for each of {places:,} categories are too many: {excess}; or leave out "
                "the columns of text that differ in each row, or take a model with as many inputs as there are columns"
            )

    def column(self, column: np.ndarray, entry: Entry, source: str) -> tuple[np.ndarray, list[str]]:
        """Return a column for the input of its name, as indices, or one-hot if the input has as many numbers.

        Raises:
            DataError: a category is not from training, and the input has no spare row.
        """
        categories = dict(self.columns).get(entry.name)
        scale = None if self.in_model else self.scale(entry.name)
        if categories is None:
            return column if scale is None else scale.applied(column, raw_dtype(entry)), []
        if self.in_model:
            known = _indices(column.astype(str), categories)
            return column.astype(str), _unseen_note(entry.name, column, known)
        indices = _indices(column.astype(str), categories)
        notes = _unseen_note(entry.name, column, indices)
        if entry.dtype.is_floating_point() and len(categories) > 1 and _features_of(entry) == len(categories):
            return (indices[:, None] == np.arange(len(categories))).astype(np.int64), notes
        spare = None if entry.maximum is None or entry.maximum < len(categories) else len(categories)
        if notes and not entry.dtype.is_floating_point():
            if spare is None:
                raise DataError(
                    f"{source}: {notes[0]}, and the input '{entry.name}' has no row to spare for them; leave these rows out"
                )
            indices = np.where(indices == UNSEEN, spare, indices)
        return indices if scale is None else scale.applied(indices, raw_dtype(entry)), notes


def _has_places(columns: Sequence[tuple[str, tuple[str, ...] | None]], entry: Entry, source: str) -> bool:
    """True if a model's only input takes one-hot categories.

    Raises:
        DataError: its number of features fits neither coding.
    """
    if not any(categories for _, categories in columns):
        return False
    places = sum(1 if categories is None else len(categories) for _, categories in columns)
    takes = _features_of(entry)
    if takes is not None and takes not in (len(columns), places):
        coded = ", ".join(f"'{name}' {len(categories)}" for name, categories in columns if categories is not None)
        raise DataError(
            f"{source}: the model's input '{entry.name}' takes {takes} numbers, and {len(columns)} columns give "
            f"{len(columns)} with an index for each category, or {places} with a place for each ({coded} categories): leave "
            "columns out, encode them yourself, or take a model with that input"
        )
    return takes != len(columns)


def raw_dtype(entry: Entry) -> np.dtype:
    """Return the dtype of raw columns and their scaling: float32, or float64 for float64 inputs."""
    return np.dtype(np.float64 if entry.dtype == ir.DataType.DOUBLE else np.float32)


def _scale(numbers: np.ndarray, dtype: np.dtype) -> Scale:
    values = numbers.astype(np.float64)
    size = np.abs(values).max(initial=0.0) or 1.0  # prevents overflow of squares
    mean = (values / size).mean() if len(values) else 0.0
    std = np.sqrt(((values / size - mean) ** 2).mean()) * size if len(values) else 0.0
    mean *= size
    with np.errstate(over="ignore", divide="ignore"):
        factor = np.asarray(1 / std if std > abs(mean) * CONSTANT_SPREAD else 0.0).astype(dtype)
    return Scale(float(np.asarray(mean).astype(dtype)), float(factor) if np.isfinite(factor) else 0.0)


def _fill(values: np.ndarray, fill: str, entry: Entry) -> float | str:
    """Return the replacement of missing values; a whole number for integer inputs."""
    if values.dtype.kind in "US" or fill == "most_frequent" or not entry.dtype.is_floating_point():
        different, counts = np.unique(values, return_counts=True)
        most = different[counts.argmax()]
        return str(most) if values.dtype.kind in "US" else float(most)
    numbers = values.astype(np.float64)
    size = np.abs(numbers).max() or 1.0
    value = (numbers / size).mean() * size if fill == "mean" else np.median(numbers)
    return float(np.asarray(value).astype(raw_dtype(entry)))


def _finite(number: Any) -> float:
    if not is_number(number):
        raise TypeError(f"{number!r} is no finite number")
    return float(number)


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _categories(column: np.ndarray) -> tuple[str, ...] | None:
    return tuple(np.unique(column.astype(str)).tolist()) if column.dtype.kind in "US" else None


def _strays(name: str, categories: Sequence[str]) -> str | None:
    """Return a note on a column of numbers with a few texts; None if most of its categories are texts."""
    others = [category for category in categories if not is_number_text(category)]
    if not others or 2 * len(others) >= len(categories):
        return None
    shown = ", ".join(f"'{category}'" for category in others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
    count = len(categories) - len(others)
    return (
        f"'{name}' would be numbers but for {shown}, and its {count} numbers are categories now: repair these rows where that is "
        "not meant"
    )


def _features_of(entry: Entry) -> int | None:
    extents = [extent for extent in entry.extents[1:] if isinstance(extent, int)]
    return math.prod(extents) if len(extents) == len(entry.extents) - 1 else None


def _column(features: Mapping[str, np.ndarray], name: str, categories: Sequence[str] | None, source: str) -> np.ndarray:
    if name not in features:
        raise DataError(
            f"{source}: no column '{name}', which the model was trained on; the columns are {', '.join(features) or 'none'}"
        )
    column = features[name]
    if categories is not None:
        return column.astype(str)
    if column.dtype.kind not in "biuf":
        raise DataError(f"{source}: column '{name}' holds text ('{column[0]}'), and the model was trained on numbers there")
    return column


def _indices(column: np.ndarray, categories: Sequence[str]) -> np.ndarray:
    known = np.asarray(categories, dtype=str)
    places = np.searchsorted(known, column)
    places = np.minimum(places, len(known) - 1)
    return np.where(known[places] == column, places, UNSEEN).astype(np.int64)


def _unseen_note(name: str, column: np.ndarray, indices: np.ndarray) -> list[str]:
    unseen = column[indices == UNSEEN]
    if not len(unseen):
        return []
    values = sorted({str(value) for value in unseen.tolist()})
    named = ", ".join(map(repr, values[:SHOWN])) + (f" and {len(values) - SHOWN} more" if len(values) > SHOWN else "")
    return [f"{len(unseen):,} of {len(column):,} rows of column '{name}' hold categories that training did not have ({named})"]

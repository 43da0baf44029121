"""Columns of text in a table as numbers: one index, or a place of its own for each category."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.errors import DataError
from burnish.program import Entry
from burnish.settings import is_number_text
from burnish.untrusted_files import memory_excess

UNSEEN = -1
SHOWN = 3
PLACE_BYTES = 8


@dataclass(frozen=True)
class TableDescription:
    """The columns of features that a model was trained on, in their order.

    Attributes:
        columns: name and categories of each, the categories sorted; None for a column of numbers.
        one_hot: whether categories of a model's only input have a place each, 1 where it is that one; else each is its index.
    """

    columns: tuple[tuple[str, tuple[str, ...] | None], ...]
    one_hot: bool = False

    @classmethod
    def of(cls, features: Mapping[str, np.ndarray], inputs: Sequence[Entry], source: str) -> TableDescription | None:
        """Return how columns are coded for a model; None where there is no category in what it reads.

        Of a model with one input, its number of features decides: as many as there are columns takes indices, as many as there
        are numbers and categories takes places.

        Raises:
            DataError: the number of features is neither.
        """
        if len(inputs) != 1:
            texts = {entry.name for entry in inputs if entry.dtype != ir.DataType.STRING} & features.keys()
            columns = tuple((name, _categories(column) if name in texts else None) for name, column in features.items())
            return cls(columns) if any(categories for _, categories in columns) else None
        columns = tuple((name, _categories(column)) for name, column in features.items())
        if inputs[0].dtype == ir.DataType.STRING or not any(categories for _, categories in columns):
            return None
        places = sum(1 if categories is None else len(categories) for _, categories in columns)
        takes = _features_of(inputs[0])
        if takes is not None and takes not in (len(columns), places):
            coded = ", ".join(f"'{name}' {len(categories)}" for name, categories in columns if categories is not None)
            raise DataError(
                f"{source}: the model's input '{inputs[0].name}' takes {takes} numbers, and {len(columns)} columns give "
                f"{len(columns)} with an index for each category, or {places} with a place for each ({coded} categories): leave "
                "columns out, encode them yourself, or take a model with that input"
            )
        return cls(columns, one_hot=takes != len(columns))

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> TableDescription:
        """Return what ``options`` wrote.

        Raises:
            TypeError, KeyError, ValueError: it is something else.
        """
        columns = tuple((name, None if categories is None else tuple(categories)) for name, categories in options["columns"])
        if not all(isinstance(text, str) for name, categories in columns for text in (name, *(categories or ()))):
            raise TypeError("names of columns and categories are texts")
        if not isinstance(options["one_hot"], bool):
            raise TypeError(f"one_hot is {options['one_hot']!r}")
        return cls(columns, options["one_hot"])

    def refitted(self, features: Mapping[str, np.ndarray]) -> TableDescription:
        """Return the description of a part of the rows: with the same categories, and what is computed of numbers anew.

        Args:
            features: the columns of the part.
        """
        return self

    def options(self) -> dict[str, Any]:
        """Return the description as JSON-compatible values."""
        return {
            "columns": [[name, categories and list(categories)] for name, categories in self.columns],
            "one_hot": self.one_hot,
        }

    def text(self) -> str:
        """Return which columns hold categories, and what becomes of them, in words; and which look like numbers but for some."""
        texts = [(name, categories) for name, categories in self.columns if categories is not None]
        coded = ", ".join(f"'{name}' ({len(categories)})" for name, categories in texts)
        strays = [stray for name, categories in texts if (stray := _strays(name, categories)) is not None]
        return "; ".join([f"categories {'have a place each' if self.one_hot else 'become indices'}: {coded}", *strays])

    def matrix(self, features: Mapping[str, np.ndarray], source: str) -> tuple[np.ndarray, list[str]]:
        """Return the features of a model's only input, [rows, features], and what is to be said of categories not seen before.

        A category that training did not have is at no place, or has the index -1.

        Raises:
            DataError: a column is missing, or holds text where the model was trained on numbers; or places for all categories
                take too much memory.
        """
        self._check_memory(features, source)
        parts, notes = [], []
        for name, categories in self.columns:
            column = _column(features, name, categories, source)
            if categories is None:
                parts.append(column[:, None].astype(np.int64 if np.can_cast(column.dtype, np.int64) else np.float64))
                continue
            indices = _indices(column, categories)
            notes += _unseen_note(name, column, indices)
            parts.append((indices[:, None] == np.arange(len(categories))).astype(np.int64) if self.one_hot else indices[:, None])
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
        """Return a column for an input of its name, as indices, or as places where the input takes as many numbers.

        Raises:
            DataError: a category that training did not have, and an input without a row to spare.
        """
        categories = dict(self.columns).get(entry.name)
        if categories is None:
            return column, []
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
        return indices, notes


def _categories(column: np.ndarray) -> tuple[str, ...] | None:
    return tuple(np.unique(column.astype(str)).tolist()) if column.dtype.kind in "US" else None


def _strays(name: str, categories: Sequence[str]) -> str | None:
    """What is said of a column that would hold numbers but for some texts; None where most of its categories are texts."""
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
    """How many numbers an input takes of a sample; None where that is open."""
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

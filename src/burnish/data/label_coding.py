"""Label formats beyond one class per sample: several label columns, and several labels in one column."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.errors import DataError
from burnish.program import Entry
from burnish.settings import suggestion
from burnish.untrusted_files import memory_excess

LABEL_COLUMNS = ("label", "labels", "y", "target", "targets")
PLACE_BYTES = 4


@dataclass(frozen=True)
class LabelDescription:
    """The columns of a model's targets, in the order of its outputs.

    Attributes:
        columns: their names; a single one for multi-label classes.
        separator: text between the labels of a sample in one column; None for one value per column.
    """

    columns: tuple[str, ...]
    separator: str | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> LabelDescription:
        """Return the description that ``options`` wrote.

        Raises:
            TypeError, KeyError: ``options`` has other contents.
        """
        columns, separator = tuple(options["columns"]), options["separator"]
        if not all(isinstance(name, str) for name in columns) or not isinstance(separator, str | None):
            raise TypeError("names of columns and the separator are texts")
        return cls(columns, separator)

    def options(self) -> dict[str, Any]:
        """Return the description as JSON-compatible values."""
        return {"columns": list(self.columns), "separator": self.separator}


def label_columns(
    columns: Sequence[str], asked_for: str | Sequence[str] | None, source: str, known: LabelDescription | None = None
) -> tuple[str, ...]:
    """Return the label columns: those requested, those of training, one with a usual name, or the last column.

    Args:
        columns: names of all columns.
        asked_for: one name, or several with commas between them.
        source: name for errors.
        known: label columns of the trained model.

    Raises:
        DataError: there is no such column, or fewer than two columns.
    """
    if len(columns) < 2:
        raise DataError(f"{source}: {len(columns)} columns; a table needs feature columns and a label column")
    if asked_for is not None:
        if not isinstance(asked_for, str):
            names = tuple(asked_for)
        else:
            names = (asked_for,) if asked_for in columns else tuple(name.strip() for name in asked_for.split(","))
        missing = next((name for name in names if name not in columns), None)
        if missing is not None:
            raise DataError(f"{source}: no column '{missing}'{suggestion(missing, columns)}; choose among {', '.join(columns)}")
        if len({*names}) < len(names):
            raise DataError(f"{source}: the label columns {','.join(names)} name one twice: name each once")
        if len(names) == len(columns):
            raise DataError(f"{source}: all columns are labels, and none is left as a feature: name fewer (--label)")
        return names
    if known is not None and {*known.columns} <= {*columns}:
        return known.columns
    return (next((name for name in columns if name.lower() in LABEL_COLUMNS), columns[-1]),)


def asks_yes_or_no(label: Entry | None) -> bool:
    """True if the loss takes yes/no targets: numbers from 0 to 1."""
    return label is not None and label.dtype.is_floating_point() and (label.minimum, label.maximum) == (0, 1)


def takes_several(label: Entry | None) -> bool:
    """True if the loss takes several yes/no targets per sample."""
    return label is not None and asks_yes_or_no(label) and len(label.extents) == 2


def are_lists(labels: object) -> bool:
    """True if labels are one list per sample, of names or of class numbers with varying lengths."""
    if isinstance(labels, np.ndarray) and labels.dtype != object:
        return False
    held = list(labels) if isinstance(labels, Iterable) and not isinstance(labels, str | bytes | Mapping) else []
    rows = [row for row in held if isinstance(row, list | tuple | set | frozenset | np.ndarray)]
    if not held or len(rows) < len(held):
        return False
    return len({len(row) for row in rows}) > 1 or any(isinstance(label, str) for row in rows for label in row)


def divided(labels: Iterable[Any], separator: str) -> list[list[str]]:
    """Split each sample's text into its labels; an empty text has none."""
    return [[part.strip() for part in str(text).split(separator) if part.strip()] for text in labels]


def several_labels(
    labels: Iterable[Iterable[Any]], source: str, classes: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return multi-hot labels, float32 [samples, labels], and the label names.

    Args:
        labels: the labels of each sample.
        source: name for errors.
        classes: names in the order of the columns; those that occur, sorted, by default.

    Raises:
        DataError: a label is not in ``classes``, no sample has a label, or the array does not fit into memory.
    """
    rows = [[*map(str, row)] for row in labels]
    occurring = {label for row in rows for label in row}
    numbers = all(label.isdecimal() for label in occurring)
    names = (
        tuple(classes)
        if classes is not None
        else tuple(sorted(occurring, key=(lambda label: (int(label), label)) if numbers else None))
    )
    if not names:
        raise DataError(f"{source}: no sample has a label, and there is nothing to learn: give labels")
    unknown = sorted(occurring - {*names})
    if unknown:
        raise DataError(
            f"{source}: label '{unknown[0]}' is not among those that are trained: {', '.join(names)}; remove it, or add it to "
            "the training data"
        )
    excess = memory_excess(PLACE_BYTES * len(rows) * len(names), sum(map(len, rows)))
    if excess is not None:
        raise DataError(f"{source}: {len(rows):,} samples with a place for each of {len(names):,} labels are too many: {excess}")
    place = {name: index for index, name in enumerate(names)}
    array = np.zeros((len(rows), len(names)), np.float32)
    for sample, row in enumerate(rows):
        array[sample, [place[label] for label in row]] = 1
    return array, names

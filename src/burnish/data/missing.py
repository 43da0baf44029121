"""Values that are missing in a table: which cells count as such, and what becomes of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from burnish.errors import ConfigurationError, DataError

Missing = str
"""``error`` or ``drop``: what becomes of a row in which a value is missing."""
MARKS = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
"""What stands in a column of numbers where there is none, in small letters."""
REMEDY = "fill it in, remove the row, or leave such rows out (missing='drop', --missing drop)"
PREDICTED, PREDICTED_REMEDY = "predicted", "fill it in, or remove the row: a row that is left out would have no prediction"
"""The policy of a table to predict of, each row of which has an answer."""


def check_missing(missing: str) -> None:
    """Raise ConfigurationError for a policy that there is none of for data that are trained or evaluated on."""
    if missing not in ("error", "drop"):
        raise ConfigurationError(f"missing={missing!r}: give 'error', or 'drop' to leave rows with missing values out")


def column_of_text(values: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return cells as int64 or float64 where those that are there are numbers, else as text; and which are missing, bool.

    In a column of numbers a mark such as ``NA``, NaN and infinity are missing; in one of text only a cell that is empty is.
    """
    text = np.asarray(values, dtype=str)
    empty = np.char.strip(text) == ""
    marked = np.asarray([value.strip().lower() in MARKS for value in values], dtype=bool)
    there = text[~marked]
    for dtype in (np.int64, np.float64):
        try:
            numbers = there.astype(dtype)
        except (ValueError, OverflowError):
            continue
        column = np.zeros(len(text), dtype)
        column[~marked] = numbers
        return column, marked | ~np.isfinite(column)
    return text, empty


def without_missing(
    columns: Mapping[str, np.ndarray],
    gaps: Mapping[str, np.ndarray],
    missing: Missing,
    source: str,
    rows: Sequence[str],
    cells: Mapping[str, Sequence[object]],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return columns without the rows in which a value is missing, and how many these were, in words.

    Args:
        columns: the columns, each [rows].
        gaps: which of their values are missing, bool [rows].
        missing: ``error`` and ``predicted`` refuse the first, ``drop`` leaves their rows out.
        source: what to call the data in an error.
        rows: what to call each row.
        cells: what stands in each row of each column, for an error.

    Raises:
        DataError: a value is missing, by row and column; or no row is left.
    """
    together = np.zeros(len(rows), dtype=bool)
    for mask in gaps.values():
        together |= mask
    if not together.any():
        return dict(columns), []
    if missing != "drop":
        row = int(np.flatnonzero(together)[0])
        name = next(name for name, mask in gaps.items() if mask[row])
        cell = cells[name][row]
        is_empty = cell is None or not str(cell).strip()
        held = "has no value" if is_empty else f"holds {str(cell)!r}, which stands for no value"
        raise DataError(f"{source}, {rows[row]}: column '{name}' {held}; {PREDICTED_REMEDY if missing == PREDICTED else REMEDY}")
    if together.all():
        raise DataError(f"{source}: a value is missing in each of its {len(rows):,} rows, and none is left")
    named = ", ".join(f"'{name}' {int(mask.sum()):,}" for name, mask in gaps.items() if mask.any())
    note = f"{int(together.sum()):,} of {len(rows):,} rows have missing values ({named}) and are left out"
    return {name: column[~together] for name, column in columns.items()}, [note]


def is_number(text: str) -> bool:
    """Whether the text of a cell is a number; NaN and infinity are."""
    try:
        float(text)
    except ValueError:
        return False
    return True

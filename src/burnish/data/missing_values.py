"""Missing values in tables: detection, and treatment of their rows."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal

import numpy as np

from burnish.errors import ConfigurationError, DataError
from burnish.settings import is_number_text, suggestion
from burnish.untrusted_files import memory_excess

Missing = str
"""Treatment of rows with a missing value: one of ``POLICIES``."""
AUTO, ERROR, DROP = "auto", "error", "drop"
FILLS = ("mean", "median", "most_frequent")
"""Replacements of missing numbers; a missing category becomes the most frequent one."""
POLICIES = (AUTO, ERROR, DROP, *FILLS)
MARKS = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
"""Lowercase marks of a missing value in a column of numbers."""
_OTHER_DIGITS = re.compile(r"[_\x80-\U0010ffff]")
"""Characters that NumPy and Python accept in numbers besides plain ASCII: underscores, and digits of other scripts."""
CHARACTER_BYTES = 4
LARGEST_EXACT = 2.0**53
"""float64 represents every whole number up to here."""
REMEDY = "fill it in, remove the row, leave such rows out (missing='drop', --missing drop), or fill them (--missing median)"
PREDICTED, PREDICTED_REMEDY = "predicted", "fill it in, or remove the row: a row that is left out would have no prediction"
"""The policy for prediction, in which every row needs an answer."""


KEPT = "kept"
"""The policy of readers that leave missing values to their caller."""


class Columns(dict[str, np.ndarray]):
    """Table columns by name, each [rows].

    Attributes:
        rows: row names, for errors.
        gaps: masks of missing values, bool [rows], for columns that have any; the values there are meaningless.
        cells: original cells of these columns, for errors.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        rows: Sequence[str],
        gaps: Mapping[str, np.ndarray] | None = None,
        cells: Mapping[str, Sequence[object]] | None = None,
    ):
        super().__init__(columns)
        self.rows = rows
        self.gaps = {name: mask for name, mask in (gaps or {}).items() if name in columns and mask.any()}
        self.cells = {name: (cells or {})[name] for name in self.gaps}

    def without_gaps(self, missing: Missing, source: str) -> tuple[Columns, list[str]]:
        """Return the columns without rows that have missing values; see ``without_missing``."""
        return without_missing(self, self.gaps, missing, source, self.rows, self.cells)

    def refuse_gaps(self, names: Collection[str], source: str) -> None:
        """Raise DataError if one of these columns has a missing value."""
        without_missing(
            {}, {name: mask for name, mask in self.gaps.items() if name in names}, "error", source, self.rows, self.cells
        )

    def only(self, names: Collection[str]) -> Columns:
        """Return the columns with these names, in their present order."""
        return Columns({name: column for name, column in self.items() if name in names}, self.rows, self.gaps, self.cells)

    def part(self, indices: np.ndarray) -> Columns:
        """Return some rows; ``indices`` is int64 [n]."""
        cells = {name: [held[index] for index in indices] for name, held in self.cells.items()}
        gaps = {name: mask[indices] for name, mask in self.gaps.items()}
        rows = [self.rows[index] for index in indices]
        return Columns({name: column[indices] for name, column in self.items()}, rows, gaps, cells)

    @classmethod
    def of_arrays(cls, columns: Mapping[str, np.ndarray]) -> Columns:
        """Return columns of arrays; None, NaN and infinities are missing values."""
        held: dict[str, np.ndarray] = {}
        gaps: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            array, mask = column, np.zeros(len(column) if column.ndim else 0, bool)
            if column.ndim == 1 and column.dtype.kind == "f":
                mask = ~np.isfinite(column)
            elif column.ndim == 1 and column.dtype == object:
                values = column.tolist()
                mask = np.asarray([value is None or (isinstance(value, float) and not np.isfinite(value)) for value in values])
                there = [value for value, is_missing in zip(values, mask.tolist(), strict=True) if not is_missing]
                if there and all(isinstance(value, str) for value in there):
                    array = np.asarray(
                        ["" if is_missing else value for value, is_missing in zip(values, mask, strict=True)], dtype=str
                    )
                elif there and all(isinstance(value, int | float | np.number) for value in there):
                    array = np.asarray(
                        [np.nan if is_missing else value for value, is_missing in zip(values, mask, strict=True)], np.float64
                    )
            held[name], gaps[name] = array, mask
        count = max((len(column) for column in columns.values()), default=0)
        return cls(held, [f"row {row}" for row in range(count)], gaps, {name: columns[name].tolist() for name in held})


def check_missing(missing: str) -> None:
    """Raise ConfigurationError for an unknown policy."""
    if missing not in POLICIES:
        raise ConfigurationError(
            f"missing={missing!r} (--missing): give 'error', 'drop' to leave rows with missing values out, or 'mean', 'median' "
            f"or 'most_frequent' to fill them{suggestion(str(missing), POLICIES)}"
        )


def text_array(values: Sequence[str]) -> np.ndarray:
    """Return texts as an array, in which every element takes the space of the longest.

    Raises:
        MemoryError: the array would take too much memory.
        ValueError: a text ends in a NUL character, which an array cannot hold.
    """
    if (ending := next((value for value in values if value.endswith("\0")), None)) is not None:
        raise ValueError(f"the text {ending!r} ends in a NUL character: remove it")
    lengths = [len(value) for value in values]
    excess = memory_excess(CHARACTER_BYTES * max(lengths, default=0) * len(lengths), sum(lengths))
    if excess is not None:
        raise MemoryError(f"a text has {max(lengths):,} characters, for which each row has room; {excess}")
    return np.asarray(values, dtype=str)


def column_of_text(values: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return cells as int64 or float64 if all present ones are numbers, else as text; and a bool mask of missing cells.

    In a column of numbers, marks such as ``NA``, NaN and infinity are missing; in a column of text only empty cells are.
    """
    text = text_array(values)
    is_plain = not _OTHER_DIGITS.search("".join(values)) or all(
        is_number_text(value) or value.strip().lower() in MARKS for value in values
    )
    empty = np.char.strip(text) == ""
    marked = np.asarray([value.strip().lower() in MARKS for value in values], dtype=bool)
    there = text[~marked]
    for dtype in (np.int64, np.float64) if is_plain else ():
        try:
            numbers = there.astype(dtype)
        except (ValueError, OverflowError):
            continue
        if numbers.dtype.kind == "f":
            numbers = _exact(numbers, there)
            dtype = numbers.dtype.type
        column = np.zeros(len(text), dtype)
        column[~marked] = numbers
        return column, marked | ~np.isfinite(column)
    return text, empty


def _exact(numbers: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return int64 if all numbers are whole and float64 rounded one, as with large ids next to ``1e3``."""
    large = np.abs(numbers) >= LARGEST_EXACT
    if not large.any() or not (np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers) < 2.0**63)).all():
        return numbers
    exact = [Decimal(text) for text in texts[large].tolist()]
    if any(number % 1 or not -(2**63) <= number < 2**63 for number in exact) or [*map(float, exact)] == [*map(int, exact)]:
        return numbers
    whole = np.where(large, 0, numbers).astype(np.int64)
    whole[large] = [*map(int, exact)]
    return whole


def without_missing(
    columns: Mapping[str, np.ndarray],
    gaps: Mapping[str, np.ndarray],
    missing: Missing,
    source: str,
    rows: Sequence[str],
    cells: Mapping[str, Sequence[object]],
) -> tuple[Columns, list[str]]:
    """Return columns without rows that have missing values, and a note on their number.

    Args:
        columns: the columns, each [rows].
        gaps: masks of missing values, bool [rows].
        missing: ``error`` and ``predicted`` raise, ``drop`` removes rows, ``kept`` keeps them.
        source: name for errors.
        rows: row names.
        cells: original cells by column, for errors.

    Raises:
        DataError: a value is missing (by row and column), or no row is left.
    """
    together = np.zeros(len(rows), dtype=bool)
    for mask in gaps.values():
        together |= mask
    if not together.any():
        return Columns(columns, rows), []
    if missing == KEPT:
        return Columns(columns, rows, gaps, cells), []
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
    left = [row for row, is_out in zip(rows, together.tolist(), strict=True) if not is_out]
    return Columns({name: column[~together] for name, column in columns.items()}, left), [note]


def refuse_other_digits(name: str, values: Sequence[str], source: str, rows: Sequence[str]) -> None:
    """Raise DataError if only some cells are numbers to Python alone, such as ``1_0``; if all are, they are texts.

    Args:
        name: name of the column.
        values: its cells.
        source: name for errors.
        rows: row names.
    """
    if not _OTHER_DIGITS.search("".join(values)):
        return
    there = [(row, value) for row, value in enumerate(values) if value.strip().lower() not in MARKS]
    others = [(row, value) for row, value in there if not is_number_text(value)]
    if 0 < len(others) < len(there) and all(_is_one_for_python(value) for _, value in others):
        row, value = others[0]
        raise DataError(
            f"{source}, {rows[row]}: column '{name}' holds {value!r} among numbers: write it in the digits 0 to 9, without "
            "underscores"
        )


def _is_one_for_python(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def alike_but_for_case(names: Sequence[str]) -> list[str]:
    """Return a note for each pair of names that differ only in case."""
    notes: list[str] = []
    cases: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", name).strip().casefold()
        if folded in cases:
            notes.append(f"the classes '{cases[folded]}' and '{name}' differ in case alone, and are two")
        cases[folded] = name
    return notes


def marks_among(names: Sequence[str]) -> list[str]:
    """Return a note on class names that usually mark a missing value."""
    marks = [f"'{name}'" for name in names if name.lower() in MARKS]
    if not marks:
        return []
    verb = "is a class" if len(marks) == 1 else "are classes"
    return [f"{', '.join(marks)} {verb} like the others: remove these rows where the label is missing"]

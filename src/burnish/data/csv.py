"""Comma-separated values, or with semicolons or tabs between them, with a header line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from burnish.data.missing import Missing, column_of_text, is_number, without_missing
from burnish.data.number_forms import with_points
from burnish.errors import DataError

DELIMITERS = (",", ";", "\t")


def read_csv(path: Path, missing: Missing = "error") -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the columns of a file by name, int64 or float64 where every value is a number, else text; and notes on its rows.

    The first line names the columns, each other line is a sample. Commas, semicolons or tabs stand between values. Numbers may
    have decimal commas, or commas between thousands (``with_points``).

    Args:
        path: the file.
        missing: ``error``, or ``drop``: leave out and count the lines in which a value is missing.

    Raises:
        DataError: as ``read_columns``; a value is missing, by line and column; or a comma in a number may be read in two ways.
    """
    header, rows, lines = _read(path)
    cells = {name: [row[index].strip() for row in rows] for index, name in enumerate(header)}
    numbers, forms = with_points(cells, str(path))
    read = {name: column_of_text(values) for name, values in numbers.items()}
    columns, gaps = ({name: pair[part] for name, pair in read.items()} for part in (0, 1))
    columns, notes = without_missing(columns, gaps, missing, str(path), [f"line {line}" for line in lines], cells)
    return columns, forms + notes


def read_columns(path: Path) -> tuple[dict[str, list[str | None]], list[int]]:
    """Return the columns of a file by name, as they are written, None where there is no value; and the line of each row.

    Raises:
        DataError: the file is empty, not UTF-8, or has a line of another length, or two columns of a name.
    """
    header, rows, lines = _read(path)
    return {name: [row[index].strip() or None for row in rows] for index, name in enumerate(header)}, lines


def _read(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """Return the names of the columns, the rows, and the line of each."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = _delimiter(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            header = [name.strip() for name in next(reader, [])]
            rows: list[list[str]] = []
            lines: list[int] = []
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(row)} values, and the header names {len(header)} columns"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: no CSV file in UTF-8 ({error}); save it as CSV in UTF-8") from error
    if not header:
        raise DataError(f"{path}: empty; the first line has to name the columns")
    if header and all(is_number(name) for name in header):
        raise DataError(f"{path}: the first line holds numbers; add a line with the names of the columns in front")
    if len(set(header)) != len(header):
        repeated = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path}: two columns are called '{repeated}'; give every column its own name")
    return header, rows, lines


def _delimiter(first_line: str) -> str:
    """Return the delimiter that divides the first line into the most columns; a comma where it makes no difference."""
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([first_line], delimiter=delimiter), [])))

"""Comma-separated values, or with semicolons or tabs between them, with a header line."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from burnish.errors import DataError

DELIMITERS = (",", ";", "\t")


def read_csv(path: Path) -> dict[str, np.ndarray]:
    """Return the columns of a file by name: int64 or float64 where every value is a number, else text.

    The first line names the columns, each other line is a sample. Commas, semicolons or tabs stand between values.

    Raises:
        DataError: as ``read_columns``.
    """
    return {name: _column(values) for name, values in read_columns(path).items()}


def read_columns(path: Path) -> dict[str, list[str]]:
    """Return the columns of a file by name, as they are written.

    Raises:
        DataError: the file is empty, not UTF-8, or has a line of another length or with an empty value, or two columns of a name.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = _delimiter(file.readline())
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            header = [name.strip() for name in next(reader, [])]
            rows: list[list[str]] = []
            for row in reader:
                if not row:
                    continue
                _check_row(row, header, path, reader.line_num)
                rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: no CSV file in UTF-8 ({error})") from error
    if not header:
        raise DataError(f"{path}: empty; the first line has to name the columns")
    if header and all(_is_number(name) for name in header):
        raise DataError(f"{path}: the first line holds numbers; add a line with the names of the columns in front")
    if len(set(header)) != len(header):
        repeated = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path}: two columns are called '{repeated}'; give every column its own name")
    return {name: [row[index].strip() for row in rows] for index, name in enumerate(header)}


def _delimiter(first_line: str) -> str:
    """Return the delimiter that divides the first line into the most columns; a comma where it makes no difference."""
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([first_line], delimiter=delimiter), [])))


def _check_row(row: list[str], header: list[str], path: Path, line: int) -> None:
    if len(row) != len(header):
        raise DataError(f"{path}, line {line}: {len(row)} values, and the header names {len(header)} columns")
    for name, value in zip(header, row, strict=True):
        if not value.strip():
            raise DataError(f"{path}, line {line}: column '{name}' has no value; fill it in or remove the line")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _column(values: list[str]) -> np.ndarray:
    for dtype in (np.int64, np.float64):
        try:
            return np.asarray(values, dtype=str).astype(dtype)
        except (ValueError, OverflowError):
            continue
    return np.asarray(values, dtype=str)

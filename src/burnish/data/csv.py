"""CSV files with a header line, separated by commas, semicolons or tabs. Numbers may contain commas."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from burnish.data.missing_values import MARKS, Columns, Missing, column_of_text, refuse_other_digits, without_missing
from burnish.errors import DataError
from burnish.settings import is_natural_text, is_number_text

DELIMITERS = (",", ";", "\t")
HEADER = "the first line"
"""Start of the note on the header."""
NAMES_SHOWN = 5
OTHER_DELIMITERS = ("|", " ")
LeftOut = Callable[[Sequence[str]], Collection[str]]
"""Function from all column names to those that are not read."""


def read_csv(path: Path, missing: Missing = "error", left_out: LeftOut = lambda names: ()) -> tuple[Columns, list[str]]:
    """Return the columns of a CSV file by name, and notes on its rows.

    The first line has the column names. A column is int64 or float64 if all values are numbers, else text. Numbers may have
    decimal commas, or commas between thousands (``with_points``).

    Args:
        path: the file.
        missing: ``error``, or ``drop`` to count and leave out lines with a missing value.
        left_out: function from all column names to those not read.

    Raises:
        DataError: see ``read_columns``; a value is missing or uses other digits, or commas are ambiguous.
    """
    header, rows, lines = _read(path)
    if len(header) == 1 and any(all(other in line for line in (header[0], *rows[0])) for other in OTHER_DELIMITERS if rows):
        raise DataError(
            f"{path}: the lines, such as '{header[0]}', hold one value each: put commas, semicolons or tabs between values"
        )
    cells = {name: [row[index].strip() for row in rows] for index, name in enumerate(header)}
    what, doubt = _no_column(cells.get("")), []
    if what is not None:
        del cells[""]
        doubt = [f"a column without a name, {what}, is left out"]
    doubt = [*_doubt_of_header(cells, path), *doubt]
    cells = {name: values for name, values in cells.items() if name not in left_out(list(cells))}
    numbers, forms = with_points(cells, str(path))
    named = [f"line {line}" for line in lines]
    for name, values in numbers.items():
        refuse_other_digits(name, values, str(path), named)
    read = {name: column_of_text(values) for name, values in numbers.items()}
    columns, gaps = ({name: pair[part] for name, pair in read.items()} for part in (0, 1))
    columns, notes = without_missing(columns, gaps, missing, str(path), named, cells)
    return columns, [*doubt, *forms, *notes]


def _doubt_of_header(cells: Mapping[str, Sequence[str]], path: Path) -> list[str]:
    """Return a note if some column names look like values, as in a table without a header.

    Names that count the columns (0, 1, 2, or years) are accepted.

    Raises:
        DataError: all names look like values, so the first sample would be lost.
    """
    numbers = [
        name
        for name, values in cells.items()
        if is_number_text(name) and values and all(map(is_number_text, filter(None, values)))
    ]
    if _count_up(numbers):
        numbers = []
    values = [name for name, column in cells.items() if name not in numbers and not is_number_text(name) and name in column]
    if len(cells) > 1 and len(numbers) + len(values) == len(cells):
        raise DataError(
            f"{path}: the first line has to name the columns, and reads like a sample: {_listed(numbers + values)} are values of "
            "the columns. Add a line with names in front, such as a,b,label; where a later line repeats the names, remove it"
        )
    if not numbers and not values:
        return []
    what = "are numbers" if not values else "are values of their columns"
    return [
        f"{HEADER} is taken for the names of the columns, and {_listed(numbers + values)} among them {what}: where it is a "
        "sample, add a line with names in front"
    ]


def _no_column(values: Sequence[str] | None) -> str | None:
    """Return the reason to drop a column without a name (empty, or an index of the rows); None to keep it."""
    if values is None:
        return None
    if not any(values):
        return "which holds nothing"
    return "which counts the rows" if len(values) > 1 and values[0] in ("0", "1") and _count_up(values) else None


def _count_up(names: Sequence[str]) -> bool:
    """True if texts are consecutive whole numbers."""
    if not all(is_natural_text(name) for name in names):
        return False
    whole = [int(name) for name in names]
    return whole == list(range(whole[0], whole[0] + len(whole))) if whole else True


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:NAMES_SHOWN])
    return shown + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")


def read_columns(path: Path, verbatim: Collection[str] = ()) -> tuple[dict[str, list[str | None]], list[int]]:
    """Return the columns of a file by name as text (None for no value), and the line number of each row.

    Args:
        path: the file.
        verbatim: columns that keep the spaces around their values.

    Raises:
        DataError: the file is empty or not UTF-8, a line has another length than the header, or two columns have one name.
    """
    header, rows, lines = _read(path)
    _doubt_of_header({name: [row[index].strip() for row in rows] for index, name in enumerate(header)}, path)
    bare = {name: [row[index].strip() or None for row in rows] for index, name in enumerate(header)}
    kept = {name: [row[index] or None for row in rows] for index, name in enumerate(header) if name in verbatim}
    return {**bare, **kept}, lines


def _read(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
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
                        f"{path}, line {reader.line_num}: {len(row)} values, and the header names {len(header)} columns; "
                        "repair the line or remove it"
                    )
                rows.append(row)
                lines.append(reader.line_num)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no CSV file in UTF-8 ({error}); save it as CSV in UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path}: no CSV file ({error}); where a quotation mark is not closed, close or remove it") from error
    if not header:
        raise DataError(f"{path}: empty; the first line has to name the columns")
    if rows and any("\n" in cell for cell in rows[-1]):
        _check_closed(path, delimiter, lines[-2] if len(lines) > 1 else 1)
    if header and all(is_number_text(name) for name in header):
        raise DataError(f"{path}: the first line holds numbers; add a line with the names of the columns in front")
    if len(set(header)) != len(header):
        repeated = next(name for name in header if header.count(name) > 1)
        raise DataError(f"{path}: two columns are called '{repeated}'; give every column its own name")
    return header, rows, lines


def _check_closed(path: Path, delimiter: str, before: int) -> None:
    """Raise DataError if an unclosed quotation mark makes the last row swallow the lines after it.

    Args:
        path: the file.
        delimiter: separator of values.
        before: last line of the row before.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        last = file.readlines()[before:]
    try:
        list(csv.reader(last, delimiter=delimiter, strict=True))
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            raise DataError(
                f"{path}, line {before + 1}: a quotation mark is not closed, so that the {len(last)} lines from there on are one "
                "row; close or remove it"
            ) from error


def _delimiter(first_line: str) -> str:
    """Return the delimiter that splits the first line into the most columns; a comma if equal."""
    return max(DELIMITERS, key=lambda delimiter: len(next(csv.reader([first_line], delimiter=delimiter), [])))


Form = Literal["decimal", "thousands"]
FORMS: dict[Form, re.Pattern[str]] = {
    "decimal": re.compile(r"[+-]?(\d*|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?", re.ASCII),
    "thousands": re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", re.ASCII),
}
SAID: dict[Form, str] = {"decimal": "with decimal commas", "thousands": "with commas between thousands"}
POINTED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}", re.ASCII)
"""A number with three decimals, or with a point between thousands (written where decimals have a comma)."""
SHOWN = 3


def with_points(cells: Mapping[str, Sequence[str]], source: str) -> tuple[dict[str, Sequence[str]], list[str]]:
    """Return table cells with numbers as Python reads them, and notes on converted columns.

    A column of numbers and missing values may use commas. ``1,5`` has a decimal comma; ``1,234.5`` and ``1,234,567`` have commas
    between thousands. ``1,234`` is ambiguous: other cells or columns decide. So is ``1.234`` if another column has decimal
    commas.

    Args:
        cells: column name -> stripped cells.
        source: name for errors.

    Raises:
        DataError: a column mixes decimal commas and points, or stays ambiguous.
    """
    ways = {name: ways for name, values in cells.items() if (ways := _ways(name, values, source))}
    settled = {way for possible in ways.values() if len(possible) == 1 for way in possible}
    if not settled and any(_has_point(values) for name, values in cells.items() if name not in ways):
        settled = {"thousands"}
    chosen: dict[Form, list[str]] = {"decimal": [], "thousands": []}
    for name, possible in ways.items():
        left = possible & settled
        if len(left) != 1:
            example = next(value for value in cells[name] if "," in value)
            raise DataError(
                f"{source}: column '{name}' holds numbers such as '{example}', whose comma may be a decimal one or stand between "
                "thousands: write them with a point, or without commas"
            )
        chosen[left.pop()].append(name)
    if chosen["decimal"]:
        _check_points({name: values for name, values in cells.items() if name not in ways}, chosen["decimal"][0], source)
    read = dict(cells)
    for name in chosen["decimal"]:
        read[name] = [value.replace(".", "").replace(",", ".") if "," in value else value for value in cells[name]]
    for name in chosen["thousands"]:
        read[name] = [value.replace(",", "") for value in cells[name]]
    return read, [f"numbers {SAID[form]}: {_some(names)}" for form, names in chosen.items() if names]


def _ways(name: str, values: Sequence[str], source: str) -> set[Form]:
    """Return the possible meanings of a column's commas; empty if it has no commas or no numbers."""
    with_comma = [value for value in values if "," in value]
    rest = [value for value in values if "," not in value and value.lower() not in MARKS]
    if not with_comma or not all(any(form.fullmatch(value) for form in FORMS.values()) for value in with_comma):
        return set()
    if not all(map(is_number_text, rest)):
        return set()
    ways = {way for way, form in FORMS.items() if all(map(form.fullmatch, with_comma))}
    point = next((value for value in rest if "." in value), None)
    if point is not None:
        ways.discard("decimal")
    if not ways:
        other = point or next(value for value in with_comma if not FORMS["decimal"].fullmatch(value))
        comma = next(value for value in with_comma if FORMS["decimal"].fullmatch(value))
        raise DataError(f"{source}: column '{name}' holds '{comma}' and '{other}', with other decimal signs: write all alike")
    return ways


def _check_points(cells: Mapping[str, Sequence[str]], decimal: str, source: str) -> None:
    """Raise DataError if a column's points may separate thousands, given that column ``decimal`` has decimal commas."""
    for name, values in cells.items():
        pointed = [value for value in values if "." in value]
        if pointed and _has_point(values) and all(map(POINTED.fullmatch, pointed)):
            raise DataError(
                f"{source}: column '{name}' holds numbers such as '{pointed[0]}', whose point may stand between thousands, as "
                f"column '{decimal}' has decimal commas: write all alike, or '{name}' without points"
            )


def _has_point(values: Sequence[str]) -> bool:
    there = [value for value in values if value.lower() not in MARKS]
    return any("." in value for value in there) and all(map(is_number_text, there))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

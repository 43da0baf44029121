"""Numbers as people write them: with a decimal comma, or with commas between thousands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from burnish.data.missing import MARKS
from burnish.errors import DataError
from burnish.settings import is_number_text

Form = Literal["decimal", "thousands"]
FORMS: dict[Form, re.Pattern[str]] = {
    "decimal": re.compile(r"[+-]?(\d*|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?", re.ASCII),
    "thousands": re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?", re.ASCII),
}
SAID: dict[Form, str] = {"decimal": "with decimal commas", "thousands": "with commas between thousands"}
POINTED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}", re.ASCII)
"""What is a number with three decimals, or one with a point between thousands, as those write it who have decimal commas."""
SHOWN = 3


def with_points(cells: Mapping[str, Sequence[str]], source: str) -> tuple[dict[str, Sequence[str]], list[str]]:
    """Return the cells of a table with its numbers as Python reads them, and notes on columns that were written otherwise.

    A column holds numbers with commas where all of its cells are numbers, or stand for no value. ``1,5`` is a decimal comma and
    ``1,234.5`` or ``1,234,567`` one between thousands. ``1,234`` may be both: other cells tell, of the same column or of others.
    So may ``1.234`` in a column without commas, where another column has decimal ones.

    Args:
        cells: name of a column -> its cells, without spaces around them.
        source: what to call the data in an error.

    Raises:
        DataError: a column has decimal commas and points, or nothing tells what its commas or points are.
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
    """How the commas of a column may be read; none where it has no commas, or no numbers."""
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
    """Raise DataError for a column without commas whose points may stand between thousands, as those of ``decimal`` would."""
    for name, values in cells.items():
        pointed = [value for value in values if "." in value]
        if pointed and _has_point(values) and all(map(POINTED.fullmatch, pointed)):
            raise DataError(
                f"{source}: column '{name}' holds numbers such as '{pointed[0]}', whose point may stand between thousands, as "
                f"column '{decimal}' has decimal commas: write all alike, or '{name}' without points"
            )


def _has_point(values: Sequence[str]) -> bool:
    """Whether a column holds numbers with decimal points."""
    there = [value for value in values if value.lower() not in MARKS]
    return any("." in value for value in there) and all(map(is_number_text, there))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(f"'{name}'" for name in names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")

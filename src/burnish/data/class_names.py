"""What a person should know of the names of classes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from burnish.data.missing import MARKS


def alike_but_for_case(names: Sequence[str]) -> list[str]:
    """Return a note for each name that another one differs from in case alone."""
    notes: list[str] = []
    cases: dict[str, str] = {}
    for name in names:
        folded = unicodedata.normalize("NFC", name).strip().casefold()
        if folded in cases:
            notes.append(f"the classes '{cases[folded]}' and '{name}' differ in case alone, and are two")
        cases[folded] = name
    return notes


def marks_among(names: Sequence[str]) -> list[str]:
    """Return a note for names of classes that often stand for a value that is missing."""
    marks = [f"'{name}'" for name in names if name.lower() in MARKS]
    if not marks:
        return []
    verb = "is a class" if len(marks) == 1 else "are classes"
    return [f"{', '.join(marks)} {verb} like the others: remove these rows where the label is missing"]

"""A file of clicks on advertisements, in the format of Criteo's data sets, as a data set."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.errors import ConfigurationError, DataError

NUMBERS, CATEGORIES = 13, 26
_LINE = re.compile(rb"[01](?:\t(?:-?\d{1,18})?){13}(?:\t[0-9a-fA-F]{0,16}){26}\r?\n?")
SHOWN = 3
"""How many malformed lines a note names."""


class CriteoFile:
    """A file of clicks: a label, 13 whole numbers and 26 hexadecimal categories a line, with tabs between; fields may be missing.

    The file is read once to find where its lines begin, eight bytes a line, and then from the disk, batch by batch, in any order.
    Lines of another form are left out, and counted.

    A number x becomes log(1 + x), or 0 where it is missing or negative; a category the remainder by the rows of its table, or
    row 0 where it is missing. Both are as in the reference implementation of DLRM.

    Args:
        path: of the file.
        rows: of the table of each category: 26 numbers, or one for all.

    Attributes:
        malformed: how many lines were left out.
        note: what a person should know of them; None where there are none.

    Raises:
        ConfigurationError: ``rows`` is neither.
        DataError: the file cannot be read, or has no line of this form.
    """

    classes = None
    preprocessing = None

    def __init__(self, path: str | Path, rows: int | Sequence[int]):
        sizes = [rows] * CATEGORIES if isinstance(rows, int) else list(rows) if isinstance(rows, Sequence) else []
        if len(sizes) != CATEGORIES or not all(isinstance(size, int) and size >= 1 for size in sizes):
            raise ConfigurationError(
                f"CriteoFile: rows must be a whole number of at least 1, or {CATEGORIES} of them, not {rows!r}"
            )
        self._rows = np.array(sizes, np.uint64)
        self._path = Path(path)
        starts: list[int] = []
        wrong: list[int] = []
        position = number = 0
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if _LINE.fullmatch(line):
                        starts.append(position)
                    else:
                        wrong.append(number)
                    position += len(line)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error
        if not starts:
            raise DataError(
                f"{path}: none of its {number} lines is a label, {NUMBERS} whole numbers and {CATEGORIES} hexadecimal "
                "categories, with tabs between"
            )
        self._starts = np.array(starts, np.int64)
        self.malformed = len(wrong)
        self.note = None
        if wrong:
            named = ", ".join(map(str, wrong[:SHOWN])) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
            self.note = f"{path}: {len(wrong)} of {number} lines are malformed and left out: {named}"

    def __len__(self) -> int:
        return len(self._starts)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the samples at ``indices`` as ``numbers``, ``category_1`` to ``category_26``, and ``targets`` [n, 1].

        Raises:
            DataError: the file has changed since it was opened.
        """
        chosen = self._starts[np.asarray(indices)]
        lines: list[bytes] = [b""] * len(chosen)
        with self._path.open("rb") as file:
            for place in np.argsort(chosen, kind="stable"):
                file.seek(chosen[place])
                lines[place] = file.readline()
                if not _LINE.fullmatch(lines[place]):
                    raise DataError(
                        f"{self._path}: has changed since it was opened, and its lines begin elsewhere: put it back, and go "
                        "on with the run (resume=True)"
                    )
        fields = [line.rstrip(b"\r\n").split(b"\t") for line in lines]
        numbers = np.array([[int(text or 0) for text in row[1 : 1 + NUMBERS]] for row in fields], np.float64)
        hashes = np.array([[int(text or b"0", 16) for text in row[1 + NUMBERS :]] for row in fields], np.uint64)
        places = (hashes.reshape(-1, CATEGORIES) % self._rows).astype(np.int64)
        targets = np.array([[int(row[0])] for row in fields], np.float32).reshape(-1, 1)
        scaled = np.log1p(np.maximum(numbers.reshape(-1, NUMBERS), 0)).astype(np.float32)
        columns = {f"category_{table + 1}": np.ascontiguousarray(places[:, table]) for table in range(CATEGORIES)}
        return {"numbers": scaled, **columns, "targets": targets}

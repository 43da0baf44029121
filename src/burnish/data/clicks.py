"""Clicks on advertisements: files in the format of Criteo's data sets, and data that are drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from burnish.data.dataset import ArrayDataset
from burnish.errors import ConfigurationError, DataError
from burnish.settings import is_number, is_whole

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
        sizes = [rows] * CATEGORIES if is_whole(rows) else list(rows) if isinstance(rows, Sequence) else []
        if len(sizes) != CATEGORIES or not all(is_whole(size) and size >= 1 for size in sizes):
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
        return _named(scaled, places, targets)


def synthetic_clicks(
    samples: int, rows: Sequence[int], numbers: int = NUMBERS, exponent: float = 1.1, seed: int = 0, draw: int = 0
) -> ArrayDataset:
    """Draw clicks whose categories follow Zipf's law, for ``burnish.models.dlrm`` of the same tables.

    A hidden score says how likely a click is: the sum of a normal effect for each row of each table, and a linear function of the
    numbers, so that a model can learn it.

    Args:
        samples: how many.
        rows: of each table. The row of rank k is drawn with a probability that falls as k to the power of -``exponent``.
        numbers: of a sample, normal.
        exponent: of Zipf's law; 0 draws all rows alike.
        seed: of the hidden effects.
        draw: of the samples: data sets of one seed and several draws can be learned together.

    Returns:
        Arrays ``numbers``, ``category_1`` and so on, and ``targets`` [samples, 1].

    Raises:
        ConfigurationError: a size that is no whole number of at least 1, or an exponent that is negative.
    """
    if not rows or not all(is_whole(size) and size >= 1 for size in (samples, *rows, numbers)):
        raise ConfigurationError(
            f"synthetic_clicks: samples={samples}, rows={tuple(rows)}, numbers={numbers}: every number has to be whole and 1 or "
            "more, and there has to be a table"
        )
    if not is_number(exponent) or exponent < 0:
        raise ConfigurationError(f"synthetic_clicks: exponent must be a finite number that is not negative, not {exponent!r}")
    hidden, drawn = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1, draw])
    x = drawn.standard_normal((samples, numbers))
    score = x @ hidden.normal(0.0, 1 / np.sqrt(numbers), numbers)
    places = np.empty((samples, len(rows)), np.int64)
    for table, count in enumerate(rows):
        effects = hidden.normal(0.0, 2 / np.sqrt(len(rows)), count)
        frequency = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        ranks = np.searchsorted(np.cumsum(frequency) / frequency.sum(), drawn.random(samples))
        places[:, table] = np.minimum(ranks, count - 1)
        score += effects[places[:, table]]
    targets = (drawn.random(samples) < 1 / (1 + np.exp(-score))).astype(np.float32)
    return ArrayDataset(_named(x.astype(np.float32), places, targets.reshape(-1, 1)))


def _named(numbers: np.ndarray, places: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    columns = {f"category_{table + 1}": np.ascontiguousarray(places[:, table]) for table in range(places.shape[1])}
    return {"numbers": numbers, **columns, "targets": targets}

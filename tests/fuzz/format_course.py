"""The way of a file that is no model, or of options, through burnish: read, or refused."""

from __future__ import annotations

import time

import numpy as np

from fuzz.formats import SEALED, read_mutant
from fuzz.outcomes import Kind, Outcome, kind_of
from fuzz.stages import Course


class FormatCourse(Course):
    """Reads the files of a case twice."""

    def run(self, number: int, far: bool) -> Outcome:
        """Read; ``far`` makes no difference."""
        start = time.perf_counter()
        self.outcome.number = number
        self.stage = "read"
        try:
            first = read_mutant(self.mutant, self.folder)
            if self.mutant.form == SEALED:
                self._note(Kind.SILENT, ValueError("read although it does not agree with its digest"))
            elif not _same(first, read_mutant(self.mutant, self.folder)):
                self._note(Kind.SILENT, ValueError("read in two ways"))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            kind = kind_of(error)
            # Messages name the file, or repeat the option.
            self._note(Kind.REFUSED if kind is Kind.UNNAMED and self._names(str(error)) else kind, error)
        self.outcome.seconds = round(time.perf_counter() - start, 3)
        return self.outcome

    def _names(self, message: str) -> bool:
        return any(name in message for name in (*self.mutant.files, str(self.folder))) or self.mutant.seed in (
            "options",
            "run.toml",
        )


def _same(one: object, other: object) -> bool:
    """Whether two readings gave the same values, as far as these can be compared."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other)

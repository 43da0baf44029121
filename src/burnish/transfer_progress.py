"""How far the reading or writing of large files is: said to whoever asked to be told, else to no one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Report = Callable[[str], None]
"""Takes a line that says how far something is."""

FIRST_LINE_SECONDS = 2.0
LINE_EVERY_SECONDS = 5.0

_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextlib.contextmanager
def transfers_reported(report: Report) -> Iterator[None]:
    """Tell how far files are, within the context: a line after two seconds, and then every five.

    Args:
        report: takes each line.
    """
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


class Transfer:
    """Bytes that are read or written, one part after the other.

    Args:
        what: is done, such as ``writing 'last.safetensors'``.
        size: bytes in all.
    """

    def __init__(self, what: str, size: int):
        self._what, self._size, self._done = what, size, 0
        self._report = _report.get()
        self._next_line = time.monotonic() + FIRST_LINE_SECONDS

    def advance(self, size: int) -> None:
        """Another ``size`` bytes are done."""
        self._done += size
        if self._report is None:
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LINE_EVERY_SECONDS
            self._report(f"{self._what}: {self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB")

"""Progress reports for reading and writing large files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Report = Callable[[str], None]
"""Callback that takes a progress line."""

FIRST_LINE_SECONDS = 2.0
LINE_EVERY_SECONDS = 5.0

_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextlib.contextmanager
def transfers_reported(report: Report) -> Iterator[None]:
    """Report the progress of large files within this context: the first line after 2 s, then one every 5 s.

    Args:
        report: callback for each line.
    """
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


class Transfer:
    """Progress of one file that is read or written in parts.

    Args:
        what: the activity, such as ``writing 'last.safetensors'``.
        size: total bytes.
    """

    def __init__(self, what: str, size: int):
        self._what, self._size, self._done = what, size, 0
        self._report = _report.get()
        self._next_line = time.monotonic() + FIRST_LINE_SECONDS

    def advance(self, size: int) -> None:
        """Count another ``size`` bytes as done."""
        self._done += size
        if self._report is None:
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LINE_EVERY_SECONDS
            self._report(f"{self._what}: {self._done / 1e9:.1f} of {self._size / 1e9:.1f} GB")

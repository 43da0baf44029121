"""Signals that end a command: Ctrl-C while it is imported, when libraries would hide it or print its trace, and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPED = "Stopped.\n"


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at Ctrl-C, with one line; of several workers, the first says it."""
    if sys.stderr is not None and os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), STOPPED.encode())
    os._exit(128 + signal.SIGINT)


class Terminating:
    """Handles SIGTERM by the end of the command, with what it does at its end; a second one ends the process at once."""

    stops_runs = True
    """A run that does not end soon after the signal is stopped (``burnish.stopping``)."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from burnish.stopping import Terminated

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While this is entered, SIGTERM ends a command as Ctrl-C does, unless something else handles it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, Terminating())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

"""Signals that end a command: Ctrl-C during imports, when libraries would hide it or print a traceback, and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPED = "Stopped.\n"


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at Ctrl-C, with one line, printed by the first worker only."""
    if sys.stderr is not None and os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), STOPPED.encode())
    os._exit(128 + signal.SIGINT)


class Terminating:
    """Handle SIGTERM by ending the command with its cleanup; a second one ends the process at once."""

    stops_runs = True
    """Marks runs to stop if they do not end soon after the signal (``burnish.stopping``)."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        from burnish.stopping import Terminated

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end a command like Ctrl-C in this context, unless another handler is set."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, Terminating())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

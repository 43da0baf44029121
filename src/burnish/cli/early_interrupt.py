"""Ctrl-C before a command begins: libraries that are being imported would hide it, or print its trace."""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

STOPPED = "Stopped.\n"


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """End the process at Ctrl-C, with one line; of several workers, the first says it."""
    if sys.stderr is not None and os.environ.get("RANK", "0") == "0":
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), STOPPED.encode())
    os._exit(128 + signal.SIGINT)

"""The command line: one file per command, with its options and messages; other packages do the work."""

import atexit
import gc
import os
import signal
import sys
import threading
from contextlib import suppress

from burnish.cli.early_interrupt import STOPPED, stop_at_once

OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""With Python's 700, the imports of a run start the garbage collector six hundred times, for a sixth of their time."""


def main() -> None:
    """Run the command ``burnish`` with the arguments of the process."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # ASCII and Latin-1 cannot encode every name
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the command begins, which handles it: libraries hide an interrupt, or print its traceback.
        signal.signal(signal.SIGINT, stop_at_once)
        # Before cleanup at exit, which another Ctrl-C cuts short.
        getattr(threading, "_register_atexit", atexit.register)(signal.signal, signal.SIGINT, signal.SIG_DFL)
    try:
        from burnish.cli.application import app

        app(prog_name="burnish")
    except KeyboardInterrupt:  # during an import, if another handler is set
        if sys.stderr is not None:
            sys.stderr.write(STOPPED)
        sys.exit(128 + signal.SIGINT)
    finally:
        if signal.getsignal(signal.SIGINT) is stop_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _flush_or_drop()


def _flush_or_drop() -> None:
    """Write the remaining output. If nobody reads it, drop it: Python would print a traceback at exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


__all__ = ["main"]

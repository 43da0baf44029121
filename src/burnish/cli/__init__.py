"""The command line: one file per command. Here are its options and its words; what it does lives in the other rooms."""

import gc
import os
import signal
import sys
from contextlib import suppress

OBJECTS_BETWEEN_COLLECTIONS = 10_000
"""With the 700 of Python the imports of a run start its collector six hundred times, for a sixth of their time."""


def main() -> None:
    """Run the command ``burnish`` with the arguments of the process."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # in ASCII or Latin-1 not every name can be written
            stream.reconfigure(errors="backslashreplace")
    try:
        from burnish.cli.application import app

        app(prog_name="burnish")
    except KeyboardInterrupt:  # while it was imported: afterwards the command says what became of its work
        if sys.stderr is not None:
            sys.stderr.write("Stopped.\n")
        sys.exit(128 + signal.SIGINT)
    finally:
        _flush_or_drop()


def _flush_or_drop() -> None:
    """Write what is left of the output. Where nobody takes it, drop it: Python would write a traceback when it ends."""
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

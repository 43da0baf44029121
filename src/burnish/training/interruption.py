"""Ctrl-C during a run: the step under way is finished and the state saved, so that nothing is lost."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from burnish.stopping import watch_interrupts


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a run, after its state was saved.

    Attributes:
        checkpoint: the file to resume from.
    """

    def __init__(self, checkpoint: Path, epoch: int, batch: int):
        super().__init__(
            f"Stopped in epoch {epoch + 1} after {batch} of its batches. Everything is saved in '{checkpoint}'; "
            "resume, and training goes on as if it had not stopped"
        )
        self.checkpoint = checkpoint


class CtrlCNoted:
    """While it is entered, Ctrl-C is only noted. A second one, before ``taken``, stops at once.

    Python delivers signals to the main thread alone: elsewhere KeyboardInterrupt stays the caller's.
    """

    stops_runs = True
    """A run that does not end soon after Ctrl-C is stopped (``burnish.stopping``)."""

    def __init__(self) -> None:
        self._noted = False
        self._earlier: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._earlier = signal.signal(signal.SIGINT, self)
            watch_interrupts()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._earlier)

    @property
    def noted(self) -> bool:
        """Return whether Ctrl-C was pressed since ``taken`` was last asked."""
        return self._noted

    def taken(self) -> bool:
        """Return whether Ctrl-C was pressed since this was last asked."""
        noted, self._noted = self._noted, False
        return noted

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        signal.signal(signal.SIGINT, self._earlier)

"""A clock that the processes of a test share. It stands still until a process advances it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SharedClock:
    """Tells by how many seconds it was advanced in all. They are the size of a file, so every process reads the same.

    Attributes:
        path: of the file.
    """

    path: Path

    def __call__(self) -> float:
        return float(self.path.stat().st_size) if self.path.exists() else 0.0

    def advance(self, seconds: int) -> None:
        """Let time pass."""
        self.path.touch()
        os.truncate(self.path, int(self()) + seconds)

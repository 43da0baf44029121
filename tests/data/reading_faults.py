"""Data sets that reading processes stumble over; a module of its own, as these import it."""

from __future__ import annotations

import os
import signal

import numpy as np

from burnish.errors import DataError


class Numbered:
    """Sample i is the number i. With faults, 5 and 7 raise errors, 9 ends the process that reads it, and 11 stops it."""

    def __init__(self, faults: bool = False):
        self.faults = faults

    def __len__(self) -> int:
        return 12

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self.faults and 5 in indices:
            raise ValueError("five")
        if self.faults and 7 in indices:
            raise DataError("seven.png: no good")
        if self.faults and 9 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults and 11 in indices:
            os.kill(os.getpid(), signal.SIGSTOP)
        print("a library says something")
        return {"x": np.asarray(indices, np.float32), "names": np.asarray([f"n{i}" for i in indices])}

"""Data sets that reading processes stumble over; a module of its own, as these import it."""

from __future__ import annotations

import os
import signal

import numpy as np

from burnish.errors import DataError


class Numbered:
    """Sample i is the number i; one batch may go wrong."""

    def __init__(self, fault: str = ""):
        self.fault = fault

    def __len__(self) -> int:
        return 12

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if 7 in indices and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if 7 in indices and self.fault == "raises":
            raise ValueError("seven")
        if 7 in indices and self.fault == "refuses":
            raise DataError("seven.png: no good")
        print("a library says something")
        return {"x": np.asarray(indices, np.float32), "names": np.asarray([f"n{i}" for i in indices])}

"""What a session has in place of its runner in a process that was forked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from burnish.engines.base import NOTHING, ProgramRunner
from burnish.errors import EngineError


class InheritedRunner(ProgramRunner):
    """Refuses all that a runner does: the threads of its engine are those of the parent.

    Args:
        runner: of the parent. It is never freed here: that would wait for these threads.
    """

    def __init__(self, runner: ProgramRunner):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner))

    def step(self, inputs: Mapping[str, np.ndarray]) -> NoReturn:
        raise _refusal()

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> NoReturn:
        raise _refusal()

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> NoReturn:
        raise _refusal()

    def state(self) -> NoReturn:
        raise _refusal()

    def state_entry(self, name: str) -> NoReturn:
        raise _refusal()

    def load_state(self, state: Mapping[str, np.ndarray]) -> NoReturn:
        raise _refusal()


def _refusal() -> EngineError:
    return EngineError(
        f"The session was opened in another process, from which this one ({os.getpid()}) was forked: the threads of its "
        "engine do not live on here. Open a session in this process, Session(program, state=...) with a state that was taken "
        "before the fork, or start processes by multiprocessing's 'spawn'"
    )

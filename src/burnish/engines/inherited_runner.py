"""What a session has in place of its runner in a process that was forked."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NoReturn

from burnish.errors import EngineError


class InheritedRunner:
    """Refuses all that a runner does: the threads of its engine are those of the parent.

    Args:
        runner: of the parent. It is never freed here: that would wait for these threads.
    """

    route = None

    def __init__(self, runner: Any):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner))

    def __getattr__(self, name: str) -> NoReturn:
        raise EngineError(
            f"The session was opened in another process, from which this one ({os.getpid()}) was forked: the threads of its "
            "engine do not live on here. Open a session in this process, Session(program, state=...) with a state that was taken "
            "before the fork, or start processes by multiprocessing's 'spawn'"
        )

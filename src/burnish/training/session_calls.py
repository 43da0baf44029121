"""A session's lock, held through exits and forks, and the methods that its workers call together."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakSet

import numpy as np

from burnish import stopping
from burnish.engines import ProgramRunner

Method = TypeVar("Method", bound=Callable[..., Any])

FORK_SECONDS = 1.0
"""Seconds that a fork waits for the calls of other threads."""


class TakesTurns(Protocol):
    """An object with a reentrant lock."""

    _lock: threading.RLock

    def _inherit(self) -> None:
        """Called in a forked process, where neither the engine nor its threads work."""


_living: WeakSet[TakesTurns] = WeakSet()
_taken_for_fork: list[TakesTurns] = []


def take_part_in_turns(taker: TakesTurns) -> None:
    """Give an object its lock, which no other thread holds while the process forks or exits."""
    taker._lock = threading.RLock()
    _living.add(taker)


def one_at_a_time(method: Method) -> Method:
    """Make a method wait for other threads' calls on the same object."""

    @wraps(method)
    def waiting(self: TakesTurns, /, *arguments: Any, **settings: Any) -> Any:
        is_outer = not self._lock._is_owned()  # type: ignore[attr-defined]  # as every RLock tells
        try:
            with self._lock:
                if not (is_outer and stopping.is_ending()):
                    return method(self, *arguments, **settings)
        except stopping.RunStopped:
            if not (is_outer and stopping.is_ending()):
                raise
        return stopping.stay_at_exit()

    return cast(Method, waiting)


def _take(takers: list[TakesTurns], seconds: float) -> list[TakesTurns]:
    """Acquire the locks of these objects within so many seconds in total; return those acquired."""
    until = time.monotonic() + seconds
    return [taker for taker in takers if taker._lock.acquire(timeout=max(0.0, until - time.monotonic()))]


def _end() -> None:
    """Let running calls of daemon threads end, and block new ones."""
    stopping.close()
    for taker in _take(list(_living), stopping.EXIT_SECONDS):
        taker._lock.release()


# Runs before cleanup by libraries at exit (such as unregistering operators) and before ``atexit``.
getattr(threading, "_register_atexit", atexit.register)(_end)


def _before_fork() -> None:
    _taken_for_fork.extend(_take(list(_living), FORK_SECONDS))


def _after_fork() -> None:
    while _taken_for_fork:
        _taken_for_fork.pop()._lock.release()


def _after_fork_in_child() -> None:
    _taken_for_fork.clear()
    for taker in _living:
        taker._lock = threading.RLock()
        taker._inherit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class TakesPart:
    """A session's part in exchanges beyond the steps. In a single process, these calls do nothing."""

    _lock: threading.RLock
    _runner: ProgramRunner | None

    @one_at_a_time
    def take_part(self) -> None:
        """Give this worker's part of the state to a worker that calls ``state``, ``save_checkpoint`` or ``export``.

        With ``DataParallel(shard_tables=...)`` also take part in one ``evaluate`` or ``predict`` of others.
        """
        if self._runner is not None:
            self._runner.take_part()

    @one_at_a_time
    def synchronize(self) -> None:
        """End a round of separate steps (``DataParallel(synchronize_every=...)``); all workers call it.

        If all workers have the same weights after each step, it does nothing.
        """
        if self._runner is not None:
            self._runner.synchronize()

    @property
    def evaluates_together(self) -> bool:
        """True if ``evaluate`` and ``predict`` are exchanges, which all workers make at the same time."""
        return self._runner is not None and self._runner.evaluates_together

    def asking(self) -> AbstractContextManager[None]:
        """Return a context in which this worker may request state from the others, which call ``take_part``."""
        return nullcontext() if self._runner is None else self._runner.asking()

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> bool:
        """Load, if tables are split over workers, the state that the first worker loaded; return True if they are split.

        Args:
            given: function that returns, on all workers, the first worker's value of a state entry by name.
        """
        if self._runner is not None:
            self._runner.take_over(given)
        return self.evaluates_together

    @property
    def meets(self) -> bool:
        """True if workers exchange values in the next step; False while they step separately within a round."""
        return self._runner is None or self._runner.ends_round

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
"""How long a fork waits for the calls of other threads to end."""


class TakesTurns(Protocol):
    """An object with a lock, which a thread may take again while it has it."""

    _lock: threading.RLock

    def _inherit(self) -> None:
        """Called in a forked process: nothing of an engine works there, and its threads are not there."""


_living: WeakSet[TakesTurns] = WeakSet()
_taken_for_fork: list[TakesTurns] = []


def take_part_in_turns(taker: TakesTurns) -> None:
    """Give an object its lock, which other threads do not hold while the process is forked or ends."""
    taker._lock = threading.RLock()
    _living.add(taker)


def one_at_a_time(method: Method) -> Method:
    """Let a method wait until another thread's call of the same object is done."""

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
    """Take the turns of these objects within so many seconds in all; return those that were taken."""
    until = time.monotonic() + seconds
    return [taker for taker in takers if taker._lock.acquire(timeout=max(0.0, until - time.monotonic()))]


def _end() -> None:
    """Let the calls of daemon threads end, and none begin."""
    stopping.close()
    for taker in _take(list(_living), stopping.EXIT_SECONDS):
        taker._lock.release()


# Before anything that a library does when the interpreter ends, such as to unregister its operators, and that ``atexit`` runs.
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
    """A session's side of exchanges beyond the steps. One process by itself may call all of it, and nothing happens."""

    _lock: threading.RLock
    _runner: ProgramRunner | None

    @one_at_a_time
    def take_part(self) -> None:
        """Give this worker's part of the state to another worker, which calls ``state``, ``save_checkpoint`` or ``export``.

        With ``DataParallel(shard_tables=...)`` also take part in one ``evaluate`` or ``predict`` of others.
        """
        if self._runner is not None:
            self._runner.take_part()

    @one_at_a_time
    def synchronize(self) -> None:
        """End a round of steps that workers take alone (``DataParallel(synchronize_every=...)``); all of them call it.

        Where all workers have the same weights after each step, there is nothing to do.
        """
        if self._runner is not None:
            self._runner.synchronize()

    @property
    def evaluates_together(self) -> bool:
        """Return whether ``evaluate`` and ``predict`` are exchanges, which all workers make at the same time."""
        return self._runner is not None and self._runner.evaluates_together

    def asking(self) -> AbstractContextManager[None]:
        """While this lasts, this worker may ask the others for the state, which ``take_part`` meanwhile."""
        return nullcontext() if self._runner is None else self._runner.asking()

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> bool:
        """Take over, where workers hold tables in parts, the state that the first of them loaded; return whether they do.

        Args:
            given: returns on all workers what the first one gives, by the name of a state entry.
        """
        if self._runner is not None:
            self._runner.take_over(given)
        return self.evaluates_together

    @property
    def meets(self) -> bool:
        """Return whether workers exchange something in the next step; they do not where they step alone and the round goes on."""
        return self._runner is None or self._runner.ends_round

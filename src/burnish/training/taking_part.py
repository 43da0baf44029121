"""The methods of a session that its workers call together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from burnish.engines import ProgramRunner
from burnish.training.turns import one_at_a_time


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
        """Whether ``evaluate`` and ``predict`` are exchanges, which all workers make at the same time."""
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
        """Whether workers exchange something in the next step; they do not where they step alone and the round goes on."""
        return self._runner is None or self._runner.ends_round

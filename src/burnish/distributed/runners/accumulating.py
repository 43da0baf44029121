"""A program whose workers accumulate gradients of their own parts: the state of the run has their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from burnish.distributed.graphs.accumulation import COUNT_ENTRY
from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator, array_of, buffer_of


class AccumulatingRunner(SpreadRunner):
    """A runner that adds what its worker accumulated to what the others did, when the state is asked for.

    Between an update and the next micro-batch there is nothing to add, and nothing is exchanged.

    Args:
        runner: of this worker, opened with ``part_of`` the state.
        communicator: to the others.
        accumulated: the state entries of which each worker has its part.
        state: of the run, as it is now.
    """

    def __init__(
        self, runner: ProgramRunner, communicator: Communicator, accumulated: Sequence[str], state: Mapping[str, np.ndarray]
    ):
        super().__init__(runner, communicator)
        self._accumulated = tuple(accumulated)
        self._known = self._sums_of(state)

    @property
    def is_spread(self) -> bool:
        return super().is_spread or not self._holds_all

    def state(self) -> Arrays:
        state = self._runner.state()
        if not self._holds_all:
            state |= self._known or self._summed(state)
        return state

    def state_entry(self, name: str) -> np.ndarray:
        return self.state()[name] if name in self._accumulated and not self._holds_all else self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(part_of(state, self._accumulated, self._communicator.rank))
        self._known = self._sums_of(state)

    @property
    def _holds_all(self) -> bool:
        """Whether nothing was accumulated since the last update; the same on all workers."""
        return int(self._runner.state_entry(COUNT_ENTRY)) == 0

    def _sums_of(self, state: Mapping[str, np.ndarray]) -> Arrays:
        """Copies of the sums; none if they are zeros."""
        is_begun = int(state[COUNT_ENTRY]) != 0
        return {name: np.array(state[name]) for name in self._accumulated if is_begun}

    def _summed(self, state: Arrays) -> Arrays:
        """The sums over the workers, taken in float64."""
        parts = [np.asarray(state[name], np.float64).reshape(-1) for name in self._accumulated]
        buffer = buffer_of(self._communicator, np.concatenate(parts))
        self._communicator.all_reduce(buffer).wait()
        sums: Any = np.split(array_of(buffer), np.cumsum([part.size for part in parts])[:-1])
        return {
            name: total.reshape(state[name].shape).astype(state[name].dtype)
            for name, total in zip(self._accumulated, sums, strict=True)
        }


def part_of(state: Mapping[str, np.ndarray], accumulated: Sequence[str], rank: int) -> Mapping[str, np.ndarray]:
    """Return the state that a worker begins with: the first has what was accumulated, the others nothing."""
    return state if rank == 0 else {**state, **{name: np.zeros_like(state[name]) for name in accumulated}}

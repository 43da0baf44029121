"""A program of which every worker holds a part of the state: what the others hold is asked of them when all of it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from burnish.distributed.graphs.sharding import Shares
from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator, array_of, buffer_of
from burnish.program.signature import Entry


class ShardedRunner(SpreadRunner):
    """A runner of one worker's share of the optimizer's state.

    ``state`` is an exchange once a step was taken.

    Args:
        runner: of the share.
        communicator: to the others.
        shares: who keeps what.
        entries, state: of the whole, as it is now.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        communicator: Communicator,
        shares: Shares,
        entries: Sequence[Entry],
        state: Mapping[str, np.ndarray],
    ):
        super().__init__(runner, communicator)
        self._names = [entry.name for entry in entries]
        kept = map(shares.of, range(communicator.size))
        self._kept = [[entry for entry in entries if entry.name in names] for names in kept]
        self._remember(state)

    @property
    def is_spread(self) -> bool:
        return True

    def state(self) -> Arrays:
        share = self.own_state()
        whole = {**share, **(self._known or self._gathered(share))}
        return {name: whole[name] for name in self._names}

    def state_entry(self, name: str) -> np.ndarray:
        is_kept = any(name == entry.name for kept in self._kept for entry in kept)
        return self.state()[name] if is_kept else self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(state)
        self._remember(state)

    def _remember(self, state: Mapping[str, np.ndarray]) -> None:
        """Keep what others hold."""
        others = (kept for rank, kept in enumerate(self._kept) if rank != self._communicator.rank)
        self._known = {entry.name: np.array(state[entry.name]) for kept in others for entry in kept}

    def _gathered(self, share: Arrays) -> Arrays:
        """What the others hold."""
        rank, sizes = self._communicator.rank, [[entry.bytes for entry in kept] for kept in self._kept]
        own = b"".join(share[entry.name].tobytes() for entry in self._kept[rank])
        content = np.frombuffer(own.ljust(max(1, *map(sum, sizes)), b"\0"), np.uint8).copy()
        rows = array_of(self._communicator.all_gather(buffer_of(self._communicator, content)))
        others: Arrays = {}
        for other, kept in enumerate(self._kept):
            if other != rank:
                parts: Any = np.split(rows[other], np.cumsum(sizes[other], dtype=np.int64))[:-1]
                for entry, part in zip(kept, parts, strict=True):
                    others[entry.name] = part.copy().view(entry.numpy_dtype).reshape(entry.extents)
        return others

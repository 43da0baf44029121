"""A program of which every worker holds a part of the state: what the others hold is asked of them where all of it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from burnish.distributed.graphs.sharding import Shares
from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.base import Arrays
from burnish.engines.communicator import Communicator
from burnish.program.signature import Entry


class ShardedRunner(SpreadRunner):
    """A runner of one worker's share of the optimizer's state.

    ``state`` is an exchange once a step was taken.

    Args:
        runner: of the share.
        communicator: to the others.
        shares: who keeps what.
        entries: the whole state.
        state: as it is now.
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
        self._entries = {entry.name: entry for entry in entries}
        ranks = range(communicator.size)
        self._slots = [[name for name in self._entries if name in share] for share in map(shares.of, ranks)]
        self._others: Arrays = {}
        self._remember(state)

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._runner.step(inputs)
        self._others = {}
        return outputs

    @property
    def is_spread(self) -> bool:
        return True

    def state(self) -> Arrays:
        share = self.own_state()
        whole = {**share, **(self._others or self._gathered(share))}
        return {name: whole[name] for name in self._entries}

    def state_entry(self, name: str) -> np.ndarray:
        is_kept = any(name in slots for slots in self._slots)
        return self.state()[name] if is_kept else self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(state)
        self._remember(state)

    def _remember(self, state: Mapping[str, np.ndarray]) -> None:
        """Keep what others hold, which is known until a step is taken."""
        others = [slots for rank, slots in enumerate(self._slots) if rank != self._communicator.rank]
        self._others = {name: np.array(state[name]) for slots in others for name in slots}

    def _gathered(self, share: Arrays) -> Arrays:
        """What the others hold."""
        import torch

        width = max(1, *(sum(self._entries[name].bytes for name in slots) for slots in self._slots))
        content = b"".join(np.ascontiguousarray(share[name]).tobytes() for name in self._slots[self._communicator.rank])
        buffer = torch.frombuffer(bytearray(content.ljust(width, b"\0")), dtype=torch.uint8)
        rows = self._communicator.all_gather(buffer).numpy()
        others: Arrays = {}
        for rank, slots in enumerate(self._slots):
            start = 0
            for name in slots if rank != self._communicator.rank else ():
                entry = self._entries[name]
                part = rows[rank, start : start + entry.bytes]
                others[name] = part.copy().view(entry.dtype.numpy()).reshape(entry.extents)
                start += part.size
        return others

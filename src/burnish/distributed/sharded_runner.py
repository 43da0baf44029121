"""A program of which every worker holds a part of the state: what the others hold is asked of them where all of it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from burnish.distributed.sharding import Shares, bytes_of
from burnish.engines import ProgramRunner
from burnish.engines.base import NOTHING, Arrays
from burnish.engines.communicator import Communicator
from burnish.program.signature import Entry


class ShardedRunner:
    """A runner of one worker's share, that looks to its session as one of the whole state.

    ``state`` is an exchange, which all workers make at the same time, once a step was taken.

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
        self._runner, self._communicator = runner, communicator
        self._entries = {entry.name: entry for entry in entries}
        ranks = range(communicator.size)
        self._slots = [[name for name in self._entries if name in own] for own in map(shares.of, ranks)]
        self._others: Arrays = {}
        self._remember(state)

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._runner.step(inputs)
        self._others = {}
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._runner.evaluate(inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._runner.predict(inputs, instead)

    def own_state(self) -> Arrays:
        """Return what this worker holds; asks nobody."""
        return self._runner.state()

    def state(self) -> Arrays:
        own = self.own_state()
        found = {**own, **(self._others or self._gathered(own))}
        return {name: found[name] for name in self._entries}

    def state_entry(self, name: str) -> np.ndarray:
        """As of any runner; of an entry that one worker alone keeps, an exchange like ``state``."""
        is_kept = any(name in slots for slots in self._slots)
        return self.state()[name] if is_kept else self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(state)
        self._remember(state)

    def _remember(self, state: Mapping[str, np.ndarray]) -> None:
        """Keep what others hold, which is known until a step is taken."""
        others = [slots for rank, slots in enumerate(self._slots) if rank != self._communicator.rank]
        self._others = {name: np.array(state[name]) for slots in others for name in slots}

    def _gathered(self, own: Arrays) -> Arrays:
        """What the others hold."""
        import torch

        width = max(1, *(sum(bytes_of(self._entries[name]) for name in slots) for slots in self._slots))
        content = b"".join(np.ascontiguousarray(own[name]).tobytes() for name in self._slots[self._communicator.rank])
        buffer = torch.frombuffer(bytearray(content.ljust(width, b"\0")), dtype=torch.uint8)
        rows = self._communicator.all_gather(buffer).numpy()
        found: Arrays = {}
        for rank, slots in enumerate(self._slots):
            start = 0
            for name in slots if rank != self._communicator.rank else ():
                entry = self._entries[name]
                part = rows[rank, start : start + bytes_of(entry)]
                found[name] = part.copy().view(entry.dtype.numpy()).reshape(entry.extents)
                start += part.size
        return found

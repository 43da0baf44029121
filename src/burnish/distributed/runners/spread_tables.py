"""A program of whose tables every worker holds some rows: to evaluate, and to take the state, all of them do something together.

Before each of these the workers say what they are about to do. One that wants nothing itself takes part in what another does:
it looks up rows for an evaluation on a batch that it had before, and gives the rows of a state entry that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

import numpy as np

from burnish.distributed.graphs.table_shards import TableShards
from burnish.distributed.runners.distributed_state import SpreadRunner
from burnish.engines import ProgramRunner
from burnish.engines.base import NOTHING, Arrays, HandedOver
from burnish.engines.communicator import Communicator, array_of, buffer_of
from burnish.errors import WorkerError
from burnish.program import Role
from burnish.program.layout import stand_in
from burnish.program.signature import Entry, Signature

BLOCK_BYTES = 2**26
"""Bytes of a table that are sent at once when the whole of it goes to all workers."""


class _Request(IntEnum):
    """What a worker is about to do."""

    NOTHING, END, STATE, ENTRY, EVALUATE, PREDICT = range(6)


DOING = ("takes part", "has all it wants of the state", "asks for the state", "asks for '{}'", "evaluates", "predicts")
"""The same in words, with a place for the entry."""


class SpreadTablesRunner(SpreadRunner):
    """A runner of one worker's rows of tables and of their slots, in a program of this signature.

    ``runner`` was opened with ``held_by`` the state.
    """

    def __init__(self, runner: ProgramRunner, communicator: Communicator, shards: TableShards, signature: Signature):
        super().__init__(runner, communicator)
        self._gives_entries = not runner.is_spread  # else shares of the optimizer's state are exchanged too
        self._shards, self._signature = shards, signature
        self._entries = {entry.name: entry for entry in signature.state}
        self._batches: dict[str, Arrays] = {}
        self._asking = 0

    @property
    def is_spread(self) -> bool:
        return True

    @property
    def gives_entries(self) -> bool:
        return self._gives_entries

    @property
    def evaluates_together(self) -> bool:
        return True

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = super().step(inputs)
        for graph in ("evaluate", "predict"):
            self._remember(graph, inputs)
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        self._remember("evaluate", inputs)
        self._agree(_Request.EVALUATE)
        return self._runner.evaluate(inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        self._remember("predict", inputs)
        self._agree(_Request.PREDICT)
        return self._runner.predict(inputs, instead)

    def take_part(self) -> None:
        """Do what another worker asks for: one evaluation or prediction, or entries of the state until that has all it wants."""
        names = list(self._entries)
        while True:
            request, place = self._agree(_Request.NOTHING)
            if request is _Request.STATE:
                self._runner.state()
            elif request is _Request.ENTRY:
                self._whole(names[place], wanted=False)
            else:
                break
        if request is _Request.EVALUATE:
            self._runner.evaluate(self._stand_in("evaluate"))
        elif request is _Request.PREDICT:
            self._runner.predict(self._stand_in("predict"))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """While this lasts, the others that take part wait for what is asked of them; they are told when it ends."""
        self._asking += 1
        others_wait = True
        try:
            yield
        except WorkerError:  # there is nobody to tell
            others_wait = False
            raise
        finally:
            self._asking -= 1
            if others_wait and not self._asking:
                self._agree(_Request.END)

    def state(self) -> Arrays:
        with self.asking():
            self._agree(_Request.STATE)
            state = self._runner.state()
            return {name: self.state_entry(name) if name in self._shards.entries else state[name] for name in self._entries}

    def state_entry(self, name: str) -> np.ndarray:
        if name not in self._shards.entries:
            return self._runner.state_entry(name)
        with self.asking():
            self._agree(_Request.ENTRY, list(self._entries).index(name))
            whole = self._whole(name)
        assert whole is not None
        return whole

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Take this worker's rows of a whole state. The first worker keeps the whole until its next step, for ``take_over``."""
        whole = {name: state[name] for name in state}
        rank = self._communicator.rank
        self._runner.load_state(held_by(whole, self._shards, rank))
        self._known = {name: whole[name] for name in self._shards.entries} if rank == 0 else {}

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> None:
        """Take over the state that the first worker loaded; all workers do so together, an entry at a time.

        ``given`` takes the name of an entry and an array of its form, and returns on all workers the array of the first one.
        """
        held = HandedOver()
        for name, entry in sorted(self._entries.items()):
            own = self._known.get(name)
            if own is None and name in self._shards.entries:
                own = np.zeros(_shape_of(entry), entry.numpy_dtype)
            elif own is None:
                own = self._runner.state_entry(name)
            held |= held_by({name: given(name, own)}, self._shards, self._communicator.rank)
        self._known = {}
        self._runner.load_state(held)

    def _remember(self, graph: str, inputs: Mapping[str, np.ndarray]) -> None:
        """Keep a batch that has samples, to take part with."""
        entries = self._signature[graph].inputs_of(Role.DATA, Role.LABEL)
        batch = {entry.name: inputs[entry.name] for entry in entries if entry.name in inputs}
        if len(batch) == len(entries) and all(array.size for array in batch.values()):
            self._batches[graph] = batch

    def _stand_in(self, graph: str) -> Arrays:
        signature = self._signature[graph]
        return self._batches.get(graph) or {
            entry.name: stand_in(entry, _shape_of(entry), signature) for entry in signature.inputs_of(Role.DATA, Role.LABEL)
        }

    def _agree(self, request: _Request, place: int = 0) -> tuple[_Request, int]:
        """Say what this worker is about to do, and return what they do together."""
        own = buffer_of(self._communicator, np.array([request, place], np.int64))
        told = array_of(self._communicator.all_gather(own)).tolist()
        asked = {(kind, where) for kind, where in told if kind != _Request.NOTHING}
        if len(asked) > 1:
            names = list(self._entries)
            doing = ", ".join(f"rank {rank} {DOING[kind].format(names[where])}" for rank, (kind, where) in enumerate(told))
            raise WorkerError(
                f"Workers that hold tables in parts do different things at the same time: {doing}. Let all of them call the "
                "same, or the others session.take_part()",
                comes_again=True,
            )
        kind, where = asked.pop() if asked else (_Request.NOTHING, 0)
        return _Request(kind), where

    def _whole(self, name: str, wanted: bool = True) -> np.ndarray | None:
        """All rows of an entry that is spread; None if they are not wanted here."""
        own = self._runner.state_entry(name)
        most = self._shards.rows_of(0, name) or 0
        whole = np.empty((self._shards.entries[name], *own.shape[1:]), own.dtype) if wanted else None
        block = max(1, BLOCK_BYTES // max(1, own.dtype.itemsize * math.prod(own.shape[1:])))
        for first in range(0, most, block):
            buffer = np.zeros((min(block, most - first), *own.shape[1:]), own.dtype)
            part = own[first : first + block]
            buffer[: len(part)] = part
            content = buffer_of(self._communicator, buffer.reshape(-1).view(np.uint8))
            gathered = array_of(self._communicator.all_gather(content))
            if whole is not None:
                for rank, rows in enumerate(gathered):
                    held = self._shards.part(whole, rank)[first : first + block]
                    held[...] = rows.view(own.dtype).reshape(buffer.shape)[: len(held)]
        return whole


def _shape_of(entry: Entry) -> tuple[int, ...]:
    """The extents of an entry, with 1 for an open one."""
    return tuple(extent if isinstance(extent, int) else 1 for extent in entry.extents)


def held_by(state: Mapping[str, np.ndarray], shards: TableShards, rank: int) -> HandedOver:
    """Return what a worker holds of a state; one that is ``HandedOver`` is emptied meanwhile."""
    held = HandedOver()
    take = state.pop if isinstance(state, HandedOver) else state.__getitem__
    for name in list(state):
        array = take(name)
        held[name] = np.ascontiguousarray(shards.part(array, rank)) if name in shards.entries else array
    return held

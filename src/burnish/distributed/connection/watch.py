"""Heartbeats through the store, to find lost workers: a broken connection names no rank, and a silent one does not break.

Each worker increments a number there every second and watches that of the next rank; the first cause found applies to all.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from burnish.distributed.connection.store import Meeting, Store, first_line, ranks

INTERVAL_SECONDS = 1.0
SEARCH_SECONDS = 4.0
SEARCH_INTERVAL_SECONDS = 0.2
# Polling interval at a barrier; it grows with the number of workers, because one store answers all.
BARRIER_INTERVAL_SECONDS = 0.01
BARRIER_INTERVAL_SECONDS_PER_WORKER = 0.001
# Time that an ending worker waits for rank 0.
PARTING_SECONDS = 3.0
CAUSE = "cause"
OVER = "over"
NO_CAUSE = ""


@dataclass
class Life:
    changed: float
    count: int | None = None
    operations: int = 0
    left: bool = False


@dataclass
class Search:
    began: float
    first: dict[int, int] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)


@dataclass
class Barrier:
    """A point where workers wait for each other; the store counts the workers that ``entered`` under ``key``."""

    key: str
    workers: int
    entered: bool = False
    complete: bool = False


class Watch:
    """A thread that sends heartbeats, watches the other workers, and calls ``on_cause`` once it knows why the run ends.

    After ``patience`` seconds of silence a worker, or the store, counts as gone. ``operations`` counts started exchanges.
    """

    def __init__(self, meeting: Meeting, rank: int, patience: float, on_cause: Callable[[], None] | None = None):
        self.rank, self.world_size, self.patience = rank, len(meeting.locations), patience
        self.operations = 0
        self.comes_again = False
        self._meeting, self._on_cause = meeting, on_cause
        self._looked = 0.0
        self._contact = now = time.monotonic()
        self._lives = {other: Life(changed=now) for other in range(self.world_size) if other != rank}
        self._cause: str | None = None
        self._declared: tuple[str, bool] | None = None  # a cause, and True if it recurs
        self._search: Search | None = None
        self._barrier: Barrier | None = None
        self._ending, self._hurry, self._entered = threading.Event(), threading.Event(), threading.Event()
        # Only torchrun outlives its workers; other launchers, such as a shell, may end before them.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._thread = threading.Thread(target=self._run, name="burnish-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell the others that this worker leaves regularly, or why the run ends, and stop the heartbeats."""
        self._ending.set()
        self._hurry.set()
        self._thread.join(timeout=2 * INTERVAL_SECONDS + PARTING_SECONDS)

    def declare(self, cause: str, comes_again: bool = False) -> None:
        """Tell every worker why the run ends, unless there is an earlier cause. Waits until the cause is stored, or cannot be."""
        self._suspect(cause, comes_again)
        self._entered.wait(2 * INTERVAL_SECONDS)

    def _suspect(self, cause: str, comes_again: bool = False) -> None:
        if self._declared is None:
            self._declared = cause, comes_again
            self._hurry.set()

    def wait_for_all(self, name: str, workers: int, seconds: float) -> bool:
        """Wait for ``workers``; return False on timeout, or if the run ends."""
        barrier = self._barrier = Barrier(f"barrier/{name}", workers)
        self._hurry.set()
        until = time.monotonic() + seconds
        while not barrier.complete and self.cause() is None and time.monotonic() < until:
            time.sleep(BARRIER_INTERVAL_SECONDS / 2)
        self._barrier = None
        return barrier.complete

    def cause(self) -> str | None:
        if self._cause is None and time.monotonic() - self._contact > self.patience:
            gone = f"the machine of {self._meeting.keeper} is gone, or the link to it is cut"
            why = gone if self._meeting.keeper else "the disk that it is on does not answer"
            self._find(f"there has been no contact with the store at {self._meeting.address} for {self.patience:g} s: {why}")
        return self._cause

    def search(self, ended: Collection[int] = ()) -> str | None:
        search = self._look_closely(ended)
        if self._cause is None and self._contact > search.began:
            if gone := self._said(self._in_doubt(search), "is gone", "are gone") or self._who_left():
                self.declare(gone)
            # The first stored cause applies to every worker.
            until = time.monotonic() + SEARCH_SECONDS
            while self._cause is None and self._declared is not None and time.monotonic() < until:
                time.sleep(SEARCH_INTERVAL_SECONDS / 4)
            if self._declared is not None:
                self._find(*self._declared)
        return self._cause

    def who_is_late(self) -> str:
        search = self._look_closely()
        if self._cause is not None:
            return self._cause
        if self._contact <= search.began:
            return f"the store at {self._meeting.address} does not answer either: the link to it may be cut"
        behind = [rank for rank, life in self._lives.items() if life.operations < self.operations]
        return (
            self._said(self._in_doubt(search), "shows no sign of life", "show no sign of life")
            or self._who_left()
            or self._said(behind, "has not come to it", "have not come to it")
            or "all workers live and have come to it, but the network between them does not carry it"
        )

    def _said(self, numbers: Sequence[int], of_one: str, of_several: str = "") -> str:
        if len(numbers) == 1:
            return f"rank {numbers[0]} of {self.world_size} ({self._meeting.locations[numbers[0]]}) {of_one}"
        return f"{ranks(numbers)} {of_several or of_one}" if numbers else ""

    def _who_left(self) -> str:
        return self._said([rank for rank, life in self._lives.items() if life.left], "left the run before this one")

    def _look_closely(self, ended: Collection[int] = ()) -> Search:
        search = self._search = Search(time.monotonic())
        self._hurry.set()
        until, least = search.began + SEARCH_SECONDS, search.began + (3 * SEARCH_INTERVAL_SECONDS if ended else 0.0)
        while self._cause is None and (now := time.monotonic()) < until:
            if now >= least and not set(self._in_doubt(search)).difference(ended):
                break
            time.sleep(SEARCH_INTERVAL_SECONDS / 4)
        self._search = None
        return search

    def _in_doubt(self, search: Search) -> list[int]:
        return [rank for rank, life in self._lives.items() if rank not in search.alive and not life.left]

    def _run(self) -> None:
        beat = 0
        try:
            store = self._meeting.store.again()
            while not self._ending.is_set():
                self._round(store, beat)
                if time.monotonic() > self._looked + INTERVAL_SECONDS:
                    self._looked = time.monotonic()
                    self._look_for_ended(store)
                beat += 1
                interval = SEARCH_INTERVAL_SECONDS if self._search else INTERVAL_SECONDS
                if (barrier := self._barrier) is not None and not barrier.complete:
                    interval = BARRIER_INTERVAL_SECONDS + BARRIER_INTERVAL_SECONDS_PER_WORKER * self.world_size
                if self._hurry.wait(interval):
                    self._hurry.clear()
            self._enter(store)
            store.set(f"life/{self.rank}", json.dumps([beat, self.operations, self._declared is None]))
            self._let_first_end(store)
        except (OSError, ValueError) as error:
            if not self._ending.is_set():
                keeper, address = self._meeting.keeper, self._meeting.address
                kept = f"{keeper}, which keeps the store at {address}," if keeper else f"the folder {address}"
                self._find(f"{kept} is gone ({first_line(error)})")

    def _round(self, store: Store, beat: int) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._suspect(f"the launcher of rank {self.rank} (torchrun) is gone")
        store.set(f"life/{self.rank}", json.dumps([beat, self.operations, False]))
        self._enter(store)
        if (barrier := self._barrier) is not None and not barrier.complete:
            come = store.add(barrier.key, 0 if barrier.entered else 1)
            barrier.entered, barrier.complete = True, come >= barrier.workers
        if entered := store.get(CAUSE):
            self._find(*json.loads(entered))
        following = (self.rank + 1) % self.world_size
        for rank in list(self._lives) if self._search else [following]:
            self._read(store, rank)
        now = time.monotonic()
        life = self._lives[following]
        if self._cause is None and not life.left and now - life.changed > self.patience:
            self._suspect(self._said([following], f"has shown no sign of life for {self.patience:g} s"))
        self._contact = now

    def _look_for_ended(self, store: Store) -> None:
        for rank, life in self._lives.items():
            if self._cause is None and not life.left and self._meeting.locations[rank].has_ended:
                self._read(store, rank)  # it may have left regularly
                if not life.left:
                    self._suspect(self._said([rank], "is gone"))

    def _let_first_end(self, store: Store) -> None:
        """Wait until rank 0 is done: a launcher ends the others when a worker fails, and rank 0 has to report the cause first."""
        until = time.monotonic() + PARTING_SECONDS
        if self.rank == 0:
            if self._cause is not None or self._declared is not None:
                time.sleep(1.5 * INTERVAL_SECONDS)  # lets the others read the cause: the store ends with this worker
            store.set(OVER, "")
            while self._cause is None and self._declared is None and time.monotonic() < until:
                for rank, life in self._lives.items():
                    if not life.left:
                        self._read(store, rank)
                if all(life.left for life in self._lives.values()):
                    break
                time.sleep(BARRIER_INTERVAL_SECONDS)
        while self.rank != 0 and time.monotonic() < until and store.get(OVER) is None:
            time.sleep(BARRIER_INTERVAL_SECONDS)

    def _enter(self, store: Store) -> None:
        if self._declared is not None and not self._entered.is_set():
            store.compare_set(CAUSE, NO_CAUSE, json.dumps(self._declared))
            self._entered.set()

    def _read(self, store: Store, rank: int) -> None:
        entered = store.get(f"life/{rank}")
        if entered is None:
            return
        count, operations, left = json.loads(entered)
        life, search = self._lives[rank], self._search
        if count != life.count:
            life.count, life.changed = count, time.monotonic()
        life.operations, life.left = operations, left
        if search is not None and search.first.setdefault(rank, count) != count:
            search.alive.add(rank)

    def _find(self, cause: str, comes_again: bool = False) -> None:
        if self._cause is None:
            self.comes_again, self._cause = comes_again, cause
            if self._on_cause is not None:
                self._on_cause()

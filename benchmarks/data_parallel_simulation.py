"""Data-parallel training on more workers than are at hand: a simulation of the exchanges of one step.

A step is recorded as one worker runs it: the seconds of computation between exchanges, and for each exchange what it is, its
bytes, and where it is waited for. The simulation runs that recording on any number of workers:

- Every worker has a clock. Between exchanges it moves on by a duration measured in one of the recorded steps, drawn for each
  worker and stretch by itself. Recorded steps are scaled to one length first: a machine whose speed drifts from step to step
  would otherwise make workers differ from stretch to stretch by what it does in minutes.
- An exchange starts when the last worker has come to it, and the one before it on its channel is done; it takes

      all-reduce of n bytes, ring:  2 (W - 1) latency + 2 (W - 1) / W n / bandwidth
      all-reduce of n bytes, tree:  2 ceil(log2 W) latency + 2 (W - 1) / W n / bandwidth
      all-gather of n bytes, ring:  (W - 1) latency + (W - 1) n / bandwidth
      all-gather of n bytes, tree:  ceil(log2 W) latency + (W - 1) n / bandwidth

  with the latency of one message and the bytes per second of one worker's link: the model of Thakur, Rabenseifner and Gropp,
  Optimization of Collective Communication Operations in MPICH (2005), without its term for additions.
- A worker that waits goes on when the exchange is done. ``overhead`` is the share of an exchange that costs the worker its own
  computing time although it does not wait: 1 where the threads that exchange have no processor of their own.

Not in it: channels that share a link hold each other up, switches are never short of bandwidth, and no worker is slower than the
others for good.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Network:
    """What connects the workers.

    Attributes:
        name: for tables.
        latency: seconds of one message.
        bandwidth: bytes per second of one worker's link.
        algorithm: how an exchange is made of messages.
        overhead: the share of an exchange that a worker computes for, from 0 to 1.
    """

    name: str
    latency: float
    bandwidth: float
    algorithm: Literal["ring", "tree"] = "ring"
    overhead: float = 0.0

    def seconds(self, kind: str, size: int, workers: int) -> float:
        """Return how long an exchange takes.

        Args:
            kind: ``all_reduce`` or ``all_gather``.
            size: bytes that each worker gives.
            workers: how many there are.
        """
        if workers == 1:
            return 0.0
        messages = workers - 1 if self.algorithm == "ring" else math.ceil(math.log2(workers))
        if kind == "all_gather":
            return messages * self.latency + (workers - 1) * size / self.bandwidth
        return 2 * messages * self.latency + 2 * (workers - 1) / workers * size / self.bandwidth


@dataclass(frozen=True)
class Exchange:
    """One exchange of a step: ``kind`` (``all_reduce``, ``all_gather``), bytes of each worker, channel."""

    kind: str
    size: int
    channel: str = ""


@dataclass(frozen=True)
class Event:
    """An exchange that begins or is waited for, behind a stretch of computation; ``end`` is that of the step.

    Attributes:
        action: ``begin``, ``wait`` or ``end``.
        exchange: its number, in the order in which they begin.
        seconds: the stretch of computation before it, in each of the recorded steps.
    """

    action: Literal["begin", "wait", "end"]
    exchange: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Recording:
    """A step as one worker runs it."""

    exchanges: tuple[Exchange, ...]
    events: tuple[Event, ...]

    @property
    def computation(self) -> float:
        """Seconds of a step without any exchange: the median over the recorded steps."""
        return statistics.median(map(sum, zip(*(event.seconds for event in self.events), strict=True)))

    def slowed(self, factor: float) -> Recording:
        """The same step on a processor that is slower by a factor."""
        events = (Event(event.action, event.exchange, tuple(factor * s for s in event.seconds)) for event in self.events)
        return Recording(self.exchanges, tuple(events))


def recording_of(values: Mapping[str, Any]) -> Recording:
    """Return a recording out of what ``dataclasses.asdict`` made of one, also by way of JSON."""
    events = (Event(event["action"], event["exchange"], tuple(event["seconds"])) for event in values["events"])
    return Recording(tuple(Exchange(**exchange) for exchange in values["exchanges"]), tuple(events))


def simulate(recording: Recording, workers: int, network: Network, *, steps: int = 20, seed: int = 0) -> float:
    """Return the seconds of one step: the mean over ``steps`` of them, one after the other.

    Args:
        recording: the step.
        workers: how many there are.
        network: what connects them.
        steps: how many are simulated.
        seed: of the draws of durations.
    """
    random = np.random.default_rng(seed)
    measured = [np.asarray(event.seconds) for event in recording.events]
    clocks = np.zeros(workers)
    free: dict[str, float] = defaultdict(float)
    for _ in range(steps):
        done: dict[int, float] = {}
        for event, seconds in zip(recording.events, measured, strict=True):
            clocks += seconds[random.integers(len(seconds), size=workers)]
            if event.action == "begin":
                exchange = recording.exchanges[event.exchange]
                lasting = network.seconds(exchange.kind, exchange.size, workers)
                done[event.exchange] = free[exchange.channel] = max(clocks.max(), free[exchange.channel]) + lasting
                clocks += network.overhead * lasting
            elif event.action == "wait":
                np.maximum(clocks, done[event.exchange], out=clocks)
    return float(clocks.max()) / steps


class RecordingCommunicator:
    """Stands in for the other workers, and writes down when a step exchanges what: one worker's part of a step of several.

    What it gives back is what the others would give if they held the same values; gathered values are repeated, sums are left as
    they are, so that losses are right to a factor and nothing overflows.
    """

    def __init__(self, size: int = 2):
        self.rank = 0
        self.size = size
        self._steps: list[list[tuple[str, int, float]]] = []
        self._exchanges: list[Exchange] = []
        self._since = 0.0

    def start_step(self) -> None:
        """A step begins: what was exchanged before it is its own."""
        self._steps.append([])
        self._exchanges.clear()
        self._since = time.perf_counter()

    def end_step(self) -> None:
        self._note("end", -1)

    def all_reduce(self, buffer: Any, *, group: int = 0, channel: str = "") -> _Recorded:
        number = self._begin(Exchange("all_reduce", buffer.nbytes, channel))
        return _Recorded(self, number)

    def all_gather(self, buffer: Any, *, group: int = 0) -> Any:
        number = self._begin(Exchange("all_gather", buffer.nbytes))
        gathered = buffer.expand(group or self.size, *buffer.shape).clone()
        self._note("wait", number)
        return gathered

    def shared_buffer(self, dtype: Any, count: int, *, group: int = 0, channel: str = "") -> None:
        return None

    def recording(self, skip: int = 1) -> Recording:
        """Return what was recorded, without the first ``skip`` steps.

        Raises:
            ValueError: the steps did not exchange the same.
        """
        steps = self._steps[skip:]
        kinds = [[(action, number) for action, number, _ in step] for step in steps]
        if not steps or any(kind != kinds[0] for kind in kinds):
            raise ValueError("the recorded steps are none, or differ in what they exchange")
        totals = [sum(lasted for _, _, lasted in step) for step in steps]
        scales = [statistics.median(totals) / total for total in totals]
        scaled = ([scale * lasted for _, _, lasted in step] for scale, step in zip(scales, steps, strict=True))
        seconds = zip(*scaled, strict=True)
        events = [Event(action, number, lasted) for (action, number), lasted in zip(kinds[0], seconds, strict=True)]  # type: ignore[arg-type]
        return Recording(tuple(self._exchanges), tuple(events))

    def _begin(self, exchange: Exchange) -> int:
        if self._steps:
            self._exchanges.append(exchange)
        self._note("begin", len(self._exchanges) - 1)
        return len(self._exchanges) - 1

    def _note(self, action: str, number: int) -> None:
        if self._steps:
            self._steps[-1].append((action, number, time.perf_counter() - self._since))
        self._since = time.perf_counter()


class _Recorded:
    """An exchange with nobody, to be waited for."""

    def __init__(self, communicator: RecordingCommunicator, number: int):
        self._communicator = communicator
        self._number = number

    def wait(self) -> None:
        self._communicator._note("wait", self._number)


def fit_network(name: str, measured: Sequence[tuple[int, int, float]], algorithm: Literal["ring", "tree"] = "ring") -> Network:
    """Return the network whose all-reduce fits measured ones best, in relative terms.

    Args:
        name: of the network.
        measured: workers, bytes and seconds of each.
        algorithm: how an exchange is made of messages.
    """
    unit_latency = Network(name, 1.0, math.inf, algorithm)
    unit_bytes = Network(name, 0.0, 1.0, algorithm)
    rows = [(unit_latency.seconds("all_reduce", n, w) / s, unit_bytes.seconds("all_reduce", n, w) / s) for w, n, s in measured]
    (latency, per_byte), *_ = np.linalg.lstsq(np.asarray(rows), np.ones(len(rows)), rcond=None)
    return Network(name, max(float(latency), 0.0), 1 / max(float(per_byte), 1e-15), algorithm)

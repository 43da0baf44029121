"""Data-parallel training on more workers than are at hand: a simulation of the exchanges of one step.

    python benchmarks/data_parallel_simulation.py --validate --save    # as root: measures two workers over three networks
    python benchmarks/data_parallel_simulation.py                      # what that would be on up to 256 workers

A step is recorded as one worker runs it: the seconds of computation between exchanges, and for each exchange what it is, its
bytes, and where it is waited for. The simulation runs that recording on any number of workers:

- Every worker has a clock. Between exchanges it moves on by a duration measured in one of the recorded steps, drawn for each
  worker and stretch by itself. Recorded steps are scaled to one length first: a machine whose speed drifts from step to step
  would otherwise make workers differ from stretch to stretch by what it does in minutes.
- An exchange starts when the last worker has come to it, and the one before it on its channel is done. Of n bytes it takes

      all-reduce    ring: 2 (W - 1) messages    tree: 2 ceil(log2 W)    2 (W - 1) / W n bytes
      all-gather          W - 1                       ceil(log2 W)      (W - 1) n
      all-to-all          W - 1                       W - 1             (W - 1) / W n
      gather-parts        W - 1                       ceil(log2 W)      (W - 1) / W n

  with the latency of one message and the bytes per second of one worker's link: the model of Thakur, Rabenseifner and Gropp,
  Optimization of Collective Communication Operations in MPICH (2005), without its term for additions. Gather-parts is an
  all-gather of what each worker has added up: n is what all have together.
- On a network where two workers have measured exchanges of several sizes (``curves``) an exchange takes what was measured for as
  many bytes on a link, and the latency of each message that more workers need besides.
- Two channels share a link: while the one exchanges, bytes of the other take twice as long, its messages stand in line
  (``queue``), and it lasts longer by what the other sends.
- A worker that waits goes on when the exchange is done. ``overhead`` is the share of an exchange that costs the worker its own
  computing time although it does not wait: 1 where the threads that exchange have no processor of their own.

Not in it: switches are never short of bandwidth, and no worker is slower than the others for good.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

RESULTS = Path(__file__).parent / "results"
OPTIONS = {
    "statistics of each worker (residual)": ("residual, synchronized", "residual, local"),
    "bfloat16 (residual)": ("residual, local", "residual, local, bfloat16"),
    "float16 (transformer)": ("transformer, buckets of 1 MiB", "transformer, float16"),
    "8 local steps (residual)": ("residual, local", "residual, 8 local steps"),
    "DiLoCo of 8 steps (transformer)": ("transformer, buckets of 1 MiB", "transformer, 8 steps, DiLoCo"),
}
"""By option, the case of ``data_parallel_networks`` without it and the case with it."""
IN_MACHINES = ("residual, synchronized", "residual, local", "residual, local, bfloat16", "transformer, buckets of 1 MiB")
PREDICTED_WORKERS = (2, 4, 8, 16, 32, 64, 128, 256)
OF_A_MACHINE = 8
PAYS = 0.95
"""An option pays if a step takes at most this share of the time without it."""


@dataclass(frozen=True)
class Network:
    """What connects the workers.

    Attributes:
        name: for tables.
        latency: seconds of one message.
        bandwidth: bytes per second of one worker's link.
        algorithm: how an exchange is made of messages.
        overhead: the share of an exchange that a worker computes for, from 0 to 1.
        queue: seconds that a message waits while another channel exchanges.
        curves: by kind of exchange, bytes on a link and the seconds that two workers need for them, from few bytes to many.
    """

    name: str
    latency: float
    bandwidth: float
    algorithm: Literal["ring", "tree"] = "ring"
    overhead: float = 0.0
    queue: float = 0.0
    curves: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)

    def messages(self, kind: str, workers: int) -> int:
        """How many messages of an exchange follow each other."""
        ring = self.algorithm == "ring" or kind == "all_to_all"
        return (2 if kind == "all_reduce" else 1) * (workers - 1 if ring else math.ceil(math.log2(workers)))

    def cost(self, kind: str, size: int, workers: int) -> tuple[float, float]:
        """Return the seconds of an exchange that pass by waiting, and those that its bytes take.

        Args:
            kind: ``all_reduce``, ``all_gather``, ``all_to_all`` or ``gather_parts``.
            size: bytes that each worker gives; of ``gather_parts``, that all give.
            workers: how many there are.
        """
        if workers == 1:
            return 0.0, 0.0
        carried = {"all_reduce": 2 / workers, "all_gather": 1.0}.get(kind, 1 / workers) * (workers - 1) * size
        library = "all_gather" if kind == "gather_parts" else kind
        if library not in self.curves:
            return self.messages(kind, workers) * self.latency, carried / self.bandwidth
        sizes, seconds = np.asarray(self.curves[library]).T
        waiting = float(seconds[0]) + (self.messages(kind, workers) - self.messages(kind, 2)) * self.latency
        if carried > sizes[-1]:
            return waiting, float(seconds[-1] * carried / sizes[-1] - seconds[0])
        return waiting, float(np.interp(carried, sizes, seconds) - seconds[0])

    def seconds(self, kind: str, size: int, workers: int) -> float:
        """Return how long an exchange takes."""
        return sum(self.cost(kind, size, workers))


@dataclass(frozen=True)
class Machines:
    """Machines of several workers, with one network inside and one between them.

    In two levels numbers are added up or gathered within each machine, exchanged by one worker of each, and handed out within.
    What travels in 16 bits and in parts does so between machines alone, and is added up as float32 within. On one level all
    workers are one ring, which enters and leaves each machine once, or send to all others, those of a machine over one link.

    Attributes:
        inside: what connects the workers of a machine.
        between: what connects machines.
        workers: of a machine.
        levels: 1 or 2.
    """

    inside: Network
    between: Network
    workers: int = 8
    levels: Literal[1, 2] = 2

    @property
    def overhead(self) -> float:
        return self.between.overhead

    @property
    def queue(self) -> float:
        return self.between.queue

    def cost(self, kind: str, size: int, workers: int) -> tuple[float, float]:
        """As ``Network.cost``."""
        of_one = min(self.workers, workers)
        machines = math.ceil(workers / of_one)
        if machines == 1:
            return self.inside.cost(kind, size, workers)
        if self.levels == 2:
            inside = {
                "all_reduce": self.inside.cost("all_reduce", size, of_one),
                "all_to_all": self.inside.cost("all_reduce", 2 * size, of_one),
                "all_gather": self.inside.cost("all_gather", size, of_one),
                "gather_parts": (0.0, 0.0),
            }[kind]
            between = self.between.cost(kind, of_one * size if kind == "all_gather" else size, machines)
            result = {"all_reduce": size, "all_to_all": 0, "all_gather": workers * size, "gather_parts": 2 * size}[kind]
            handed_out = (self.inside.latency, result / self.inside.bandwidth) if result else (0.0, 0.0)
            waiting, carrying = np.sum([inside, between, handed_out], axis=0)
            return float(waiting), float(carrying)
        waiting, carrying = self.between.cost(kind, size, workers)
        if kind == "all_to_all":
            carrying *= of_one * (workers - of_one) / (workers - 1)
        return waiting, carrying


@dataclass(frozen=True)
class Exchange:
    """One exchange of a step: its kind and bytes as ``Network.cost`` takes them, and its channel."""

    kind: str
    size: int
    channel: str = ""


@dataclass(frozen=True)
class Event:
    """An exchange that begins or is waited for, after a stretch of computation; ``end`` is that of the step.

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


def simulate(recording: Recording, workers: int, network: Network | Machines, *, steps: int = 20, seed: int = 0) -> float:
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
    done: dict[int, float] = {}
    latest: dict[str, int] = {}
    for _ in range(steps):
        for event, seconds in zip(recording.events, measured, strict=True):
            clocks += seconds[random.integers(len(seconds), size=workers)]
            if event.action == "begin":
                exchange = recording.exchanges[event.exchange]
                before = done[latest[exchange.channel]] if exchange.channel in latest else 0.0
                start = max(float(clocks.max()), before)
                waiting, carrying = network.cost(exchange.kind, exchange.size, workers)
                others = [number for channel, number in latest.items() if channel != exchange.channel and done[number] > start]
                left = max((done[number] - start for number in others), default=0.0)
                shared = min(carrying, left)
                lasting = waiting + carrying + shared + min(network.queue, left)
                for number in others:
                    done[number] += shared
                done[event.exchange] = start + lasting
                latest[exchange.channel] = event.exchange
                clocks += network.overhead * (waiting + carrying)
            elif event.action == "wait":
                np.maximum(clocks, done[event.exchange], out=clocks)
    return float(clocks.max()) / steps


class RecordingCommunicator:
    """Stands in for the other workers, and writes down when a step exchanges what: one worker's part of a step of several.

    What it gives back is what the others would give if they held the same values; gathered values are repeated, sums are left as
    they are, so that losses are right to a factor and nothing overflows. What workers exchange between steps is not written down.

    Args:
        size: how many workers there are.
        clock: in seconds; ``time.thread_time`` leaves out what other programs compute, and is right where a step has one thread.
    """

    def __init__(self, size: int = 2, clock: Callable[[], float] = time.perf_counter):
        self.rank = 0
        self.size = size
        self._clock = clock
        self._steps: list[list[tuple[str, int, float]]] = []
        self._exchanges: list[Exchange] = []
        self._is_recording = False
        self._parts_bytes = 0
        self._since = 0.0

    def start_step(self) -> None:
        self._steps.append([])
        self._exchanges.clear()
        self._is_recording = True
        self._since = self._clock()

    def end_step(self) -> None:
        self._note("end", -1)
        self._is_recording = False

    def all_reduce(self, buffer: Any, *, group: int = 0, channel: str = "") -> _Recorded:
        return _Recorded(self, self._begin("all_reduce", buffer.nbytes, channel))

    def all_gather(self, buffer: Any, *, group: int = 0) -> Any:
        workers = group or self.size
        # After each worker has added up its part of a sum, all get the parts of all.
        is_part = self._parts_bytes == workers * buffer.nbytes
        number = self._begin("gather_parts", self._parts_bytes, "") if is_part else self._begin("all_gather", buffer.nbytes, "")
        gathered = buffer.expand(workers, *buffer.shape).clone()
        self._note("wait", number)
        return gathered

    def all_to_all(
        self, buffer: Any, *, sizes: Sequence[int] | None = None, group: int = 0, channel: str = ""
    ) -> tuple[Any, _Recorded]:
        workers = group or self.size
        own = buffer[0] if sizes is None else buffer[: sizes[0]]
        number = self._begin("all_to_all", buffer.nbytes, channel)
        return own.expand(workers, *own.shape).clone(), _Recorded(self, number, buffer.nbytes)

    def all_to_all_uneven(self, buffer: Any, sizes: Sequence[Sequence[int]]) -> Any:
        number = self._begin("all_to_all", buffer.nbytes, "")
        received = buffer[: sizes[0][0]].repeat(self.size)
        self._note("wait", number)
        return received

    def reduce_scatter(self, buffer: Any, sizes: Sequence[int], *, channel: str = "") -> tuple[Any, _Recorded]:
        _, pending = self.all_to_all(buffer, sizes=sizes, channel=channel)
        return buffer[: sizes[0]], pending

    def shared_buffer(self, dtype: Any, count: int, *, group: int = 0, channel: str = "") -> None:
        return None

    def shared_rows(self, count: int, *, channel: str = "") -> None:
        return None

    def recording(self, skip: int = 1, share: float = 1.0) -> Recording:
        """Return what was recorded.

        Args:
            skip: steps at the beginning that are left out.
            share: of the others, the fastest that are kept: other programs of the machine make the rest slower.

        Raises:
            ValueError: the steps did not exchange the same.
        """
        steps = self._steps[skip:]
        kinds = [[(action, number) for action, number, _ in step] for step in steps]
        if not steps or any(kind != kinds[0] for kind in kinds):
            raise ValueError("the recorded steps are none, or differ in what they exchange")
        steps = sorted(steps, key=_length)[: math.ceil(share * len(steps))]
        totals = [_length(step) for step in steps]
        scales = [statistics.median(totals) / total for total in totals]
        scaled = ([scale * lasted for _, _, lasted in step] for scale, step in zip(scales, steps, strict=True))
        seconds = zip(*scaled, strict=True)
        events = [Event(action, number, lasted) for (action, number), lasted in zip(kinds[0], seconds, strict=True)]  # type: ignore[arg-type]
        return Recording(tuple(self._exchanges), tuple(events))

    def _begin(self, kind: str, size: int, channel: str) -> int:
        if self._is_recording:
            # Workers have two connections: one for gradients, and one for all else.
            self._exchanges.append(Exchange(kind, size, "gradients" if channel == "gradients" else ""))
        self._note("begin", len(self._exchanges) - 1)
        return len(self._exchanges) - 1

    def _note(self, action: str, number: int, parts_bytes: int = 0) -> None:
        if self._is_recording:
            self._steps[-1].append((action, number, self._clock() - self._since))
        self._parts_bytes = parts_bytes
        self._since = self._clock()


def _length(step: Sequence[tuple[str, int, float]]) -> float:
    return sum(lasted for _, _, lasted in step)


class _Recorded:
    """An exchange with nobody, to be waited for; ``parts_bytes`` is what the sums of its parts have together."""

    def __init__(self, communicator: RecordingCommunicator, number: int, parts_bytes: int = 0):
        self._communicator, self._number, self._parts_bytes = communicator, number, parts_bytes

    def wait(self) -> None:
        self._communicator._note("wait", self._number, self._parts_bytes)


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


def measured_network(name: str, measured: Mapping[str, Sequence[tuple[int, float]]]) -> Network:
    """Return the network on which two workers needed so many seconds for exchanges of so many bytes.

    No exchange takes longer than one of more bytes: what was measured so was held up by something else. The latency is half of
    what the smallest all-reduce takes, which is two messages.

    Args:
        name: of the network.
        measured: by kind of exchange, of all-reduces at least, bytes that each worker gave, from few to many, and seconds.
    """
    curves: dict[str, list[list[float]]] = {}
    for kind, rows in measured.items():
        seconds = np.minimum.accumulate([seconds for _, seconds in reversed(rows)])[::-1]
        share = 0.5 if kind == "all_to_all" else 1.0
        curves[kind] = [[share * size, float(lasting)] for (size, _), lasting in zip(rows, seconds, strict=True)]
    (_, least), (size, most) = curves["all_reduce"][0], curves["all_reduce"][-1]
    return Network(name, least / 2, size / (most - least), curves=curves)


def predict(result: Mapping[str, Any]) -> dict[str, Any]:
    """Say what the recorded steps would take on more workers than were measured, and for how many each option pays; as JSON."""
    recordings = {name: recording_of(values) for name, values in result["recordings"].items()}
    memory = Network(**result["memory"])
    seconds: dict[tuple[str, str, int, int], float] = {}
    for network in (Network(**values) for values in result["networks"].values()):
        for workers in PREDICTED_WORKERS:
            places: dict[int, Network | Machines] = {0: network}
            if workers > OF_A_MACHINE:
                places |= {levels: Machines(memory, network, OF_A_MACHINE, levels) for levels in (1, 2)}
            for name, recording in recordings.items():
                for levels, place in places.items():
                    round_seconds = simulate(recording, workers, place, steps=5)
                    seconds[network.name, name, levels, workers] = round_seconds / result["steps"][name]
    pays: dict[str, dict[str, list[int]]] = {}
    compared = {option: ((without, 0), (with_it, 0)) for option, (without, with_it) in OPTIONS.items()}
    compared |= {f"sums within machines of {OF_A_MACHINE} first ({name})": ((name, 1), (name, 2)) for name in IN_MACHINES}
    for option, (without, with_it) in compared.items():
        pays[option] = {
            network: [
                workers
                for workers in PREDICTED_WORKERS
                if (network, *with_it, workers) in seconds
                and seconds[network, *with_it, workers] <= PAYS * seconds[network, *without, workers]
            ]
            for network in result["networks"]
        }
    rows = [
        dict(zip(("network", "case", "levels", "workers", "seconds"), (*key, value), strict=True))
        for key, value in seconds.items()
    ]
    return {"rows": rows, "pays": pays}


def show(result: Mapping[str, Any], predicted: Mapping[str, Any]) -> None:
    """Print both as tables for ``benchmarks/results/data-parallel.md``."""
    print("Two workers, ms a step: predicted / measured (ratio)\n")
    _table(
        ["case", *result["networks"]],
        {
            name: [
                f"{1e3 * row['predicted']:.0f} / {1e3 * row['measured']:.0f} ({row['predicted'] / row['measured']:.2f})"
                for row in result["rows"]
                if row["case"] == name
            ]
            for name in result["recordings"]
        },
    )
    for name, values in result["networks"].items():
        print(
            f"{name}: {1e6 * values['latency']:.0f} us a message, {values['bandwidth'] * 8e-9:.3f} Gb/s, "
            f"{values['overhead']:.2f} of an exchange computed for, {1e3 * values['queue']:.1f} ms in line"
        )
    for levels, title in enumerate(("one worker a machine", "machines of 8, one ring", "machines of 8, two levels")):
        for network in result["networks"]:
            own = [row for row in predicted["rows"] if (row["network"], row["levels"]) == (network, levels)]
            print(f"\nPrediction, {network}, {title}: ms a step\n")
            _table(
                ["workers", *(str(workers) for workers in sorted({row["workers"] for row in own}))],
                {name: [f"{1e3 * row['seconds']:.0f}" for row in own if row["case"] == name] for name in result["recordings"]},
            )
    print(f"\nPrediction: with how many workers an option saves {1 - PAYS:.0%} of a step\n")
    _table(
        ["option", *result["networks"]],
        {option: [_numbers(workers) for workers in by_network.values()] for option, by_network in predicted["pays"].items()},
    )


def _numbers(workers: Sequence[int]) -> str:
    """Numbers of workers in words: the first of those up to the largest, if all of these are among them."""
    if not workers:
        return "never"
    reaches_the_end = list(workers) == [number for number in PREDICTED_WORKERS if number >= workers[0]]
    return f"from {workers[0]}" if reaches_the_end else ", ".join(map(str, workers))


def _table(head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    for row in (head, ["---"] * len(head), *([name, *cells] for name, cells in rows.items())):
        print(f"| {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validate", action="store_true", help="measure two workers in network namespaces first; needs root")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement")
    parser.add_argument("--save", action="store_true", help="write what was measured to benchmarks/results/")
    options = parser.parse_args()
    if options.validate:
        # Imported here because it imports this module, as its workers do.
        from data_parallel_networks import validate

        result = validate(options.rounds)
    else:
        saved = sorted(RESULTS.glob("*-data-parallel-networks.json"))
        if not saved:
            parser.error("nothing has been measured yet: give --validate, as root")
        result = json.loads(saved[-1].read_text())
    predicted = predict(result)
    show(result, predicted)
    if options.validate and options.save:
        path = RESULTS / f"{result['date']}-data-parallel-networks.json"
        path.write_text(json.dumps({**result, "predictions": predicted}) + "\n")


if __name__ == "__main__":
    main()

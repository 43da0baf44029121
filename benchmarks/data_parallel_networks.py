"""Two workers with a network of a known rate between them: what their steps take, and what the simulation says of it.

The network is a pair of network namespaces, a virtual cable and a token bucket at each end. Steps, exchanges and computation are
measured in turns, so that a machine whose speed drifts slows all of them alike. By ``data_parallel_simulation.py --validate``.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from contenders import Contender
from data_parallel import free_port
from data_parallel_simulation import Network, measured_network, recording_of, simulate


@dataclass(frozen=True)
class Case:
    """What two workers train: a model of ``peers/networked.py``, and the options of ``DataParallel``."""

    model: str
    parallel: Mapping[str, Any]
    is_diloco: bool = False

    @property
    def steps(self) -> int:
        """How many steps a round has."""
        return int(self.parallel.get("synchronize_every", 1))


CASES = {
    "residual, synchronized": Case("residual", {"norm": "sync"}),
    "residual, local": Case("residual", {"norm": "local"}),
    "residual, synchronized, buckets of 256 KiB": Case("residual", {"norm": "sync", "bucket_size": 2**18}),
    "residual, local, bfloat16": Case("residual", {"norm": "local", "compression": "bfloat16"}),
    "residual, 8 local steps": Case("residual", {"synchronize_every": 8}),
    "transformer, buckets of 1 MiB": Case("transformer", {"bucket_size": 2**20}),
    "transformer, float16": Case("transformer", {"compression": "float16"}),
    "transformer, 8 steps, DiLoCo": Case("transformer", {"synchronize_every": 8}, is_diloco=True),
}
RATES = {"100 Mb/s": ("100mbit", "32kb"), "1 Gb/s": ("1gbit", "64kb"), "10 Gb/s": ("10gbit", "512kb")}
"""Rate and burst of the token bucket at both ends of the link."""
KINDS = ("all_reduce", "all_gather", "all_to_all")
SIZES = tuple(1 << power for power in (10, 12, 14, 16, 18, 19, 20, 21, 22, 23))
LONG_BYTES = 2**22
TURN_SECONDS = 2.0
CALM_SHARE = 0.1


class Link:
    """Two network namespaces and the cable between them, whose rate both ends limit."""

    def __init__(self) -> None:
        self.names = [f"burnish-{uuid.uuid4().hex[:6]}-{rank}" for rank in range(2)]
        self.addresses = ["10.213.78.1", "10.213.78.2"]

    def __enter__(self) -> Link:
        first, second = self.names
        try:
            for name in self.names:
                _run("ip", "netns", "add", name)
            _run("ip", "-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
            for name, address in zip(self.names, self.addresses, strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                _run("ip", "-n", name, "link", "set", "wire", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def limit(self, rate: str, burst: str) -> None:
        """Let so many bits through in a second, and ``burst`` bytes at once after a pause."""
        for name in self.names:
            bucket = ("tbf", "rate", rate, "burst", burst, "limit", "8mb")
            _run("tc", "-n", name, "qdisc", "replace", "dev", "wire", "root", *bucket)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}\n--validate lays a network: run it as root, on Linux")


class Pair:
    """Two workers that do the same at the same time; in namespaces, or on one machine with memory that they share."""

    def __init__(self, link: Link | None, folder: Path, cases: Sequence[str]):
        self.workers: list[Contender] = []
        port = free_port()
        for rank in range(2):
            job = {"namespace": link.names[rank] if link else None, "cases": list(cases)}
            address = link.addresses[0] if link else "127.0.0.1"
            environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = folder / f"{rank}-{port}.log"
            self.workers.append(
                Contender.start(f"worker {rank}", "peers/networked.py", job, environment=environment, log=log, wait=False)
            )

    def __enter__(self) -> Pair:
        try:
            for worker in self.workers:
                worker.answer()
            self.ask("open")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()

    def ask(self, request: str) -> list[dict[str, Any]]:
        for worker in self.workers:
            worker.send(request)
        return [worker.answer() for worker in self.workers]

    def slower(self, request: str) -> dict[str, list[float]]:
        """The seconds of what both have measured, each those of the slower worker."""
        first, second = self.ask(request)
        return {key: [max(both) for both in zip(values, second[key], strict=True)] for key, values in first.items()}


def calm(seconds: Iterable[float]) -> float:
    """Return the median of the fastest tenth: what other programs of the machine make slower is left out."""
    ordered = sorted(seconds)
    return statistics.median(ordered[: math.ceil(CALM_SHARE * len(ordered))])


def validate(rounds: int) -> dict[str, Any]:
    """Measure steps, exchanges and computation of two workers in turns, and predict the steps from the other two; as JSON."""
    exchanges: dict[str, list[dict[str, list[float]]]] = {rate: [] for rate in RATES}
    steps: dict[tuple[str, str], list[float]] = {(rate, name): [] for rate in RATES for name in CASES}
    turns = dict.fromkeys(steps, 1)
    loads = []
    with tempfile.TemporaryDirectory() as scratch:
        with Pair(None, Path(scratch), []) as pair:
            memory = [pair.slower(_exchanges("all_reduce", "all_gather")) for _ in range(3 * rounds)]
        with Link() as link, Pair(link, Path(scratch), list(CASES)) as pair:
            for _ in range(rounds):
                loads.append(os.getloadavg()[0])
                for rate, bucket in RATES.items():
                    link.limit(*bucket)
                    exchanges[rate].append(pair.slower(_exchanges(*KINDS)) | pair.slower(f"beside {LONG_BYTES}"))
                    for index, (name, case) in enumerate(CASES.items()):
                        taken = pair.slower(f"train {index} {turns[rate, name]}")["seconds"]
                        steps[rate, name] += [seconds / case.steps for seconds in taken]
                        turns[rate, name] = min(15, max(1, round(TURN_SECONDS / statistics.median(taken))))
                        pair.ask(f"record {index} {1 if case.steps > 1 else 4}")
            recorded = json.dumps(pair.ask("recordings")[0]["recordings"])
    recordings = json.loads(recorded, parse_float=lambda text: round(float(text), 7))
    networks = {rate: _network(rate, each) for rate, each in exchanges.items()}
    return {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "rounds": rounds,
        "loads": loads,
        "steps": {name: case.steps for name, case in CASES.items()},
        "networks": {rate: asdict(network) for rate, network in networks.items()},
        "memory": asdict(_network("shared memory", memory)),
        "recordings": recordings,
        "rows": [
            {
                "network": rate,
                "case": name,
                "measured": calm(taken),
                "median": statistics.median(taken),
                "predicted": simulate(recording_of(recordings[name]), 2, networks[rate]) / CASES[name].steps,
            }
            for (rate, name), taken in steps.items()
        ],
    }


def _exchanges(*kinds: str) -> str:
    return f"exchanges {','.join(kinds)} {','.join(map(str, SIZES))}"


def _network(name: str, turns: Sequence[Mapping[str, Sequence[float]]]) -> Network:
    """What connects two workers, by what they measured in each turn."""
    every = {key: [seconds for turn in turns for seconds in turn[key]] for key in turns[0]}
    kinds = [kind for kind in KINDS if f"{kind} {SIZES[0]}" in every]
    network = measured_network(name, {kind: [(size, calm(every[f"{kind} {size}"])) for size in SIZES] for kind in kinds})
    if "processor" not in every:
        return network
    overhead = min(1.0, calm(every["processor"]) / network.seconds("all_reduce", LONG_BYTES, 2))
    queue = max(0.0, calm(every["small beside"]) - calm(every[f"all_gather {SIZES[0]}"]))
    return replace(network, overhead=overhead, queue=queue)

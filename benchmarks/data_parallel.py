"""Data-parallel training on one machine, beside PyTorch's and beside one worker; and what it would be on up to 1,024 workers.

    python benchmarks/data_parallel.py --model resnet50 --batch 8 --save
    python benchmarks/data_parallel.py --model mobilenet_v2 --workers 2 4 --rounds 5

Every contender is a team of workers, one process each, joined over loopback. Teams take turns, in rounds that are
interleaved; a team that waits does nothing, and takes steps that do not count before those that do. The simulation
(``data_parallel_simulation.py``) is fed with one worker's computation and this machine's exchanges, both measured here, is held
against the measured teams, and then asked about larger ones.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import environments
import workloads
from contenders import TURN_SECONDS, WAKING_SECONDS, Contender
from data_parallel_simulation import Network, Recording, fit_network, recording_of, simulate

RESULTS = Path(__file__).parent / "results"
EXCHANGE_SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 25 << 20)
PREDICTED_WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
CLUSTERS = (
    Network("10 Gb/s, 50 µs, ring", 50e-6, 1.25e9, "ring"),
    Network("10 Gb/s, 50 µs, tree", 50e-6, 1.25e9, "tree"),
    Network("100 Gb/s, 10 µs, tree", 10e-6, 12.5e9, "tree"),
)


@dataclass(frozen=True)
class Kind:
    """A way to train in parallel: the script of a worker, what it is told, and how many workers (None: as many as asked for).

    Workers that are not joined train each by itself, on its part of every batch: what they lose beside one is not burnish's.
    """

    title: str
    script: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    keeps_pages: bool = False
    joined: bool = True


OURS = "parallel_with_burnish.py"
KINDS = {
    "alone": Kind("burnish, one worker", OURS, {"parallel": {}}, 1),
    "unjoined": Kind("burnish, workers that exchange nothing", OURS, {"parallel": {}}, joined=False),
    "local": Kind("burnish, local statistics", OURS, {"parallel": {"norm": "local"}}),
    "sync": Kind("burnish, synchronized statistics", OURS, {"parallel": {"norm": "sync"}}),
    "sync-apart": Kind("burnish, synchronized, nothing shared", OURS, {"parallel": {"norm": "sync", "share": False}}),
    "ddp": Kind("PyTorch DDP, local statistics", "parallel_with_pytorch.py"),
    "ddp+pages": Kind("PyTorch DDP, local statistics, pages kept", "parallel_with_pytorch.py", keeps_pages=True),
}


@dataclass
class Team:
    """The workers of one contender, which all do the same at the same time; ``told`` is what the first tells of its step."""

    name: str
    workers: list[Contender]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    build_seconds: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)

    def ask(self, request: str) -> list[dict[str, Any]]:
        """Ask all workers for the same, and return their answers by rank."""
        for worker in self.workers:
            worker.send(request)
        return [worker.answer() for worker in self.workers]

    def turn(self) -> None:
        """Run the steps of a turn, behind some that do not count; keep the seconds of each, those of the slowest worker."""
        slowest = self.run(1)[0]
        self.run(max(0, round(WAKING_SECONDS / slowest) - 1))
        self.seconds += self.run(max(1, round(TURN_SECONDS / slowest)))

    def run(self, steps: int) -> list[float]:
        """Run steps; return the seconds of each, those of the slowest worker."""
        answers = self.ask(f"steps {steps}") if steps else []
        return [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]

    def step(self) -> float:
        """Run one step, and keep the mean of the workers' losses; return the seconds of the slowest worker."""
        answers = self.ask("step")
        self.losses.append(statistics.fmean(answer["loss"] for answer in answers))
        return float(max(answer["seconds"] for answer in answers))

    def peak_bytes(self) -> list[int]:
        """The peak resident memory of each worker so far, in bytes."""
        return [answer["peak_bytes"] for answer in self.ask("memory")]

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_team(name: str, kind: Kind, workers: int, job: Mapping[str, Any], folder: Path) -> Team:
    """Start the workers of a contender, and let them build their step; ``build_seconds`` of the team is what the slowest took."""
    common = {"OMP_NUM_THREADS": str(job["threads"])}
    if kind.joined and (workers > 1 or kind.script != OURS):
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(workers)}
    if kind.keeps_pages:
        allocator = environments.keeping_pages()
        if allocator is not None:
            common |= allocator[1]
    team = Team(name, [])
    try:
        started: list[Contender] = []
        for rank in range(workers):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if "WORLD_SIZE" in common else {}
            log = folder / f"{name}-{workers}-{rank}.log"
            settings = {**job, **kind.settings, **({} if kind.joined else {"part": [rank, workers]})}
            started.append(
                Contender.start(
                    f"{name} {rank}", f"peers/{kind.script}", settings, sys.executable, common | ranks, log, wait=False
                )
            )
        team.workers = started
        for worker in started:
            worker.answer()
        opened = team.ask("open")
        team.build_seconds = max(answer.pop("seconds") for answer in opened)
        team.told = opened[0]
    except BaseException:
        for worker in started:
            worker.kill()
        raise
    return team


def measure(
    jobs: Callable[[int], Mapping[str, Any]], names: Sequence[str], sizes: Sequence[int], rounds: int, warmup: int, folder: Path
) -> list[dict[str, Any]]:
    """Let teams take turns; returns a row for each.

    Args:
        jobs: what a worker is told, for a number of workers.
        names: contenders, out of ``KINDS``.
        sizes: numbers of workers.
        rounds: turns of each team that count.
        warmup: steps of each before them.
        folder: for logs.
    """
    teams = []
    try:
        for name in names:
            fixed = KINDS[name].workers
            for workers in (fixed,) if fixed is not None else sizes:
                teams.append(start_team(name, KINDS[name], workers, jobs(workers), folder))
                for _ in range(warmup):
                    teams[-1].step()
        for _ in range(rounds):
            for team in teams:
                team.turn()
        rows = []
        for team in teams:
            workers, batch = len(team.workers), jobs(len(team.workers))["batch"]
            median = statistics.median(team.seconds)
            rows.append(
                {
                    "name": team.name,
                    "title": KINDS[team.name].title,
                    "workers": workers,
                    "seconds": team.seconds,
                    "median_seconds": median,
                    "samples_per_second": batch / median,
                    "losses": team.losses,
                    "peak_bytes": max(team.peak_bytes()),
                }
            )
        return rows
    finally:
        for team in teams:
            team.kill()


def record(job: Mapping[str, Any], busy: int, folder: Path) -> dict[bool, Recording]:
    """Record one worker's computation and what it would exchange, with and without sharing of exchanges.

    Args:
        job: what a worker is told.
        busy: how many workers compute at the same time, each by itself: those of one machine share its memory.
        folder: for logs.
    """
    logs = [folder / f"record-{busy}-{rank}.log" for rank in range(busy)]
    environment = {"OMP_NUM_THREADS": str(job["threads"])}
    team = Team("record", [])
    try:
        for log in logs:
            team.workers.append(
                Contender.start("record", "peers/recording.py", job, sys.executable, environment, log, wait=False)
            )
        for worker in team.workers:
            worker.answer()
        told = team.ask("open")[0]
    finally:
        team.kill()
    return {share: recording_of(told["recordings"][name]) for share, name in ((True, "shared"), (False, "apart"))}


def measure_exchanges(workers: int, folder: Path) -> list[tuple[int, int, float]]:
    """Return workers, bytes and seconds of all-reduces between so many workers of this machine that do nothing else."""
    job = {"sizes": EXCHANGE_SIZES}
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
    }
    team = Team("exchanges", [])
    try:
        for rank in range(workers):
            variables = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            log = folder / f"exchanges-{workers}-{rank}.log"
            team.workers.append(
                Contender.start("exchanges", "peers/exchanges.py", job, sys.executable, variables, log, wait=False)
            )
        for worker in team.workers:
            worker.answer()
        told = team.ask("open")
    finally:
        team.kill()
    slowest = [max(each) for each in zip(*(answer["exchange_seconds"] for answer in told), strict=True)]
    return [(workers, size, seconds) for size, seconds in zip(EXCHANGE_SIZES, slowest, strict=True)]


def predict(recordings: Mapping[bool, Recording], batch: int) -> list[dict[str, Any]]:
    """Return what the simulation says for clusters: throughput over that of as many workers that exchange nothing."""
    rows = []
    for network in CLUSTERS:
        for share, recording in recordings.items():
            for workers in PREDICTED_WORKERS:
                seconds = simulate(recording, workers, network)
                rows.append(
                    {
                        "network": network.name,
                        "shared": share,
                        "workers": workers,
                        "seconds": seconds,
                        "efficiency": recording.computation / seconds,
                        "samples_per_second": workers * batch / seconds,
                    }
                )
    return rows


def run(model: str, batch: int, names: Sequence[str], sizes: Sequence[int], rounds: int, warmup: int) -> dict[str, Any]:
    """Measure teams, record a worker, and simulate; returns everything, JSON-compatible."""
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepared: dict[int, Mapping[str, Any]] = {}

        def job(workers: int) -> Mapping[str, Any]:
            if workers not in prepared:
                place = folder / f"data-{workers}"
                place.mkdir()
                prepared[workers] = {**workloads.prepare(place, model, batch * workers), "threads": 1}
            return prepared[workers]

        rows = measure(job, names, sizes, rounds, warmup, folder)
        exchanges = [row for workers in sorted({2, *sizes}) for row in measure_exchanges(workers, folder)]
        loopback = fit_network("loopback", [row for row in exchanges if row[0] <= cores])
        recordings = {busy: record(job(1), busy, folder) for busy in sorted({1, min(cores, max(sizes))})}
    checks = []
    for row in rows:
        if row["name"] not in ("sync", "sync-apart"):
            continue
        workers = row["workers"]
        # No core is free for the threads that exchange, and workers beyond the cores take turns on them.
        network = Network("loopback", loopback.latency, loopback.bandwidth, "ring", overhead=1.0)
        recording = recordings[max(recordings)][row["name"] == "sync"].slowed(max(1.0, workers / cores))
        checks.append(
            {
                "name": row["name"],
                "workers": workers,
                "measured": row["median_seconds"],
                "simulated": simulate(recording, workers, network),
            }
        )
    recorded = recordings[1][True]
    return {
        "model": model,
        "batch": batch,
        "threads": 1,
        "cores": cores,
        "rounds": rounds,
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "teams": rows,
        "exchanges": {share: len(recordings[1][share == "shared"].exchanges) for share in ("shared", "apart")},
        "computation_seconds": {busy: each[True].computation for busy, each in recordings.items()},
        "all_reduce_seconds": exchanges,
        "loopback": {"latency": loopback.latency, "bytes_per_second": loopback.bandwidth},
        "checks": checks,
        "gradient_bytes": sum(e.size for e in recorded.exchanges if e.kind == "all_reduce"),
        "predictions": predict(recordings[1], batch),
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print a result as tables."""
    alone = next((row for row in result["teams"] if row["name"] == "alone"), None)
    table = Table(
        "contender",
        "workers",
        "step",
        "samples/s",
        "of workers x alone",
        "peak memory of a worker",
        title=f"{result['model']}, batch {result['batch']} a worker",
    )
    for row in result["teams"]:
        ratio = row["samples_per_second"] / (row["workers"] * alone["samples_per_second"]) if alone else float("nan")
        table.add_row(
            row["title"],
            str(row["workers"]),
            f"{row['median_seconds']:.3f} s",
            f"{row['samples_per_second']:.2f}",
            f"{ratio:.2f}",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
        )
    console.print(table)
    table = Table("simulated against measured", "workers", "measured", "simulated", "ratio")
    for check in result["checks"]:
        table.add_row(
            KINDS[check["name"]].title,
            str(check["workers"]),
            f"{check['measured']:.3f} s",
            f"{check['simulated']:.3f} s",
            f"{check['simulated'] / check['measured']:.2f}",
        )
    console.print(table)
    table = Table(
        "network", "exchanges", *(str(workers) for workers in PREDICTED_WORKERS), title="efficiency that the simulation predicts"
    )
    for network in CLUSTERS:
        for shared in (True, False):
            rows = [row for row in result["predictions"] if row["network"] == network.name and row["shared"] == shared]
            table.add_row(network.name, "shared" if shared else "apart", *(f"{row['efficiency']:.2f}" for row in rows))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="resnet50", choices=[name for name, load in workloads.WORKLOADS.items() if load.images]
    )
    parser.add_argument("--batch", type=int, default=8, help="samples of each worker")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="how many there are in a team")
    parser.add_argument("--teams", default=",".join(KINDS), help=f"names with commas between: {', '.join(KINDS)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the result to benchmarks/results/")
    options = parser.parse_args()
    names = options.teams.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"--teams: unknown {', '.join(unknown)}; there are {', '.join(KINDS)}")
    result = run(options.model, options.batch, names, options.workers, options.rounds, options.warmup)
    show(result, Console(width=150))
    if options.save:
        path = RESULTS / f"{result['date']}-data-parallel-{options.model}-{options.batch}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""One of two workers with a network between them, whose exchanges and steps are measured. By ``data_parallel_networks.py``."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import burnish
from burnish.distributed.connection.communicators import GroupCommunicator
from burnish.distributed.connection.joining import join
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.engines.communicator import GRADIENTS, Pending
from burnish.models import bert, residual_network
from contenders import Step, serve
from data_parallel_networks import CALM_SHARE, CASES, Case
from data_parallel_simulation import RecordingCommunicator
from job import read_job

NEW_NETWORK = 0x40000000
"""CLONE_NEWNET: of a namespace, that it is one of a network."""
SKIPPED, SMALL_REPEATS, LARGE_REPEATS = 1, 12, 4
LARGE_BYTES = 2**19
PAUSE_SECONDS = 0.05


def enter(namespace: str) -> None:
    """Move this process into a network namespace; threads that run already stay where they are."""
    with Path("/run/netns", namespace).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns: cannot enter the network namespace {namespace}")


def program_of(case: Case) -> tuple[burnish.Program, dict[str, np.ndarray]]:
    """Return a case's program and the batch of one worker."""
    rng = np.random.default_rng(0)
    sgd = burnish.optim.sgd(lr=0.01, momentum=0.9)
    optimizer = burnish.optim.diloco(sgd) if case.is_diloco else sgd
    labels = rng.integers(0, 10, 16)
    if case.model == "transformer":
        ids = rng.integers(0, 1000, (16, 32))
        batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": labels}
        return burnish.compile(bert(1000, 10, width=128, layers=4, dropout=0.0), optimizer=optimizer), batch
    model = residual_network((3, 32, 32), width=32, blocks=(2, 2, 2))
    batch = {"x": rng.standard_normal((16, 3, 32, 32), dtype=np.float32), "labels": labels}
    return burnish.compile(model, optimizer=optimizer), batch


class Exchanges:
    """Exchanges of vectors of zeros, as steps make them: each kind on a connection of its own, after some computation.

    A connection that has rested, or that has carried another kind, is not as fast.
    """

    def __init__(self, group: ProcessGroup):
        self._of_kind = {kind: GroupCommunicator(group) for kind in ("all_reduce", "all_gather", "all_to_all")}
        self._square = torch.randn(128, 128)
        self._product_seconds = 1.0
        self._product_seconds = min(self._compute(1.0) for _ in range(200))

    def run(self, kind: str, size: int) -> None:
        """Exchange ``size`` bytes, and wait for it."""
        buffer, communicator = torch.zeros(size // 4), self._of_kind[kind]
        if kind == "all_reduce":
            communicator.all_reduce(buffer, channel=GRADIENTS).wait()
        elif kind == "all_gather":
            communicator.all_gather(buffer)
        else:
            communicator.all_to_all(buffer.view(communicator.size, -1), channel=GRADIENTS)[1].wait()

    def seconds(self, kind: str, size: int) -> list[float]:
        """Return how long each of some takes; what comes before lets workers go at the same time, which a barrier would not."""
        is_small = size < LARGE_BYTES
        taken = []
        for _ in range(SKIPPED + (SMALL_REPEATS if is_small else LARGE_REPEATS)):
            if not is_small:
                self._compute(PAUSE_SECONDS)
                self.run("all_gather", 1024)
            started = time.perf_counter()
            self.run(kind, size)
            taken.append(time.perf_counter() - started)
        return taken[SKIPPED:]

    def beside(self, size: int) -> dict[str, list[float]]:
        """Return what a small exchange takes while the other channel has one of ``size`` bytes under way.

        And the processor's seconds that the large one takes in other threads than the one that waits, which a worker of one
        processor cannot compute in.
        """
        taken: dict[str, list[float]] = {"small beside": [], "processor": []}
        for _ in range(LARGE_REPEATS):
            pending = self._begin_long(size)
            for _ in range(2):
                started = time.perf_counter()
                self.run("all_gather", 1024)
                taken["small beside"].append(time.perf_counter() - started)
            pending.wait()
            started = time.process_time() - time.thread_time()
            self._begin_long(size).wait()
            taken["processor"].append(time.process_time() - time.thread_time() - started)
        return taken

    def _begin_long(self, size: int) -> Pending:
        return self._of_kind["all_reduce"].all_reduce(torch.zeros(size // 4), channel=GRADIENTS)

    def _compute(self, seconds: float) -> float:
        """Compute what took so many seconds when this began; return what it takes now."""
        started = time.perf_counter()
        for _ in range(max(1, int(seconds / self._product_seconds))):
            torch.mm(self._square, self._square)
        return time.perf_counter() - started


def main() -> None:
    job: Mapping[str, Any] = read_job()
    if job["namespace"]:
        enter(job["namespace"])
    torch.set_num_threads(1)
    group = join(share_memory=not job["namespace"], first_contact=120)
    exchanges = Exchanges(group)
    recorders = {name: RecordingCommunicator(clock=time.thread_time) for name in job["cases"]}
    rounds: dict[tuple[str, str], Callable[[], None]] = {}

    def build() -> tuple[Step, dict[str, Any]]:
        for name in job["cases"]:
            case = CASES[name]
            program, batch = program_of(case)
            for kind, reached in (("train", {"group": group}), ("record", {"communicator": recorders[name]})):
                parallel = burnish.DataParallel(**case.parallel, **reached)
                session = burnish.Session(program, engine="torch", threads=1, parallel=parallel)
                rounds[kind, name] = lambda session=session, batch=batch, steps=case.steps: [
                    session.step(batch) for _ in range(steps)
                ]
        return lambda: 0.0, {}

    def train(index: str, count: str) -> dict[str, Any]:
        run = rounds["train", job["cases"][int(index)]]
        run()
        taken = []
        for _ in range(int(count)):
            started = time.perf_counter()
            run()
            taken.append(time.perf_counter() - started)
        return {"seconds": taken}

    def record(index: str, count: str) -> dict[str, Any]:
        name = job["cases"][int(index)]
        run = rounds["record", name]
        run()
        for _ in range(int(count)):
            recorders[name].start_step()
            run()
            recorders[name].end_step()
        return {}

    def measure(kinds: str, sizes: str) -> dict[str, Any]:
        pairs = itertools.product(kinds.split(","), map(int, sizes.split(",")))
        return {f"{kind} {size}": exchanges.seconds(kind, size) for kind, size in pairs}

    def beside(size: str) -> dict[str, Any]:
        return exchanges.beside(int(size))

    def recordings() -> dict[str, Any]:
        return {"recordings": {name: asdict(recorder.recording(0, CALM_SHARE)) for name, recorder in recorders.items()}}

    serve(build, {"train": train, "record": record, "exchanges": measure, "beside": beside, "recordings": recordings})


if __name__ == "__main__":
    main()

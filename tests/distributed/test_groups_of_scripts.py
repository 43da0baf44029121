"""A process group of ``torch.distributed`` over a backend that the script has registered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch.distributed as distributed
from test_running_statistics import SIZES, WORKERS, batches, by_pytorch, entry, program
from torch.distributed import ProcessGroupGloo
from worker_processes import run

import burnish
from oracles.several_workers import part_of


class Counted(distributed.ProcessGroup):
    """A backend in Python, as libraries register theirs: it passes on to Gloo, and counts what it is asked for."""

    begun: ClassVar[Counter[str]] = Counter()

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._within = ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "counted"

    def allreduce(self, tensors, options):
        return self._done("allreduce", tensors, options)

    def allgather(self, rows, tensors, options=None):
        return self._done("allgather", rows, tensors)

    def broadcast(self, tensors, options):
        return self._done("broadcast", tensors, options)

    def _done(self, name, *arguments):
        Counted.begun[f"{name} in groups of {self.size()}"] += 1
        getattr(self._within, name)(*arguments).wait()
        return Ended()


class Ended(distributed._Work):
    def wait(self, timeout=None):
        return True


def train(rank: int, saved: str) -> tuple[list[dict[str, np.ndarray]], Counter[str]]:
    distributed.Backend.register_backend("counted", Counted, devices=["cpu"])
    distributed.init_process_group("counted")
    with mock.patch.object(distributed, "ProcessGroupGloo", side_effect=AssertionError("a connection of burnish's own")):
        parallel = burnish.DataParallel(group=distributed.group.WORLD, norm="sync:2", statistics="rank0")
        states = []
        with burnish.Session(burnish.Program.load(saved), engine="torch", threads=1, parallel=parallel) as session:
            for batch, sizes in zip(batches(), SIZES, strict=True):
                session.step(part_of(batch, rank, sizes))
                states.append(session.state())
    distributed.destroy_process_group()
    return states, Counted.begun


@pytest.mark.slow
def test_a_registered_backend_carries_everything(tmp_path: Path):
    """Gradients, the statistics of groups of two, and those of rank 0."""
    saved = str(program().save(tmp_path / "program"))
    for states, begun in run(train, WORKERS, saved, environment={"BURNISH_SHARED_MEMORY": "off"}):
        for state, expected in zip(states, by_pytorch(2), strict=True):
            for name, array in expected.items():
                np.testing.assert_allclose(state[entry(name)], array, rtol=0, atol=1e-12, err_msg=name)
        assert all(
            begun[f"{name} in groups of {size}"] >= len(SIZES) for name in ("allreduce", "allgather") for size in (2, WORKERS)
        )

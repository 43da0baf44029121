"""Synchronized batch normalization: several ranks train as one, over NCCL and over Gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import burnish
from burnish.distributed.connection.joining import join
from burnish.distributed.connection.process_group import Backends
from burnish.engines.torch import TorchEngine
from gpu_stages.campaign import PRELOADED
from gpu_stages.differences import check_apart
from gpu_stages.models import RESNET18, Feeds, Model, program_of, sized
from gpu_stages.setting import Report, Setting, described

STEPS, BATCH = 3, 8
LOSS_TOLERANCE, WAY_TOLERANCE = 1e-4, 2e-2
PATIENCE = 120.0

Results = dict[str, Any]


def run(setting: Setting, report: Report) -> None:
    """Each way to exchange, beside one process with the whole batch."""
    model = sized(RESNET18, setting.tiny)
    cards = torch.cuda.device_count() if setting.on_gpu else 0
    report.case("NCCL, one rank: every exchange", partial(one_rank, setting))
    if setting.on_gpu and cards > 1:
        report.case(f"NCCL, {cards} ranks", partial(ranks_as_one, by_burnish, cards, model, setting))
    if not setting.on_gpu:
        report.case("burnish's exchange, 2 ranks", partial(ranks_as_one, by_burnish, 2, model, setting))
    report.case("Gloo, 2 ranks on one device", partial(ranks_as_one, by_gloo, 2, model, setting))


def one_rank(setting: Setting) -> Results:
    """The exchanges of NCCL with this process alone, in the dtypes that they have in training.

    Raises:
        ValueError: an exchange changes what it must not change.
    """
    setting.require_gpu()
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    exchange = Backends(None, distributed.group.WORLD, [])
    try:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
            buffer = torch.arange(5, device="cuda").to(dtype)
            expected, rows = buffer.clone(), buffer.new_empty(1, 5)
            exchange.all_reduce(buffer, "sum").wait()
            exchange.broadcast(buffer, 0).wait()
            exchange.all_gather(rows, buffer).wait()
            received = torch.empty_like(buffer)
            exchange.all_to_all(received, [5], buffer, [5]).wait()
            if not all(torch.equal(tensor, expected) for tensor in (buffer, rows[0], received)):
                raise ValueError(f"an exchange of {dtype} changed its values")
    finally:
        distributed.destroy_process_group()
    return {"exchanges": 4, "dtypes": 4}


def ranks_as_one(worker: Callable[..., Results], ranks: int, model: Model, setting: Setting) -> Results:
    """Let ranks train, each on its part of the batch, and hold losses and states to those of one process.

    Raises:
        ValueError: they differ.
        RuntimeError: a rank fails.
    """
    results = in_processes(worker, ranks, model, setting)
    program, batches = program_of(model), model.batches(BATCH)
    start, largest = program.initial_state(0), 0.0
    with burnish.Session(program, engine=TorchEngine(setting.device)) as session:
        for step in range(STEPS):
            expected = session.step(batches[step % len(batches)])["loss"]
            for rank, result in enumerate(results):
                loss = result["losses"][step]
                largest = max(largest, abs(loss - expected) / abs(expected))
                if not largest <= LOSS_TOLERANCE:
                    raise ValueError(f"rank {rank} has the loss {loss:.7g} in step {step + 1}, one process {expected:.7g}")
        distances = [check_apart(result["state"], session.state(), start, WAY_TOLERANCE, STEPS) for result in results]
    return {
        "ranks": ranks,
        "steps": STEPS,
        "largest_loss_difference": largest,
        "largest_difference_of_the_way": max(distances),
    }


def in_processes(worker: Callable[..., Results], ranks: int, *arguments: Any) -> list[Results]:
    """Run a function in a process for each rank, which meet in a folder of their own; returns what each returned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            variables = {
                "BURNISH_MEETING": folder,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1",
            }
            pipe, remote = context.Pipe(duplex=False)
            processes.append(context.Process(target=_rank, args=(remote, variables, worker, *arguments), daemon=True))
            processes[-1].start()
            remote.close()
            pipes.append(pipe)
        try:
            return [_answer(pipe, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(1.0)
                process.kill()


def _answer(pipe: Connection, rank: int) -> Results:
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"rank {rank} did not end within {PATIENCE:.0f} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError(f"the process of rank {rank} ended without an answer") from None
    if "error" in answer:
        raise RuntimeError(f"rank {rank}: {answer['error']}")
    return answer


def _rank(pipe: Connection, variables: dict[str, str], worker: Callable[..., Results], *arguments: Any) -> None:
    os.environ.update(variables)
    try:
        pipe.send(worker(*arguments))
    except Exception as error:
        pipe.send(described(error))


def _part(feeds: Feeds) -> Feeds:
    """The part of this rank: uneven, the first rank has more."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ends = [len(feeds["labels"]) // ranks + 1 + index for index in range(ranks - 1)]
    parts = {name: np.array_split(array, ends) for name, array in feeds.items()}
    return {name: part[rank] for name, part in parts.items()}


def _trained(model: Model, parallel: burnish.DataParallel, device: str) -> Results:
    program, batches = program_of(model), model.batches(BATCH)
    with burnish.Session(program, engine=TorchEngine(device), device=device, parallel=parallel) as session:
        losses = [session.step(_part(batches[step % len(batches)]))["loss"] for step in range(STEPS)]
        return {"losses": losses, "state": session.state()}


def by_burnish(model: Model, setting: Setting) -> Results:
    """A rank that joins as users do: NCCL on GPUs, shared memory on the CPU."""
    with join(setting.device, first_contact=PATIENCE) as group:
        return _trained(model, burnish.DataParallel(group=group), group.device)


def by_gloo(model: Model, setting: Setting) -> Results:
    """A rank that shares its device with the others, which NCCL refuses."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = distributed.FileStore(str(Path(os.environ["BURNISH_MEETING"]) / "gloo"), ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        return _trained(model, burnish.DataParallel(communicator=Gloo(rank, ranks)), setting.device)
    finally:
        distributed.destroy_process_group()


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


class Gloo:
    """Exchanges by way of the host's memory; what synchronized batch normalization and sums of gradients ask for.

    Args:
        rank: of this worker.
        size: how many workers there are.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def all_reduce(self, buffer: torch.Tensor, *, group: int = 0, channel: str = "") -> _Done:
        host = buffer.cpu()
        distributed.all_reduce(host)
        buffer.copy_(host)
        return _Done()

    def all_gather(self, buffer: torch.Tensor, *, group: int = 0) -> torch.Tensor:
        host = buffer.cpu()
        rows = [torch.empty_like(host) for _ in range(self.size)]
        distributed.all_gather(rows, host)
        return torch.stack(rows).to(buffer.device)

    def shared_buffer(self, dtype: torch.dtype, count: int, *, group: int = 0, channel: str = "") -> None:
        """Buffers lie anywhere."""

    def shared_rows(self, count: int, *, channel: str = "") -> None:
        """Rows lie anywhere."""

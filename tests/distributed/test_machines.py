"""Workers on several machines: sums within each machine, then between the machines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from launched import compiled, largest_difference, trained
from network_namespaces import enter
from worker_processes import Workers, run, tell

import burnish
from burnish.distributed import join
from burnish.distributed.connection.communicators import SMALL_BYTES, BFloat16, GroupCommunicator, OrderedSums
from burnish.engines.communicator import GRADIENTS
from burnish.engines.torch import native as kernels
from burnish.errors import WorkerError
from oracles.combinations import spread

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is shared on Linux"),
    pytest.mark.skipif(not kernels.available("shared_memory"), reason="needs a C++ compiler"),
]
STRANGERS = str(Path(__file__).with_name("strangers.py"))
LAYOUTS = [(0, 0, 1, 1), (0, 1, 0), (0, 1, 1, 0, 1)]
"""The machine of each rank: two of two workers, one of one worker, ranks that take turns."""


def of_rank(rank, size, dtype=torch.float64):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + size), dtype=torch.float64).to(dtype)


def in_layout(parts, layout):
    """The sum on each machine, then over the machines."""
    machines = [[part for part, machine in zip(parts, layout, strict=True) if machine == number] for number in range(2)]
    sums = [sum(machine[1:], machine[0]) for machine in machines if machine]
    return sum(sums[1:], sums[0])


def _exchange(rank, names, layout):
    enter(names[layout[rank]])
    with join(timeout=600, first_contact=600) as group:
        assert group.machines is not None
        ranks = range(group.world_size)
        for size in (0, 1, 1000, 100_000):
            parts = [of_rank(other, size) for other in ranks]
            assert torch.equal(group.all_reduce(parts[rank].clone()), in_layout(parts, layout))
            assert torch.equal(group.all_reduce(parts[rank].clone(), "max"), torch.stack(parts).amax(0))
            assert torch.equal(group.all_gather_rows(parts[rank]), torch.stack(parts))
            for source in ranks:
                assert torch.equal(group.broadcast(parts[rank].clone(), source), parts[source])
        assert group.all_gather_json([rank] * rank) == [[other] * other for other in ranks]
        received, pending = group.begin_all_to_all(torch.arange(group.world_size) + 10 * rank)
        pending.wait()
        assert received.tolist() == [rank + 10 * other for other in ranks]
        communicator = GroupCommunicator(group)
        for compression in (None, BFloat16()):
            sums = OrderedSums(communicator, deterministic=compression is None, compression=compression)
            for size in (100, 20_001):
                parts = [of_rank(other, size, torch.float32) for other in ranks]
                buffer = parts[rank].clone()
                sums.all_reduce(buffer, channel=GRADIENTS).wait()
                if compression is None:
                    assert torch.equal(buffer, sum(parts[1:], parts[0]))
                else:
                    assert all(torch.equal(buffer, other) for other in group.all_gather(buffer))
                    between = [in_layout(parts, [machine if machine == number else 2 for machine in layout]) for number in (0, 1)]
                    rounded = [part.to(torch.bfloat16).float() for part in between]
                    total = rounded[0] + rounded[1]
                    assert torch.equal(buffer, total if buffer.nbytes <= SMALL_BYTES else total.to(torch.bfloat16).float())
        buffers = [communicator.shared_buffer(torch.float32, size, channel=GRADIENTS) for size in (5, 70_001, 300)]
        for step in range(4):
            begun = []
            for index, buffer in enumerate(buffers):
                assert buffer is not None
                buffer.settle()
                buffer.tensor.copy_(of_rank(rank, len(buffer.tensor), torch.float32) + step)
                begun.append(buffer.reduce_scatter([1] * len(ranks)) if index == 1 and step % 2 else buffer.all_reduce())
            for index, (buffer, pending) in enumerate(zip(buffers, begun, strict=True)):
                pending.wait()
                parts = [of_rank(other, len(buffer.tensor), torch.float32) + step for other in ranks]
                assert torch.equal(buffer.tensor, in_layout(parts, layout)), (step, index)
        return group.machines.between is not None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sums_are_taken_on_each_machine_and_then_between_them(link, layout):
    firsts = [layout.index(machine) for machine in range(2)]
    assert run(_exchange, len(layout), link.machines, layout) == [rank in firsts for rank in range(len(layout))]


def _share_but_one(rank, names, layout, apart):
    enter(names[layout[rank]])
    with join(timeout=20, first_contact=600, share_memory=rank != apart) as group:
        assert group.memory is None
        assert group.machines is None
        return group.all_reduce(torch.full((3,), float(rank))).tolist()


@pytest.mark.parametrize("apart", [0, 2])
def test_one_worker_that_shares_no_memory_lets_the_process_group_carry_everything(link, apart):
    assert run(_share_but_one, 3, link.machines, (0, 0, 1), apart) == [[3.0] * 3] * 3


def _train(rank, names, layout, engine, options):
    enter(names[layout[rank]])
    with join(timeout=600, first_contact=600) as group:
        program = compiled()
        found = trained(program, engine, burnish.DataParallel(**options), rank, group.world_size)
        assert group.machines is not None
    return largest_difference(found, trained(program, engine, None)), found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("torch", {}),
        ("onnxruntime", {}),
        ("torch", {"deterministic": True}),
        ("torch", {"shard_optimizer": True}),
        ("torch", {"shard_tables": "auto"}),
    ],
    ids=str,
)
def test_four_workers_on_two_machines_train_as_one_process(link, engine, options):
    (first, state), *others = run(_train, 4, link.machines, LAYOUTS[0], engine, options)
    assert max(first, *(difference for difference, _ in others)) <= 1e-10
    for _, other in others:
        assert all(np.array_equal(array, other[name]) for name, array in state.items())


def _lose_one(rank, names, lost, how, patience):
    enter(names[LAYOUTS[0][rank]])
    group = join(timeout=patience, first_contact=600)
    group.barrier()
    tell("joined")
    if rank == lost:
        if how == "error":
            group.fail(ValueError("label 12 is out of range"))
            raise ValueError
        time.sleep(3600)
    try:
        group.all_reduce(torch.ones(3), name="gradients")
    except WorkerError as error:
        group.close()
        return str(error)


@pytest.mark.slow
@spread(
    ("lost", "how", "cause", "patience"),
    [
        (2, "kill", r"Rank 2 of 4 \(.+, process {process}\) is gone", 3000.0),
        (3, "kill", r"Rank 3 of 4 \(.+, process {process}\) is gone", 3000.0),
        (3, "error", r"Rank 3 stopped: label 12 is out of range", 3000.0),
        (
            2,
            "sleep",
            r"The (all-reduce|broadcast) of gradients is not done after 4 s: rank 2 of 4 \(.+\) has not come to it",
            4.0,
        ),
        (
            3,
            "sleep",
            r"The (all-reduce|broadcast) of gradients is not done after 4 s: rank 3 of 4 \(.+\) has not come to it",
            4.0,
        ),
        (2, "stop", r"[Rr]ank 2 of 4 \(.+\) (shows|has shown) no sign of life.*", 4.0),
    ],
    ids=lambda value: value if isinstance(value, int) or (isinstance(value, str) and value.isalpha()) else "",
    test_all=3,
)
def test_workers_of_every_machine_name_the_rank_that_is_gone_or_late(link, lost, how, cause, patience):
    with Workers(_lose_one, 4, link.machines, lost, how, patience) as workers:
        for rank in range(4):
            workers.message(rank)
        process = workers.processes[lost]
        if how in ("kill", "stop"):
            os.kill(process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        for rank in {0, 1, 2, 3} - {lost}:
            workers.processes[rank].join(600)
        if how in ("sleep", "stop"):
            process.kill()
        outcomes = workers.outcomes()
    for rank in {0, 1, 2, 3} - {lost}:
        assert outcomes[rank].value is not None, outcomes[rank].error
        text = outcomes[rank].value
        assert re.search(cause.format(process=process.pid) + rf"\. Rank {rank} stops too", text), text


@pytest.mark.slow
def test_a_stranger_on_the_network_changes_nothing_but_time(link):
    """On both machines one connects to every open port, with garbage, replays, silence and floods."""
    attackers = [
        subprocess.Popen([sys.executable, STRANGERS, name, "12"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in link.machines
    ]
    try:
        results = run(_train, 4, link.machines, LAYOUTS[0], "torch", {})
        told = [attacker.communicate(timeout=120)[0].split() for attacker in attackers]
    finally:
        for attacker in attackers:
            attacker.kill()
    assert max(difference for difference, _ in results) <= 1e-10
    connections, ports, replays = (sum(int(text) for text in column) for column in zip(*told, strict=True))
    assert connections > 50, told
    assert ports >= 2
    assert replays > 0

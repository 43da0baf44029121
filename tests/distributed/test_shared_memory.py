"""Exchanges through memory that workers share: sums in the order of the ranks, and an end to every wait."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from worker_processes import Workers, run, tell

from burnish.distributed import join
from burnish.distributed.connection import shared_memory
from burnish.distributed.connection.process_group import Backends
from burnish.distributed.connection.shared_memory import PIECE_BYTES, SMALL_BYTES, Files, Processes
from burnish.engines.torch import native as kernels
from burnish.errors import WorkerError

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is shared on Linux"),
    pytest.mark.skipif(not kernels.available("shared_memory"), reason="needs a C++ compiler"),
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32)
# Around the pages, lines and blocks that the kernel works in, and none at all.
SIZES = (0, 1, 7, 63, 65, 1023, 1025, 4097, 20011)


def part(rank, size, dtype):
    """What a rank gives: numbers that the order of a sum matters to."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    numbers = torch.randn(size, generator=generator, dtype=torch.float64) * 10 ** (3 * torch.rand(size, generator=generator))
    return numbers.to(dtype)


def in_order(parts):
    """The sum from the first to the last, of 16 bits in float32."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    total = parts[0].to(wide)
    for each in parts[1:]:
        total = total + each.to(wide)
    return total.to(dtype)


def _small(rank):
    with join(timeout=600, first_contact=600) as group:
        assert group.memory is not None
        members = range(group.world_size)
        for dtype in DTYPES:
            for size in SIZES:
                parts = [part(other, size, dtype) for other in members]
                assert torch.equal(group.all_reduce(parts[rank].clone()), in_order(parts))
                stacked = torch.stack(parts)
                assert torch.equal(group.all_reduce(parts[rank].clone(), "max"), stacked.amax(0))
                assert torch.equal(group.all_reduce(parts[rank].clone(), "min"), stacked.amin(0))
                assert torch.equal(group.all_gather_rows(parts[rank]), stacked)
        special = torch.tensor([float("nan"), float("inf"), 1.0] if rank == 1 else [1.0, -float("inf"), float("nan")])
        for operation in ("sum", "min", "max"):
            found = group.all_reduce(special.clone(), operation)
            assert found.isnan().tolist() == [True, operation == "sum", True], operation
        flags = group.all_gather(torch.tensor([rank == 0, True]))
        assert [each.tolist() for each in flags] == [[other == 0, True] for other in members]
        # As many as a place holds, one more, which goes in pieces, and several begun before one is waited for.
        for size in (SMALL_BYTES, SMALL_BYTES + 1):
            assert group.all_gather_rows(torch.full((size,), rank, dtype=torch.uint8)).sum(1).tolist() == [
                size * other for other in members
            ]
        begun = [torch.full((3,), float(rank + step)) for step in range(5)]
        pending = [group.begin_all_reduce(each) for each in begun]
        for each in reversed(pending):
            each.wait()
        total = sum(members)
        assert [each[0].item() for each in begun] == [total + step * group.world_size for step in range(5)]
        return True


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_small_values_have_the_sums_of_all_ranks_in_their_order(workers):
    assert run(_small, workers) == [True] * workers


def _large(rank):
    """Values of several pieces, and of dtypes that no kernel adds up; of every size around a piece."""
    with join(timeout=600, first_contact=600) as group:
        assert group.memory is not None
        Backends.all_reduce = Backends.all_gather = Backends.all_to_all = Backends.broadcast = None
        members = range(group.world_size)
        for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.float16, torch.int16, torch.uint8):
            for size in (PIECE_BYTES // dtype.itemsize, 2 * PIECE_BYTES // dtype.itemsize + 1):
                parts = [whole(other, size, dtype) for other in members]
                assert torch.equal(group.all_reduce(parts[rank].clone()), sum(parts[1:], parts[0]))
                assert torch.equal(group.all_reduce(parts[rank].clone(), "max"), torch.stack(parts).amax(0))
                assert torch.equal(group.all_gather_rows(parts[rank]), torch.stack(parts))
                for source in members:
                    assert torch.equal(group.broadcast(parts[rank].clone(), source), parts[source])
        with torch.inference_mode():
            made_in_inference = torch.ones(10**5)
        for tensor in (made_in_inference, torch.ones(10**5, requires_grad=True)):
            assert group.broadcast(group.all_reduce(tensor))[0].item() == group.world_size
        sizes = [[(giver + 1) * (to * 200_000 + giver) for to in members] for giver in members]
        given = [[whole(10 * giver + to, sizes[giver][to], torch.float32) for to in members] for giver in members]
        expected = torch.cat([given[giver][rank] for giver in members])
        assert torch.equal(group.all_to_all_uneven(torch.cat(given[rank]), sizes), expected)
        even = [to * 100_000 for to in members]
        parts = [[whole(giver + to, even[to], torch.float64) for to in members] for giver in members]
        received, pending = group.begin_all_to_all(torch.cat(parts[rank]), even)
        pending.wait()
        assert torch.equal(received, torch.stack([parts[giver][rank] for giver in members]))
        return True


def whole(rank, size, dtype):
    """Small whole numbers, whose sums are exact in every dtype."""
    return torch.randint(0, 20, (size,), generator=torch.Generator().manual_seed(7 * size + rank)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_large_values_go_in_pieces(workers):
    assert run(_large, workers) == [True] * workers


def _buffers(rank):
    with join(timeout=600, first_contact=600) as group:
        members = range(group.world_size)
        made = {(dtype, size): group.shared_buffer(dtype, size) for dtype in DTYPES for size in (1, 65, 40013)}
        assert None not in made.values()
        bits = []
        for step in range(3):
            for (dtype, size), buffer in made.items():
                buffer.tensor.copy_(part(rank + step, size, dtype))
                buffer.all_reduce()
            for (dtype, size), buffer in reversed(made.items()):
                buffer.wait()
                assert torch.equal(buffer.tensor, in_order([part(other + step, size, dtype) for other in members]))
                bits.append(buffer.tensor.view(torch.uint8).sum().item())
        # Exchanged again without having been waited for.
        buffer = made[torch.float64, 1]
        buffer.tensor.fill_(1.0)
        buffer.all_reduce()
        buffer.all_reduce().wait()
        assert buffer.tensor.item() == group.world_size**2
        assert group.shared_buffer(torch.uint8, 8) is None
        assert group.shared_buffer(torch.float32, 0) is None
        return bits


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_buffers_have_the_sums_of_all_ranks_in_their_order_in_every_step(workers):
    results = run(_buffers, workers)
    assert all(result == results[0] for result in results)


def _switched_off(rank, how):
    if how == "environment" and rank == 1:
        os.environ[shared_memory.SWITCH] = "off"
    if how == "kernels" and rank == 1:
        os.environ["BURNISH_KERNELS"] = "off"
    if how == "files" and rank == 1:
        os.memfd_create = _no_file
    if how == "another place" and rank == 1:
        offered = shared_memory._offered
        shared_memory._offered = lambda size: (lambda file, offer: (file, {**offer, "system": "another"}))(*offered(size))
    if how == "another file" and rank == 1:
        offered = shared_memory._offered
        shared_memory._offered = lambda size: (lambda file, offer: (file, {**offer, "token": "00" * 32}))(*offered(size))
    if how == "hidden" and rank == 1:
        offered = shared_memory._offered
        shared_memory._offered = lambda size: (lambda file, offer: (file, {**offer, "file": 10**6}))(*offered(size))
    with join(timeout=600, first_contact=600, share_memory=not (how == "option" and rank == 1)) as group:
        summed = group.all_reduce(torch.tensor([rank, 1.0])).tolist()
        return group.memory is None, group.shared_buffer(torch.float32, 4) is None, summed, len(os.listdir("/proc/self/fd"))


def _no_file(*arguments):
    raise OSError("no memory")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["option", "environment", "kernels", "files", "another place", "another file", "hidden"])
def test_if_one_worker_cannot_all_of_them_exchange_by_gloo(how):
    for off, no_buffer, summed, _ in run(_switched_off, 2, how):
        assert off
        assert no_buffer
        assert summed == [1.0, 2.0]


def _at_odds(rank, size):
    group = join(timeout=600, first_contact=600)
    group.all_reduce(torch.ones(size + rank), name="gradients")


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 10**5])
def test_workers_that_give_different_sizes_are_told(size):
    with Workers(_at_odds, 2, size) as workers:
        for outcome in workers.outcomes():
            expected = (
                r"WorkerError: The workers have come to the all-reduce of gradients with different sizes, dtypes or operations"
            )
            assert re.search(expected, outcome.error or ""), outcome.error


def _loses_one(rank, how, patience):
    group = join(timeout=patience, first_contact=600)
    buffer = group.shared_buffer(torch.float32, 10**5, name="gradients")
    buffer.all_reduce().wait()
    tell(os.getpid())
    if rank == 1:
        time.sleep(1)  # so that the others wait by then, in most runs
        if how == "leave":
            group.close()
        time.sleep(3600)
    try:
        buffer.all_reduce().wait()
    except WorkerError as error:
        group.close()  # rank 0 keeps the store, in which the others read why
        return f"WorkerError: {error}"
    return "went on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause", "patience"),
    [
        # Found out long before the time of an exchange is over.
        ("kill", r"WorkerError: Rank 1 of 3 \(.+\) is gone\. Rank {rank} stops too", 3000.0),
        ("leave", r"WorkerError: Rank 1 of 3 \(.+\) left the run before this one\. Rank {rank} stops too", 3000.0),
        (
            "sleep",
            r"WorkerError: The all-reduce of gradients is not done after 5 s: rank 1 of 3 \(.+\) has not come to it\.",
            5.0,
        ),
    ],
)
def test_a_wait_for_a_buffer_ends_when_a_worker_is_gone(how, cause, patience):
    with Workers(_loses_one, 3, how, patience) as workers:
        for rank in range(3):
            workers.message(rank)
        if how == "kill":
            os.kill(workers.processes[1].pid, signal.SIGKILL)
        workers.processes[0].join(600)
        workers.processes[2].join(600)
        assert (workers.processes[0].exitcode, workers.processes[2].exitcode) == (0, 0), "they wait for rank 1"
        workers.processes[1].kill()
        outcomes = workers.outcomes()
    for rank in (0, 2):
        text = outcomes[rank].value
        assert re.search(cause.format(rank=rank), text), text


def _waits_for_good(rank):
    group = join(timeout=600, first_contact=600)
    buffer = group.shared_buffer(torch.float32, 10**5)
    tell(Path("/proc/self/maps").read_text().count("memfd:burnish"))
    if rank:
        buffer.all_reduce().wait()
    time.sleep(3600)


@pytest.mark.slow
def test_nothing_is_left_when_all_workers_are_killed():
    before = set(os.listdir("/dev/shm"))
    with Workers(_waits_for_good, 3) as workers:
        for rank in range(3):
            assert workers.message(rank) >= 3
        for process in workers.processes:
            process.kill()
            process.join()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "burnish" in name]


class Alone:
    """A group of one worker that looks at what it was given."""

    rank, world_size, timeout, shares_memory = 0, 1, 1.0, True

    def all_gather_json(self, value, *, name="values"):
        return [value]


def test_files_are_of_their_owner_alone_and_keep_their_size():
    file, offer = shared_memory._offered(1000)
    try:
        found = os.fstat(file)
        assert found.st_mode & 0o777 == 0o600
        assert found.st_size == 4096 + 1000
        assert offer["process"] == os.getpid()
        for size in (1, 10**6):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        with mmap.mmap(file, found.st_size) as mapped:
            assert mapped[512:544] == bytes.fromhex(offer["token"])
    finally:
        os.close(file)


def test_files_have_room_for_numbers_and_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    files = Files.open(Alone(), 40)
    (numbers,) = files.tensors(torch.float32, 10)
    assert numbers.tolist() == [0.0] * 10
    del files
    numbers.fill_(1.0)  # they keep the memory that they lie in
    assert numbers.sum().item() == 10
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # a mapping may keep its file
    del numbers
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_ends_is_found_out_before_anybody_asks_for_it():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    processes = Processes({3: child.pid})
    assert not processes.ended()
    child.kill()
    until = time.monotonic() + 600
    while not processes.ended() and time.monotonic() < until:
        time.sleep(0.01)
    assert processes.ended() == [3]  # although nobody has waited for it
    child.communicate()


def test_a_wait_ends_with_what_it_waited_for():
    give, take = torch.ops.burnish.shared_give, torch.ops.burnish.shared_take
    marks = [torch.zeros(64, dtype=torch.int64) for _ in range(2)]
    slots = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    result = torch.zeros(4)
    give(marks[0], slots[0], torch.arange(4.0), 1, 0)
    began = time.monotonic()
    assert take(marks, slots, result, 1, 0, 0.05) == 1  # not yet
    assert time.monotonic() - began >= 0.05
    torch.ops.burnish.shared_leave(marks[1])
    assert take(marks, slots, result, 1, 0, 5.0) == 2  # gone
    give(marks[1], slots[1], torch.ones(4), 1, 0)
    assert take(marks, slots, result, 1, 0, 5.0) == 0  # who left had given
    assert result.tolist() == [1, 2, 3, 4]
    give(marks[0], slots[0], torch.arange(4.0), 2, 0)
    for other, operation in ((torch.ones(5), 0), (torch.ones(4, dtype=torch.int32), 0), (torch.ones(4), 1)):
        give(marks[1], slots[1], other, 2, operation)
        assert take(marks, slots, result, 2, 0, 5.0) == 3  # they differ
    with pytest.raises(RuntimeError, match=r"36 bytes in a place of 32"):
        give(marks[0], slots[0], torch.ones(9), 3, 0)

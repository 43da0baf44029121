"""Sums of which each worker gets a section, by shared memory and by connections: in the order of the ranks, at half the bytes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from worker_processes import run

from burnish.distributed import join
from burnish.distributed.connection import communicators
from burnish.distributed.connection.communicators import GroupCommunicator, OrderedSums
from burnish.engines.communicator import GRADIENTS

SIZES = {2: [[5, 3], [0, 7], [40013, 20011], [1, 0]], 3: [[4, 0, 1], [0, 0, 20011], [1025, 4097, 63]]}
COMPRESSIONS = (None, "float16", "bfloat16")


def terms(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a rank, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    return (numbers * 10 ** (3 * torch.rand(count, generator=generator))).to(dtype)


def section_of(rank: int, sizes: list[int], dtype: torch.dtype, compression: str | None) -> torch.Tensor:
    """What a rank should get: each worker's part rounded to what travels, added up in the order of the ranks."""
    encoding, first = compression and communicators.COMPRESSIONS.resolve(compression), sum(sizes[:rank])
    total = torch.zeros(sizes[rank], dtype=dtype)
    for other in range(len(sizes)):
        part = terms(other, sum(sizes), dtype)[first : first + sizes[rank]]
        if encoding is not None and part.numel():
            part = encoding.decoded(encoding.encoded(part.unsqueeze(0)), dtype)[0]
        total = part.clone() if other == 0 else total + part
    return total


def _sections(rank, cases, share_memory):
    with join(timeout=600, first_contact=600, share_memory=share_memory) as group:
        assert (group.memory is not None) == share_memory
        plain = GroupCommunicator(group)
        for compression in COMPRESSIONS:
            communicator = OrderedSums(plain, compression=compression and communicators.COMPRESSIONS.resolve(compression))
            for dtype in (torch.float32, torch.float64):
                for sizes in cases:
                    expected = section_of(rank, sizes, dtype, compression)
                    own, pending = communicator.reduce_scatter(terms(rank, sum(sizes), dtype), sizes, channel=GRADIENTS)
                    pending.wait()
                    assert torch.equal(own, expected), (compression, dtype, sizes)
                    shared = communicator.shared_buffer(dtype, sum(sizes), channel=GRADIENTS)
                    assert (shared is None) == (not share_memory or compression is not None)
                    first = sum(sizes[:rank])
                    for _ in range(3 if shared is not None else 0):
                        shared.settle()
                        shared.tensor.copy_(terms(rank, sum(sizes), dtype))
                        shared.reduce_scatter(sizes).wait()
                        assert torch.equal(shared.tensor[first : first + sizes[rank]], expected), (compression, dtype, sizes)
        return True


@pytest.mark.slow
@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("workers", [2, 3])
def test_each_worker_gets_the_sums_of_its_section_in_the_order_of_the_ranks(workers, share_memory):
    assert run(_sections, workers, SIZES[workers], share_memory) == [True] * workers


def _rows(rank):
    with join(timeout=600, first_contact=600) as group:
        rows = GroupCommunicator(group).shared_rows(70001)
        for step in range(3):
            rows.settle()
            rows.tensor.fill_(10 * step + rank)
            rows.show()
            assert [row.unique().tolist() for row in rows.rows()] == [[10 * step + other] for other in range(group.world_size)]
            rows.release()
        return True


def test_rows_are_those_that_the_workers_showed():
    assert run(_rows, 3) == [True] * 3


def _written(rank, count):
    """The bytes that a worker writes, most of them to the others, for sums of all of a buffer and for those of its section."""

    def written() -> int:
        (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar")]
        return int(line.split()[1])

    with join(timeout=600, first_contact=600, share_memory=False) as group:
        communicator = GroupCommunicator(group)
        sizes = [count // group.world_size] * group.world_size
        found = []
        for _ in range(2):
            before = written()
            communicator.all_reduce(torch.ones(count)).wait()
            between = written()
            communicator.reduce_scatter(torch.ones(count), sizes)[1].wait()
            group.all_gather_json(None)
            found = [between - before, written() - between]
        return found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts what a process writes")
@pytest.mark.parametrize("workers", [2, 3])
def test_by_connections_a_worker_sends_half_as_many_bytes_for_a_section_as_for_all(workers):
    count = 6 * 2**18
    for whole, section in run(_written, workers, count):
        expected = (workers - 1) / workers * 4 * count
        assert section == pytest.approx(expected, rel=0.02)
        assert whole == pytest.approx(2 * expected, rel=0.02)

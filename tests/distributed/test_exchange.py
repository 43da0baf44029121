"""Exchanges by connections: what every worker gets, on which side of the sizes where another way is taken, and how they end."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from burnish.distributed.connection.exchange import PIECE_ELEMENTS, SMALL_BYTES, DifferentError, Exchange

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
# In float32: none, one, around what goes to all at once, and around what is added at once by each of 2 to 4 workers.
SIZES = (0, 1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 2 * PIECE_ELEMENTS, 3 * PIECE_ELEMENTS + 1, 10 * PIECE_ELEMENTS + 7)


@pytest.fixture(params=[2, 3, 4])
def exchanges(request) -> Iterator[list[Exchange]]:
    """Workers that are connected each with each, in one process."""
    streams: list[dict[int, socket.socket]] = [{} for _ in range(request.param)]
    for rank in range(request.param):
        for other in range(rank):
            streams[rank][other], streams[other][rank] = socket.socketpair()
    made = [Exchange(rank, each) for rank, each in enumerate(streams)]
    yield made
    for each in made:
        each.close()
        assert not any(thread.is_alive() for thread in each._threads)


def given(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(7 * size + rank)
    return torch.randint(0, 20, (size,), generator=generator).to(dtype)


def waited(tasks) -> None:
    for task in tasks:
        assert task.wait(20)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.quick_cases(5)
def test_sums_minima_and_maxima_are_those_of_all(exchanges, dtype):
    members = range(len(exchanges))
    for size in SIZES:
        rows = torch.stack([given(rank, size, dtype) for rank in members])
        expected = {"sum": rows.sum(0).to(dtype), "min": rows.amin(0), "max": rows.amax(0)}
        for operation, result in expected.items():
            tensors = [row.clone() for row in rows]
            waited([exchange.all_reduce(tensor, operation) for exchange, tensor in zip(exchanges, tensors, strict=True)])
            assert all(torch.equal(tensor, result) for tensor in tensors), (size, operation)


def test_sums_are_the_same_bits_on_all_workers(exchanges):
    for size in SIZES:
        tensors = [torch.randn(size, generator=torch.Generator().manual_seed(rank)) for rank in range(len(exchanges))]
        waited([exchange.all_reduce(tensor, "sum") for exchange, tensor in zip(exchanges, tensors, strict=True)])
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def test_every_worker_gets_what_is_meant_for_it(exchanges):
    members = range(len(exchanges))
    for size in SIZES:
        own = [given(rank, size, torch.float32) for rank in members]
        rows = [torch.full((len(members), size), -1.0) for _ in members]
        waited([exchanges[rank].all_gather(rows[rank].unbind(), own[rank]) for rank in members])
        assert all(torch.equal(each, torch.stack(own)) for each in rows)
        # To each rank as many more as it has: the parts are of different sizes.
        parts = [[given(10 * rank + to, size + to, torch.float32) for to in members] for rank in members]
        taken = [[torch.empty(size + rank) for _ in members] for rank in members]
        waited([exchanges[rank].all_to_all(taken[rank], parts[rank]) for rank in members])
        assert all(torch.equal(taken[rank][giver], parts[giver][rank]) for rank in members for giver in members)
        for source in members:
            told = [own[rank].clone() for rank in members]
            waited([exchanges[rank].broadcast(told[rank], source) for rank in members])
            assert all(torch.equal(each, own[source]) for each in told)


def test_exchanges_that_are_begun_before_others_are_done_keep_their_order(exchanges):
    tensors = [[torch.full((size,), float(rank + 1)) for size in (3, 10**5, 7, 10**5)] for rank in range(len(exchanges))]
    tasks = [exchange.all_reduce(tensor, "sum") for exchange, own in zip(exchanges, tensors, strict=True) for tensor in own]
    waited(reversed(tasks))
    total = sum(range(1, len(exchanges) + 1))
    assert all(bool((tensor == total).all()) for own in tensors for tensor in own)


def test_tensors_that_train_and_those_of_inference_are_taken(exchanges):
    with torch.inference_mode():
        tensors = [torch.ones(10**5) for _ in exchanges]
    tensors[0] = torch.ones(10**5, requires_grad=True)
    waited([exchange.all_reduce(tensor, "sum") for exchange, tensor in zip(exchanges, tensors, strict=True)])
    assert [tensor[0].item() for tensor in tensors] == [len(exchanges)] * len(exchanges)


@pytest.mark.parametrize("sizes", [(3, 4), (10**5, 10**5 + 1), (3, 10**5)])
@pytest.mark.parametrize("difference", ["size", "dtype", "operation"])
def test_workers_that_come_with_different_things_are_told(exchanges, sizes, difference):
    tasks = []
    for rank, exchange in enumerate(exchanges):
        other = rank == 1
        tensor = torch.ones(sizes[other and difference == "size"], dtype=torch.int32 if other and difference == "dtype" else None)
        tasks.append(exchange.all_reduce(tensor, "max" if other and difference == "operation" else "sum"))
    for task in tasks[1:3] if len(tasks) > 2 else tasks:  # the one that differs, and the one that hears of it first
        with pytest.raises(DifferentError):
            assert not task.wait(20)


@pytest.mark.parametrize("size", [3, 10**6])
def test_a_connection_that_breaks_ends_what_is_under_way_and_what_comes_later(exchanges, size):
    tasks = [exchange.all_reduce(torch.ones(size), "sum") for exchange in exchanges[:-1]]
    exchanges[-1].close()
    later = exchanges[0].broadcast(torch.ones(3), 0)
    for task in (tasks[0], later):
        with pytest.raises(OSError, match=r"closed the connection|Broken pipe|reset"):
            assert not task.wait(20)


def test_a_worker_that_leaves_in_the_middle_of_exchanges_waits_for_nothing():
    for _ in range(20):
        one, other = socket.socketpair()
        first, second = Exchange(0, {1: one}), Exchange(1, {0: other})
        for exchange in (first, second):
            for _ in range(20):
                exchange.all_reduce(torch.ones(10**5), "sum")
        for exchange in (first, second):
            exchange.close()
            assert not any(thread.is_alive() for thread in exchange._threads)

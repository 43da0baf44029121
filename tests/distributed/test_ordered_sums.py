"""Sums in the order of the ranks are that sum, bit by bit, however the workers are connected and the numbers travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker_processes import run

import burnish
from burnish.distributed import join
from burnish.distributed.connection.communicators import (
    COMPRESSIONS,
    SMALL_BYTES,
    BFloat16,
    Encoding,
    Float16,
    GroupCommunicator,
    OrderedSums,
)
from burnish.distributed.connection.process_group import Backends
from burnish.engines.communicator import GRADIENTS
from burnish.engines.torch import native as kernels
from burnish.errors import ConfigurationError
from oracles.normalized_networks import image_batches, residual
from oracles.several_workers import in_threads, largest_difference, train_alone, train_in_threads

LARGE = SMALL_BYTES // 4 + 13
SIZES = [1, 5, LARGE]


def terms(workers: int, size: int, dtype: type = np.float32) -> np.ndarray:
    """Numbers, [workers, size], whose sum depends on the order; most of them cancel."""
    numbers = np.random.default_rng(size).standard_normal((workers, size)) * 10.0 ** np.arange(workers)[:, None]
    numbers[-1] -= numbers[:-1].sum(axis=0)
    return numbers.astype(dtype)


def in_order(rows: np.ndarray) -> np.ndarray:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def summed(communicator, numbers, compression=None, group=0, channel=GRADIENTS):
    """What one worker gets of the sum of rows."""
    sums = OrderedSums(communicator, compression=compression and COMPRESSIONS.resolve(compression))
    buffer = torch.from_numpy(numbers[communicator.rank].copy())
    sums.all_reduce(buffer, group=group, channel=channel).wait()
    return buffer.numpy()


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_sums_are_in_the_order_of_the_ranks(workers, size):
    numbers = terms(workers, size)
    for found in in_threads(workers, lambda communicator: summed(communicator, numbers)):
        np.testing.assert_array_equal(found, in_order(numbers))


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_groups(size):
    numbers = terms(4, size, np.float64)
    found = in_threads(4, lambda communicator: summed(communicator, numbers, None, 2))
    for rank, result in enumerate(found):
        np.testing.assert_array_equal(result, in_order(numbers[rank // 2 * 2 :][:2]))


def every_sum(communicator, cases):
    return [summed(communicator, *case) for case in cases]


@pytest.mark.parametrize("workers", [2, 3])
def test_processes_add_up_the_same(pool, workers):
    cases = [(terms(workers, size), kind) for size in SIZES for kind in (None, "float16", "bfloat16")]
    by_processes = pool.run(workers, every_sum, cases)
    for ours, theirs in zip(by_processes, in_threads(workers, lambda communicator: every_sum(communicator, cases)), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


def _compressed(rank, cases, share_memory):
    """What one worker gets of sums of rows, by memory that is shared or by Gloo."""
    with join(timeout=600, first_contact=600, share_memory=share_memory) as group:
        communicator = GroupCommunicator(group)
        if share_memory:
            Backends.all_to_all = Backends.all_gather = Backends.all_reduce = _by_gloo
        return [summed(communicator, numbers, compression) for numbers, compression in cases]


def _by_gloo(*arguments, **options):
    raise AssertionError("exchanged by Gloo")


@pytest.mark.slow
@pytest.mark.skipif(not kernels.available("shared_memory"), reason="needs a C++ compiler")
@pytest.mark.parametrize("workers", [2, 3])
def test_compressed_sums_are_the_same_by_shared_memory_and_by_gloo(workers):
    sizes, dtypes = (*SIZES, 10**5), (np.float32, np.float64)
    cases = [(terms(workers, size, dtype), kind) for size in sizes for dtype in dtypes for kind in ("float16", "bfloat16")]
    shared, by_gloo = (run(_compressed, workers, cases, share_memory) for share_memory in (True, False))
    for ours, theirs in zip(shared, by_gloo, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize(("compression", "roundoff"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
@pytest.mark.parametrize("size", [7, LARGE])
def test_compressed_sums_are_off_by_the_rounding_of_each_term_and_of_the_sum(compression, roundoff, magnitude, size):
    numbers = (np.random.default_rng(0).standard_normal((3, size)) * magnitude).astype(np.float32)
    found = in_threads(3, lambda communicator: summed(communicator, numbers, compression))
    exact = numbers.astype(np.float64).sum(axis=0)
    off = roundoff * (np.abs(numbers).astype(np.float64).sum(axis=0) * (1 + roundoff) + np.abs(exact)) * (1 + 1e-6)
    for result in found:
        np.testing.assert_array_equal(result, found[0])
        # What the largest number of a row lets of the smallest: 2^-39 of it.
        assert np.all(np.abs(result - exact) <= off + 2.0**-36 * np.abs(numbers).max())
    assert np.abs(found[0] - exact).max() > 0


@pytest.mark.parametrize("compression", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [7, LARGE])
def test_zeros_stay_zeros_and_what_is_not_finite_arrives(compression, size):
    numbers = np.zeros((2, size), np.float32)
    for result in in_threads(2, lambda communicator: summed(communicator, numbers, compression)):
        np.testing.assert_array_equal(result, 0)
    for value in (np.nan, np.inf, -np.inf):
        numbers[1, -1] = value
        for result in in_threads(2, lambda communicator: summed(communicator, numbers, compression)):
            np.testing.assert_array_equal(result[-1], np.float32(value))


def test_gradients_alone_are_compressed():
    numbers = np.full((2, 5), 1 / 3, np.float32)
    for result in in_threads(2, lambda communicator: summed(communicator, numbers, "bfloat16", 0, "statistics")):
        np.testing.assert_array_equal(result, in_order(numbers))


@pytest.mark.parametrize("encoding", [Encoding(), Float16(), BFloat16()])
def test_encodings_keep_what_they_hold(encoding):
    rows = torch.tensor([[1.0, -0.5, 1024.0, 0.0], [2.0**-90, 2.0**-92, 0.0, -(2.0**-95)]])
    torch.testing.assert_close(encoding.decoded(encoding.encoded(rows), torch.float32), rows, rtol=0, atol=0)


STEPS, SAMPLES = 3, 12
PARTS = {2: [[5, 7], [12, 0], [6, 6]], 4: [[1, 4, 0, 7], [3] * 4, [0, 6, 6, 0]]}


@pytest.fixture(scope="module")
def program():
    return burnish.compile(residual(), optimizer="sgd:lr=0.05,momentum=0.9")


@pytest.fixture(scope="module")
def batches():
    return image_batches(STEPS, SAMPLES)


@pytest.fixture(scope="module")
def alone(program, batches):
    return train_alone(program, batches)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.slow
def test_deterministic_runs_are_one_run_and_that_of_one_worker(program, batches, alone, workers):
    runs = [train_in_threads(program, batches, PARTS[workers], deterministic=True) for _ in range(2)]
    expected = {name: array.tobytes() for name, array in runs[0][0][1][-1].items()}
    for outcome in (*runs[0], *runs[1]):
        assert {name: array.tobytes() for name, array in outcome[1][-1].items()} == expected
    assert largest_difference(runs[0][0], alone) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_training_with_compressed_gradients(program, batches, alone, compression, bound):
    outcomes = train_in_threads(program, batches, PARTS[2], compression=compression)
    assert 1e-9 < largest_difference(outcomes[0], alone) < bound
    for name, array in outcomes[0][1][-1].items():
        assert array.tobytes() == outcomes[1][1][-1][name].tobytes(), f"{name} is not the same bits on all workers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": "int8"}, "there is no compression 'int8'; choose among bfloat16, float16"),
        ({"deterministic": 1}, r"deterministic must be True or False, not 1"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(ConfigurationError, match=message):
        burnish.DataParallel(**options)


def test_workers_with_other_options_are_refused(program):
    def open_session(communicator):
        compression = "float16" if communicator.rank else None
        parallel = burnish.DataParallel(communicator=communicator, compression=compression, deterministic=True)
        with pytest.raises(ConfigurationError, match=r"the exchanges of rank 0 has the hash \w+ and that of rank 1 \w+"):
            burnish.Session(program, engine="torch", parallel=parallel)
        return True

    assert in_threads(2, open_session) == [True, True]

"""Gradients that travel as products of narrow matrices: what of them is exact, and that training with them converges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from worker_processes import run

import burnish
from burnish import optim
from burnish.distributed import join
from burnish.distributed.connection.communicators import GroupCommunicator
from burnish.distributed.connection.encodings import COMPRESSIONS, LowRank
from burnish.distributed.connection.exchange import Exchange
from burnish.distributed.connection.ordered_sums import OrderedSums
from burnish.distributed.connection.power_sgd import PowerSGD
from burnish.engines.torch.native import kernels
from burnish.errors import ConfigurationError
from oracles.normalized_networks import image_batches, residual
from oracles.several_workers import in_threads, largest_difference, part_of, train_alone, train_in_threads, train_part
from oracles.small_networks import CLASSES, perceptron

SHAPES = [(20, 3, 3, 4), (7,), (16, 30), (4, 3)]
SIZES = [int(np.prod(shape)) for shape in SHAPES]
COMPRESSED = [0, 2]


def gradients(workers: int, rank: int, seed: int = 0) -> list[torch.Tensor]:
    """What each worker has: matrices whose sums over the workers have a rank, and of which no worker has the whole."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    own = [[] for _ in range(workers)]
    for shape in SHAPES:
        rows, columns = shape[0], int(np.prod(shape[1:]))
        whole = drawn(rows, min(rank, columns)) @ drawn(min(rank, columns), columns)
        parts = [drawn(rows, columns) for _ in range(workers - 1)]
        for worker, part in enumerate([*parts, whole - sum(parts)] if parts else [whole]):
            own[worker].append(part.flatten())
    return [torch.cat(parts) for parts in own]


def summed(communicator, steps: list[list[torch.Tensor]], rank: int) -> list[torch.Tensor]:
    compressed = PowerSGD(communicator, rank)
    results = []
    for step in steps:
        buffer = step[communicator.rank].clone()
        compressed.all_reduce_gradients(buffer, SHAPES, "bucket").wait()
        results.append(buffer)
    return results


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_sums_of_that_rank_are_exact(workers):
    own = gradients(workers, rank=2)
    for (result,) in in_threads(workers, lambda communicator: summed(communicator, [own], 2)):
        torch.testing.assert_close(result, sum(own), rtol=0, atol=1e-11)


def _by_processes(rank, steps, approximated, share_memory):
    with join(timeout=600, first_contact=600, share_memory=share_memory) as group:
        if share_memory:
            Exchange.all_reduce = _by_connections
        communicator = OrderedSums(GroupCommunicator(group))
        return [result.numpy() for result in summed(communicator, steps, approximated)]


def _by_connections(*arguments, **options):
    raise AssertionError("exchanged by connections")


@pytest.mark.skipif(not kernels.available("shared_memory"), reason="needs a C++ compiler")
def test_results_are_the_same_by_shared_memory_and_by_connections():
    steps = [gradients(3, rank=20, seed=seed) for seed in range(3)]
    for approximated in (2, 20):  # the last of which leaves every gradient whole
        shared, by_connections = (run(_by_processes, 3, steps, approximated, share_memory) for share_memory in (True, False))
        for ours, theirs in zip(shared, by_connections, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(one, other)


def test_what_a_step_leaves_out_later_steps_add():
    """Sums of the results and of the errors that are left are those of the gradients; vectors are exact at once."""
    steps = [gradients(3, rank=20, seed=seed) for seed in range(5)]

    def work(communicator):
        compressed = PowerSGD(communicator, 2)
        total = torch.zeros(sum(SIZES), dtype=torch.float64)
        for step in steps:
            buffer = step[communicator.rank].clone()
            compressed.all_reduce_gradients(buffer, SHAPES, "bucket").wait()
            total += buffer
        return total, [matrix.error.flatten() for matrix in compressed._buckets["bucket"].matrices]

    outcomes = in_threads(3, work)
    whole = torch.split(sum(sum(step) for step in steps), SIZES)
    errors = dict(zip(COMPRESSED, (sum(parts) for parts in zip(*(left for _, left in outcomes), strict=True)), strict=True))
    for total, _ in outcomes:
        for index, part in enumerate(torch.split(total, SIZES)):
            left = errors.get(index, torch.zeros(1, dtype=torch.float64))
            torch.testing.assert_close(part + left, whole[index], rtol=0, atol=1e-10)
    assert all(error.norm() > 1 for error in errors.values())


def test_results_are_the_same_bits_everywhere_and_each_time():
    steps = [gradients(3, rank=20, seed=seed) for seed in range(4)]
    runs = [in_threads(3, lambda communicator: summed(communicator, steps, 2)) for _ in range(2)]
    for outcome in (*runs[0], *runs[1]):
        for result, expected in zip(outcome, runs[0][0], strict=True):
            assert torch.equal(result, expected)


def test_a_gradient_that_is_not_finite_does_not_stay():
    good, bad = gradients(2, rank=20), gradients(2, rank=20, seed=1)
    bad[1][3] = torch.inf
    without = in_threads(2, lambda communicator: summed(communicator, [good, good], 2))[0]
    for outcome in in_threads(2, lambda communicator: summed(communicator, [good, bad, good], 2)):
        assert torch.isnan(outcome[1][: SIZES[0]]).all()
        assert torch.equal(outcome[2], without[1])


def test_how_much_travels():
    sent = []

    class Counting:
        def __init__(self, communicator):
            self._communicator = communicator
            self.rank, self.size = communicator.rank, communicator.size

        def all_reduce(self, buffer, *, group=0, channel=""):
            sent.append(buffer.numel())
            return self._communicator.all_reduce(buffer, group=group, channel=channel)

        def shared_buffer(self, dtype, count, *, group=0, channel=""):
            return None

    in_threads(1, lambda communicator: summed(Counting(communicator), [gradients(1, rank=2)], 2))
    assert sent == [7 + 12 + 2 * (20 + 16), 2 * (36 + 30)]


def test_training_converges_as_without(pool, tmp_path):
    """Two workers, in processes: 60 steps of a perceptron on one batch come to a loss near that of whole gradients."""
    program = burnish.compile(perceptron(), optimizer="sgd:lr=0.1,momentum=0.9")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 12), np.float32)
    batches = [{"x": x, "labels": np.argmax(x[:, :CLASSES], axis=1)}] * 60
    alone = [report["loss"] for report in train_alone(program, batches)[0]]
    saved = str(program.save(tmp_path / "program"))
    outcomes = pool.run(2, train_part, saved, batches, [[25, 15]] * 60, {"compression": "powersgd:1"})
    losses = [report["loss"] for report in outcomes[0][0]]
    assert losses != alone
    assert alone[-1] < 0.1 * alone[0]
    assert losses[-1] < 0.15 * losses[0]
    for name, array in outcomes[0][1][-1].items():
        np.testing.assert_array_equal(outcomes[1][1][-1][name], array, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}, {"deterministic": True}], ids=["plain", "shards", "ordered"])
@pytest.mark.quick_cases(1)
def test_a_rank_that_leaves_nothing_out_is_training(options):
    """Matrices too small to be worth it travel as they are: with a high rank that is all of them."""
    program = burnish.compile(residual(), optimizer=optim.accumulate(optim.sgd(lr=0.1), 2), running_variance="pytorch")
    batches, sizes = image_batches(4, 12), [[5, 7], [12, 0], [6, 6], [1, 11]]
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, sizes, compression="powersgd:64", **options):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
def test_another_state_begins_without_errors():
    program = burnish.compile(residual(), optimizer="sgd:lr=0.1")
    batches = image_batches(2, 12)

    def work(communicator):
        parallel = burnish.DataParallel(communicator=communicator, compression="powersgd:1")
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            begin, ends = session.state(), []
            for _ in range(2):
                session.load_state(begin)
                for batch in batches:
                    session.step(part_of(batch, communicator.rank, [6, 6]))
                ends.append(session.state())
            return ends

    for first, second in in_threads(2, work):
        for name, array in first.items():
            np.testing.assert_array_equal(second[name], array, err_msg=name)


def test_ranks():
    assert [COMPRESSIONS.resolve(text) for text in ("powersgd", "powersgd:4")] == [LowRank(2), LowRank(4)]
    for text in ("powersgd:0", "powersgd:two", "powersgd:-1"):
        with pytest.raises(ConfigurationError, match="the rank of powersgd must be a whole number of 1 or more"):
            burnish.DataParallel(compression=text)
    with pytest.raises(ConfigurationError, match="compression 'powersgd:': no settings stand after the colon"):
        burnish.DataParallel(compression="powersgd:")
    with pytest.raises(ConfigurationError, match="there is no compression 'zip'; choose among bfloat16, float16, powersgd"):
        burnish.DataParallel(compression="zip")

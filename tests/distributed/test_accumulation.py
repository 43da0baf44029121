"""Gradients that accumulate on each worker and are exchanged once for several micro-batches come to what one process has."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import burnish
from burnish import optim
from burnish.engines.communicator import GRADIENTS
from burnish.errors import EngineError
from oracles.combinations import diagonal, named
from oracles.normalized_networks import image_batches, inverted_residual, residual
from oracles.several_workers import (
    Batch,
    Outcome,
    in_threads,
    largest_difference,
    part_of,
    train_alone,
    train_in_threads,
    train_part,
)
from oracles.small_networks import CLASSES, perceptron
from oracles.thread_communicator import ThreadCommunicator

EVERY, STEPS, SAMPLES = 3, 7, 12
TWO = [[5, 7], [12, 0], [6, 6], [0, 12], [1, 11], [12, 0], [7, 5]]
THREE = [[5, 0, 7], [1, 10, 1], [0, 0, 12], [4, 4, 4], [12, 0, 0], [3, 3, 6], [0, 6, 6]]
OPTIMIZERS = {
    "sgd": optim.accumulate(optim.sgd(lr=0.1, momentum=0.9), EVERY),
    "adam, clipped by the norm of the mean": optim.accumulate(
        optim.chain(optim.clip_by_global_norm(0.5), optim.adam(lr=0.01, eps=1e-3)), EVERY
    ),
    "averaged behind each micro-batch": optim.ema(optim.accumulate(optim.sgd(lr=0.05, momentum=0.9), EVERY), 0.9),
    "clipped before it is added": optim.chain(optim.clip_by_global_norm(0.5), optim.accumulate(optim.sgd(lr=0.1), EVERY)),
    "groups": optim.accumulate(
        optim.groups(optim.sgd(lr=0.05, momentum=0.9), {"*bias": {"lr_scale": 2.0}, "*shortcut*": "frozen"}), EVERY
    ),
}


class Counting:
    """A communicator that counts the exchanges of gradients, and those of a step beside them."""

    def __init__(self, communicator: ThreadCommunicator):
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size
        self.of_gradients = self.others = 0

    def all_reduce(self, buffer, *, group=0, channel=""):
        if channel == GRADIENTS:
            self.of_gradients += 1
        else:
            self.others += 1
        return self._communicator.all_reduce(buffer, group=group, channel=channel)

    def all_gather(self, buffer, *, group=0):
        return self._communicator.all_gather(buffer, group=group)

    def shared_buffer(self, dtype, count, *, group=0, channel=""):
        return None


def compiled(optimizer, model=None, **options) -> burnish.Program:
    return burnish.compile(residual() if model is None else model, optimizer=optimizer, running_variance="pytorch", **options)


@cache
def in_one_process(name: str) -> tuple[burnish.Program, list[Batch], Outcome]:
    """A program, batches, and what one process comes to with them."""
    program, batches = compiled(OPTIMIZERS[name]), image_batches(STEPS, SAMPLES)
    return program, batches, train_alone(program, batches)


@pytest.mark.slow
@diagonal(("sizes", named([TWO, THREE], ["2 workers", "3 workers"])), ("name", OPTIMIZERS))
def test_every_state_is_that_of_one_process(name, sizes):
    program, batches, alone = in_one_process(name)
    for outcome in train_in_threads(program, batches, sizes):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"norm": "sync"}, {"bucket_size": 1}, {"share": False}, {"deterministic": True}, {"shard_optimizer": True}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_exchange(options):
    program, batches, alone = in_one_process("sgd")
    for outcome in train_in_threads(program, batches, THREE, **options):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
def test_masks_and_weights_of_classes():
    loss = burnish.losses.cross_entropy(weight=[0.2, 3.0, 1.0, 0.5, 2.0], label_smoothing=0.2, ignore_index=3)
    program = compiled(OPTIMIZERS["sgd"], inverted_residual(dropout=True), loss=loss)
    batches = image_batches(STEPS, SAMPLES)
    alone = train_alone(program, batches)
    for outcome in train_in_threads(program, batches, THREE):
        assert largest_difference(outcome, alone) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(("bucket_size", "buckets"), [(2**20, 1), (1, 8 + 12)])
def test_there_is_one_exchange_of_gradients_for_an_update(bucket_size, buckets):
    """Of six convolutions and a dense layer's weight and bias; and of twelve vectors of the normalization layers."""
    program, batches, _ = in_one_process("sgd")

    def counted(communicator):
        counting = Counting(communicator)
        parallel = burnish.DataParallel(communicator=counting, bucket_size=bucket_size)
        found = []
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            for batch, split in zip(batches, TWO, strict=True):
                counting.of_gradients = 0
                session.step(part_of(batch, communicator.rank, split))
                found.append(counting.of_gradients)
        return found

    for found in in_threads(2, counted):
        assert found == [0, 0, buckets] * 2 + [0]


@pytest.mark.slow
def test_a_gradient_that_a_transform_reads_is_exchanged_each_time():
    program, batches = compiled(OPTIMIZERS["clipped before it is added"]), image_batches(2, SAMPLES)

    def counted(communicator):
        counting = Counting(communicator)
        with burnish.Session(program, engine="torch", parallel=burnish.DataParallel(communicator=counting)) as session:
            for batch in batches:
                session.step(part_of(batch, communicator.rank, [6, 6]))
        return counting.of_gradients

    assert in_threads(2, counted) == [2, 2]


@pytest.mark.slow
def test_a_checkpoint_between_updates_goes_on_with_any_number(tmp_path):
    program, batches, (_, alone) = in_one_process("adam, clipped by the norm of the mean")
    path = tmp_path / "between.safetensors"

    def begun(communicator, options):
        parallel = burnish.DataParallel(communicator=communicator, **options)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            for batch, split in zip(batches[:5], THREE, strict=False):
                session.step(part_of(batch, communicator.rank, split))
            if communicator.rank == 1:
                session.save_checkpoint(path)
            else:
                session.take_part()

    def gone_on(communicator, options):
        parallel = burnish.DataParallel(communicator=communicator, **options)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            session.restore(path)
            restored = session.state()
            for batch, split in zip(batches[5:], TWO[5:], strict=True):
                session.step(part_of(batch, communicator.rank, split))
            return restored, session.state()

    def difference(state, expected):
        return largest_difference(([], [state]), ([], [expected]))

    for options in ({}, {"shard_optimizer": True}):
        in_threads(3, lambda communicator, options=options: begun(communicator, options))
        with burnish.Session(program, engine="onnxruntime") as session:
            session.restore(path)
            assert difference(session.state(), alone[4]) < 1e-11
        for restored, state in in_threads(2, lambda communicator, options=options: gone_on(communicator, options)):
            assert difference(restored, alone[4]) < 1e-11
            assert difference(state, alone[-1]) < 1e-11


@pytest.mark.slow
def test_processes(pool, tmp_path):
    program, batches, alone = in_one_process("sgd")
    saved = str(program.save(tmp_path / "program"))
    for outcome in pool.run(3, train_part, saved, batches, THREE, {}):
        assert largest_difference(outcome, alone) < 1e-11


def test_a_micro_batch_that_overflows_on_one_worker_is_skipped_on_all():
    precision = burnish.MixedPrecision("float16", loss_scale=2.0**18, growth_interval=None)
    program = burnish.compile(perceptron(), optimizer=optim.accumulate(optim.sgd(lr=0.01), 2), precision=precision)
    rng = np.random.default_rng(0)
    batches = [
        {"x": rng.standard_normal((SAMPLES, 12), np.float32), "labels": rng.integers(0, CLASSES, SAMPLES)} for _ in range(4)
    ]
    batches[1]["x"][8:] *= 10.0  # the last worker's part
    without = train_in_threads(program, [batches[0], *batches[2:]], [[4, 4, 4]] * 3)[0]
    for outcome in train_in_threads(program, batches, [[4, 4, 4]] * 4):
        assert [report["skipped"] for report in outcome[0]] == [0, 1, 0, 0]
        for name, array in without[1][-1].items():
            if name not in ("rng/key", "opt/skipped_steps", "opt/good_steps"):
                np.testing.assert_array_equal(outcome[1][-1][name], array, err_msg=name)


@pytest.mark.slow
def test_a_closed_session_says_that_others_had_a_part(tmp_path):
    program, batches, _ = in_one_process("sgd")

    def closed(communicator, steps):
        session = burnish.Session(program, engine="torch", parallel=burnish.DataParallel(communicator=communicator))
        for batch in batches[:steps]:
            session.step(part_of(batch, communicator.rank, [6, 6]))
        session.close()
        if steps == EVERY:
            return session.state()["step"]
        with pytest.raises(EngineError, match=r"other workers hold a part of its state \(.*gradients accumulated since the last"):
            session.state()
        return None

    in_threads(2, lambda communicator: closed(communicator, 2))
    assert in_threads(2, lambda communicator: closed(communicator, EVERY)) == [EVERY, EVERY]

"""Optimizer state in shares comes to what whole state comes to, bit by bit, and a checkpoint is that of one worker."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

import burnish
from burnish import optim
from burnish.distributed.accumulation import accumulated_entries, accumulates
from burnish.distributed.connection.communicators import scattered
from burnish.distributed.sharded_optimizer import shares_of
from burnish.engines.communicator import GRADIENTS
from burnish.engines.torch.bindings.exchange import ALIGNMENT
from burnish.errors import ConfigurationError, EngineError
from burnish.targets import TARGETS
from oracles.combinations import spread
from oracles.normalized_networks import image_batches, residual
from oracles.same_state import assert_same_state
from oracles.several_workers import in_threads, largest_difference, part_of, train_in_threads, train_part
from oracles.small_networks import CLASSES, perceptron

STEPS, SAMPLES = 4, 12
PARTS = {2: [[5, 7], [12, 0], [6, 6], [2, 10]], 3: [[5, 7, 0], [4, 4, 4], [0, 0, 12], [1, 2, 9]]}
FEATURES = 12
OPTIMIZERS = {
    "adam, clipped": optim.chain(optim.clip_by_global_norm(0.5), optim.adam(lr=0.01)),
    "accumulated": optim.accumulate(optim.adamw(lr=0.01), 2),
    "averaged": optim.ema(optim.sgd(lr=0.05, momentum=0.9), 0.9),
    "groups": optim.groups(optim.sgd(lr=0.05, momentum=0.9), {"*bias": {"lr_scale": 2.0}, "*second*": "frozen"}),
    "averaged before it is accumulated": optim.accumulate(optim.ema(optim.sgd(lr=0.1, momentum=0.9)), 2),
    "momentum alone in one group": optim.groups(optim.sgd(lr=0.05), {"*bias": optim.sgd(lr=0.05, momentum=0.9)}),
    "lamb": optim.lamb(lr=0.01),
    "adafactor": optim.adafactor(lr=0.01),
    "an average of the method": optim.asgd(lr=0.1, t0=1),
    "rprop": optim.rprop(lr=0.01),
}


@pytest.fixture(scope="module")
def program():
    return burnish.compile(perceptron(dropout=True), optimizer="adam:lr=0.01")


@pytest.fixture(scope="module")
def batches():
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.standard_normal((SAMPLES, FEATURES), np.float32),
            "labels": rng.integers(0, CLASSES, SAMPLES),
        }
        for _ in range(STEPS)
    ]


# Each by itself: "averaged before it is accumulated" is both.
TOGETHER = {"accumulated", "averaged"}


@pytest.mark.slow
@spread("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TOGETHER)) for name in OPTIMIZERS], test_all=6)
def test_sharded_training_is_training(program, batches, name):
    changed = program.with_optimizer(OPTIMIZERS[name])
    whole = train_in_threads(changed, batches, PARTS[3])
    for outcome in train_in_threads(changed, batches, PARTS[3], shard_optimizer=True):
        assert outcome[0] == whole[0][0]
        for state, expected in zip(outcome[1], whole[0][1], strict=True):
            assert_same_state(state, expected)


@pytest.mark.slow
def test_exchanges_that_a_worker_reads_nothing_of(program, batches):
    whole = train_in_threads(program, batches, PARTS[3], bucket_size=1)
    for outcome in train_in_threads(program, batches, PARTS[3], bucket_size=1, shard_optimizer=True, deterministic=True):
        assert_same_state(outcome[1][-1], whole[0][1][-1])


@pytest.mark.slow
def test_processes_and_images(pool, tmp_path):
    program = burnish.compile(residual(), optimizer="adam:lr=0.01,eps=1e-3")
    given = (str(program.save(tmp_path / "program")), image_batches(STEPS, SAMPLES), PARTS[3])
    whole = pool.run(3, train_part, *given, {"deterministic": True})
    for outcome in pool.run(3, train_part, *given, {"deterministic": True, "shard_optimizer": True}):
        assert_same_state(outcome[1][-1], whole[0][1][-1])


def test_a_worker_holds_its_share(program):
    shares = shares_of(program.signature, 3, optim.slots_by_options(program.options["optimizer"]))
    entries = {entry.name: entry for entry in program.signature.state}
    sizes = [sum(entries[name].bytes for name in shares.of(rank)) for rank in range(3)]
    largest = max(sum(entries[slot].bytes for slot in shares.slots if shares.slots[slot] == name) for name in shares.owners)
    assert max(sizes) - min(sizes) <= largest
    assert sum(sizes) == sum(2 * 4 * math.prod(array.shape) for name, array in program.weights.items() if name in shares.owners)

    def held(communicator):
        parallel = burnish.DataParallel(communicator=communicator, shard_optimizer=True)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            return set(session._runner.own_state())

    for rank, names in enumerate(in_threads(3, held)):
        assert names == set(entries) - (set(shares.slots) - shares.of(rank))


def test_a_worker_that_keeps_all_of_it_asks_nobody_before_the_first_step(batches):
    program = burnish.compile(perceptron(), optimizer="adam:lr=0.01", trainable=["second.bias"])

    def states(communicator):
        parallel = burnish.DataParallel(communicator=communicator, shard_optimizer=True)
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            begun = session.state()
            session.step(part_of(batches[0], communicator.rank, [5, 7]))
            return begun, session.state()

    (first, first_stepped), (second, second_stepped) = in_threads(2, states)
    assert_same_state(second, first)
    assert_same_state(second_stepped, first_stepped)


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_worker_and_goes_on_with_any_number(program, batches, tmp_path):
    def begun(communicator):
        parallel = burnish.DataParallel(communicator=communicator, shard_optimizer=True)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            for batch in batches[:2]:
                session.step(part_of(batch, communicator.rank, [4, 4, 4]))
            if communicator.rank == 1:
                session.save_checkpoint(tmp_path / "begun.safetensors")
            else:
                session.take_part()

    def gone_on(communicator):
        parallel = burnish.DataParallel(communicator=communicator, shard_optimizer=True)
        with burnish.Session(program, engine="torch", parallel=parallel) as session:
            session.restore(tmp_path / "begun.safetensors")
            restored = session.state()
            for batch in batches[2:]:
                session.step(part_of(batch, communicator.rank, [7, 5]))
            return restored, session.state()

    in_threads(3, begun)
    with burnish.Session(program, engine="torch") as session:
        session.restore(tmp_path / "begun.safetensors")
        alone = session.state()
        for batch in batches[2:]:
            session.step(batch)
        final = session.state()
    for restored, state in in_threads(2, gone_on):
        assert_same_state(restored, alone)
        for name, array in state.items():
            np.testing.assert_allclose(array, final[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_closed_session_says_that_others_had_a_part(program, tmp_path):
    def closed(communicator):
        parallel = burnish.DataParallel(communicator=communicator, shard_optimizer=True)
        session = burnish.Session(program, engine="torch", parallel=parallel)
        session.close()
        assert session.step_count == 0
        for call in (session.state, lambda: session.save_checkpoint(tmp_path / "late.safetensors")):
            with pytest.raises(EngineError, match=r"other workers hold a part of its state \(shard_optimizer=True, gr"):
                call()

    in_threads(2, closed)


@pytest.mark.slow
def test_one_worker_has_everything(program, batches):
    whole = train_in_threads(program, batches, [[SAMPLES]] * STEPS)
    outcome = train_in_threads(program, batches, [[SAMPLES]] * STEPS, shard_optimizer=True)
    assert_same_state(outcome[0][1][-1], whole[0][1][-1])


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_compressed_gradients(program, batches, compression, bound):
    """As without shares, but for the rounding of the sums, which are not rounded here."""
    options = {"compression": compression, "bucket_size": 1000}
    momentum = program.with_optimizer(optim.sgd(lr=0.05, momentum=0.9))
    whole = train_in_threads(momentum, batches, PARTS[3], **options)
    outcomes = train_in_threads(momentum, batches, PARTS[3], shard_optimizer=True, **options)
    for outcome in outcomes:
        assert largest_difference(outcome, whole[0]) < bound
        assert_same_state(outcome[1][-1], outcomes[0][1][-1])


class Counting:
    """A communicator that counts the bytes that leave its worker: of sums as they go along a ring, of the rest as they are."""

    def __init__(self, communicator):
        self.rank, self.size = communicator.rank, communicator.size
        self.sent = Counter()
        self._communicator = communicator

    def all_reduce(self, buffer, *, group=0, channel=""):
        self.sent["summed", channel] += 2 * (self.size - 1) * buffer.nbytes / self.size
        return self._communicator.all_reduce(buffer, group=group, channel=channel)

    def all_gather(self, buffer, *, group=0):
        self.sent["gathered", ""] += (self.size - 1) * buffer.nbytes
        return self._communicator.all_gather(buffer, group=group)

    def all_to_all(self, buffer, *, sizes=None, group=0, channel=""):
        assert sizes is not None
        self.sent["given", channel] += (sum(sizes) - sizes[self.rank]) * buffer.itemsize
        return self._communicator.all_to_all(buffer, sizes=sizes, group=group, channel=channel)

    def reduce_scatter(self, buffer, sizes, *, channel=""):
        return scattered(self, buffer, sizes, channel=channel)

    def shared_buffer(self, dtype, count, *, group=0, channel=""):
        return None

    def shared_rows(self, count, *, channel=""):
        return None


def sent(program, batches, workers, **options):
    """The bytes that leave all workers in one step, by kind and channel."""

    def counted(communicator):
        counting = Counting(communicator)
        parallel = burnish.DataParallel(communicator=counting, **options)
        with burnish.Session(program, engine="torch", threads=1, parallel=parallel) as session:
            for step in range(2):
                if step:
                    counting.sent.clear()
                session.step(part_of(batches[0], communicator.rank, [SAMPLES // workers] * workers))
            return Counter(counting.sent)

    return sum(in_threads(workers, counted), Counter())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_half_the_bytes_of_gradients_travel(program, batches, workers):
    clipped = program.with_optimizer(OPTIMIZERS["adam, clipped"])
    owned = [[] for _ in range(workers)]
    for name, owner in shares_of(clipped.signature, workers, optim.slots_by_options(clipped.options["optimizer"])).owners.items():
        owned[owner].append(program.weights[name].nbytes)
    gradients = sum(map(sum, owned))
    whole, sharded = sent(clipped, batches, workers), sent(clipped, batches, workers, shard_optimizer=True)
    assert whole["summed", GRADIENTS] == pytest.approx(2 * (workers - 1) * gradients)
    assert sharded["given", GRADIENTS] == (workers - 1) * gradients
    assert sharded["summed", GRADIENTS] == 0
    # Before the update each worker gives a sum of squares for each of its gradients, behind it its parameters.
    figures = max(len(sizes) * ALIGNMENT for sizes in owned)
    parameters = max(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) for sizes in owned)
    assert sharded["gathered", ""] - whole["gathered", ""] == workers * (workers - 1) * (figures + parameters)
    assert sharded["summed", "statistics"] == whole["summed", "statistics"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "figures"),
    [
        (optim.accumulate(optim.adam(lr=0.01), 3), 0),
        (optim.ema(optim.accumulate(optim.sgd(lr=0.05, momentum=0.9), 3), 0.9), 0),
        (optim.accumulate(optim.chain(optim.clip_by_global_norm(0.5), optim.adam(lr=0.01)), 3), 1),
        (optim.chain(optim.clip_by_value(0.5), optim.accumulate(optim.adam(lr=0.01), 3)), 0),
    ],
    ids=["accumulated", "averaged", "clipped by the norm of the mean", "clipped before it is added"],
)
def test_between_updates_no_parameters_travel(program, batches, optimizer, figures):
    """Nor do the figures that an update alone is computed of."""
    changed, workers = program.with_optimizer(optimizer), 3
    slots = optim.slots_by_options(changed.options["optimizer"])
    graphs = changed.graphs.lowered_to(TARGETS["onnxruntime"])
    parts = accumulated_entries(graphs) if accumulates(graphs) else ()
    owned = [[] for _ in range(workers)]
    for name, owner in shares_of(changed.signature, workers, slots, parts).owners.items():
        owned[owner].append(program.weights[name].nbytes)
    parameters = max(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) for sizes in owned)
    squares = figures * max(len(sizes) * ALIGNMENT for sizes in owned)

    def gathered(communicator, **options):
        counting = Counting(communicator)
        with burnish.Session(
            changed, engine="torch", threads=1, parallel=burnish.DataParallel(communicator=counting, **options)
        ) as session:
            found = []
            for batch in [*batches, *batches[:2]]:
                counting.sent.clear()
                session.step(part_of(batch, communicator.rank, [4, 4, 4]))
                found.append(counting.sent["gathered", ""])
            return found

    whole = in_threads(workers, gathered)
    for found, without in zip(in_threads(workers, lambda c: gathered(c, shard_optimizer=True)), whole, strict=True):
        beside = [mine - theirs for mine, theirs in zip(found, without, strict=True)]
        assert beside == [0, 0, (workers - 1) * (parameters + squares)] * 2


def test_an_option_that_is_none():
    with pytest.raises(ConfigurationError, match="shard_optimizer must be True or False, not 1"):
        burnish.DataParallel(shard_optimizer=1)

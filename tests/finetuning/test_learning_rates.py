"""The learning rate that fine-tuning finds: noise, divergence, a flat loss, few batches, cached features, and the same again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

import burnish
from burnish.data import ArrayDataset
from burnish.errors import NonFiniteLossError
from burnish.finetuning import rates
from burnish.finetuning.rates import feature_batches, find_rate, repeated
from burnish.finetuning.rates import tests_of as range_tests_of
from oracles.small_networks import CLASSES, Network


def told(losses: Callable[[float, float], float], seed: int = 0) -> type:
    """A session whose loss is told from the rate alone, and a draw."""

    class Told:
        taken: ClassVar[list[float]] = []

        def __init__(self, program: object):
            self.rng = np.random.default_rng(seed)

        def __enter__(self) -> Told:
            return self

        def __exit__(self, *_: object) -> None: ...

        def state(self) -> dict[str, np.ndarray]:
            return {}

        def load_state(self, state: object) -> None: ...

        def step(self, batch: object, lr: float) -> dict[str, float]:
            self.taken.append(lr)
            loss = losses(lr, self.rng.normal())
            if not math.isfinite(loss):
                raise NonFiniteLossError("NaN")
            return {"loss": loss}

    return Told


def valley(lowest: float, edge: float, noise: float = 0.0) -> Callable[[float, float], float]:
    """A loss of 1.6 that falls towards a rate and grows beyond another, as that of a range test does."""
    return lambda rate, draw: 1.6 - 0.8 / (1 + (lowest / rate) ** 2) + 1.6 * (rate / edge) ** 4 + noise * draw


@pytest.mark.parametrize("edge", [3e-3, 3e-2, 0.3])
def test_the_rate_lies_below_that_from_which_on_the_loss_grows(monkeypatch, edge):
    monkeypatch.setattr(rates, "Session", told(valley(edge / 10, edge)))
    lr, said = find_rate(None, itertools.repeat({}), tests=2)
    assert edge / 6 < lr < edge / 2
    assert f"lr: {lr:g}; in 2 range tests" in said
    assert "a third of the geometric mean" in said
    assert ("and, counted twice, a tenth of where it diverged" in said) == (edge < 0.3)  # where both say the same, one is enough


def test_a_loss_that_never_comes_back_is_taken_to_be_back_at_eight_times_the_rate(monkeypatch):
    monkeypatch.setattr(rates, "Session", told(lambda rate, draw: 0.6 + 0.01 * draw + abs(np.log10(rate) + 2) / 3))
    lr, said = find_rate(None, itertools.repeat({}))
    assert lr == pytest.approx(0.01 * math.sqrt(8) / 3, rel=0.7)
    assert "diverged" not in said


def test_what_does_not_diverge_lowers_no_rate(monkeypatch):
    """The last rate that was tried is a lower bound of that at which the loss would diverge."""
    monkeypatch.setattr(rates, "Session", told(valley(3e-3, 3e-2)))
    lr, said = find_rate(None, itertools.repeat({}), highest=0.01)
    assert 0.01 / rates.RATIO / 3 < lr < 0.01 / 3
    assert "diverged" not in said


def test_several_tests_vary_less_than_one(monkeypatch):
    logarithms: dict[int, list[float]] = {1: [], 4: []}
    for tests, seed in itertools.product(logarithms, range(16)):
        monkeypatch.setattr(rates, "Session", told(valley(3e-3, 3e-2, noise=0.2), seed))
        logarithms[tests].append(np.log2(find_rate(None, itertools.repeat({}), tests=tests)[0]))
    assert np.std(logarithms[4]) < 0.7 * np.std(logarithms[1])
    assert max(logarithms[4]) - min(logarithms[4]) < 2  # a factor of two to either side
    assert 3e-3 < 2 ** np.mean(logarithms[4]) < 3e-2


@pytest.mark.parametrize("lucky", [8, 10])
def test_a_lucky_batch_at_a_low_rate_moves_the_rate_little(monkeypatch, lucky):
    """Its loss is the least of its test, at a rate far below the others'; the rate at which the test diverges stays."""

    def rate_with(fall: float) -> float:
        steps, losses = itertools.count(), valley(3e-3, 3e-2)
        monkeypatch.setattr(rates, "Session", told(lambda rate, draw: losses(rate, draw) - fall * (next(steps) == lucky)))
        return find_rate(None, itertools.repeat({}), tests=2)[0]

    assert rate_with(0.0) / 1.6 < rate_with(1.2) < rate_with(0.0)


def test_two_noisy_tests_tell_the_rate_within_a_fifth(monkeypatch):
    logarithms = []
    for seed in range(16):
        monkeypatch.setattr(rates, "Session", told(valley(3e-3, 3e-2, noise=0.2), seed))
        logarithms.append(np.log(find_rate(None, itertools.repeat({}), tests=2)[0]))
    assert np.std(logarithms) < 0.1
    assert np.ptp(logarithms) < 2 * np.log(1.2)


def test_without_a_clear_fall_a_single_test_that_diverges_tells_the_rate(monkeypatch):
    """The other test does no harm at any rate; it does not say that 0.001 is right."""
    taken: list[float] = []

    def losses(rate: float, draw: float) -> float:
        taken.append(rate)
        is_first = sorted(taken) == taken
        return math.inf if is_first and rate > 0.02 else 1.6 + 0.005 * draw

    monkeypatch.setattr(rates, "Session", told(losses))
    lr, said = find_rate(None, itertools.repeat({}), tests=2)
    assert max(taken) == pytest.approx(1.0)
    assert 0.02 / 10 / rates.RATIO < lr <= 0.02 / 10
    assert "a tenth of the rate at which trial steps diverged" in said


def test_the_tests_end_where_the_loss_diverges(monkeypatch):
    session = told(lambda rate, draw: math.inf if rate > 0.05 else valley(1e-3, 0.1)(rate, draw))
    monkeypatch.setattr(rates, "Session", session)
    lr, _ = find_rate(None, itertools.repeat({}), tests=3)
    assert lr < 0.05
    assert len([rate for rate in session.taken if rate > 0.05]) == 3
    assert max(session.taken) < 0.1


def test_what_comes_after_divergence_tells_nothing(monkeypatch):
    """A detector that has broken finds nothing to assign, and its loss is 0."""
    whole = valley(3e-3, 3e-2)
    monkeypatch.setattr(rates, "Session", told(lambda rate, draw: 0.0 if rate > 0.1 else whole(rate, draw)))
    lr, said = find_rate(None, itertools.repeat({}))
    monkeypatch.setattr(rates, "Session", told(whole))
    assert (lr, said) == find_rate(None, itertools.repeat({}))


def test_rates_far_below_the_usual_ones_are_found(monkeypatch):
    monkeypatch.setattr(rates, "Session", told(valley(1e-8, 1e-7)))
    lr, said = find_rate(None, itertools.repeat({}))
    assert 1e-8 < lr < 1e-7
    assert "range tests" in said


@pytest.mark.parametrize(
    ("losses", "rate", "why"),
    [
        (lambda rate, draw: 1.6 + 0.2 * draw, 0.001, "the usual one of SGD with momentum"),
        (lambda rate, draw: 1.6, 0.001, "the usual one of SGD with momentum"),
        (lambda rate, draw: 0.0, 0.001, "the usual one of SGD with momentum"),
        (lambda rate, draw: 1.6 + 0.05 * draw + 1e2 * rate, 3e-3, "a tenth of the rate at which trial steps diverged"),
        (lambda rate, draw: 1.6 + 0.05 * draw + 1e5 * rate, 3e-6, "a tenth of the rate at which trial steps diverged"),
        (lambda rate, draw: math.inf, 1e-12, "a tenth of the rate at which trial steps diverged"),
    ],
    ids=["noise", "constant", "zero", "divergence", "divergence at once", "not finite from the start"],
)
def test_without_a_clear_fall_divergence_tells_the_rate_or_the_usual_one_is_taken(monkeypatch, losses, rate, why):
    monkeypatch.setattr(rates, "Session", told(losses))
    lr, said = find_rate(None, itertools.repeat({}), tests=4)
    assert lr == pytest.approx(rate, rel=0.7)
    assert why in said


@pytest.mark.parametrize("count", [0, 1, 3, 15])
def test_few_batches_are_enough(monkeypatch, count):
    """Where they end, the tests do; what was seen by then counts."""
    session = told(valley(1e-4, 3e-2))
    monkeypatch.setattr(rates, "Session", session)
    lr, said = find_rate(None, [{}] * count, tests=4)
    assert len(session.taken) == count
    if count < 15:
        assert lr == pytest.approx(0.001)
    else:
        assert 1e-4 < lr < 3e-2
        assert "in 1 range test, 15 steps" in said


def test_longer_runs_take_more_tests():
    assert [range_tests_of(steps) for steps in (5, 95, 100, 1000)] == [2, 2, 3, 4]


@pytest.fixture(scope="module")
def blobs() -> tuple[burnish.Program, burnish.Program, burnish.Program, ArrayDataset]:
    """A network, its head alone on features that are computed once, the same without, and 50 samples of its classes."""
    network = Network("blobs", [6])
    hidden = network.builder.op("Tanh", network.dense("hidden", network.input, 6, 8))
    model = network.model(network.dense("head", hidden, 8, CLASSES))
    rng = np.random.default_rng(0)
    labels = np.arange(50) % CLASSES
    x = rng.normal(0, 0.5, (50, 6)).astype(np.float32)
    x[np.arange(50), labels] += 2
    whole, cached, plain = (
        burnish.compile(model, optimizer="sgd:momentum=0.9", **options)
        for options in ({}, {"trainable": ["head*"], "cached_features": "auto"}, {"trainable": ["head*"]})
    )
    return whole, cached, plain, ArrayDataset({"x": x, "labels": labels})


@pytest.mark.slow
def test_the_same_seed_finds_the_same_rate_and_leaves_the_program_as_it_was(blobs):
    whole, _, _, dataset = blobs
    before = {name: array.copy() for name, array in whole.initial_state().items()}
    first, again, other = (find_rate(whole, repeated(dataset, 8, seed), threads=1) for seed in (3, 3, 4))
    assert first == again
    assert first[1] != other[1]
    after = whole.initial_state()
    assert all(np.array_equal(array, after[name]) for name, array in before.items())


def test_the_rate_that_is_found_trains(blobs):
    whole, _, _, dataset = blobs
    lr, said = find_rate(whole, repeated(dataset, 8, 0), threads=1)
    assert "range tests" in said
    with burnish.Session(whole, threads=1) as session:
        before = session.evaluate(dataset.batch(np.arange(50)))
        for step, batch in zip(range(30), repeated(dataset, 8, 1), strict=False):
            session.step(batch, lr=lr * (1 - step / 30))
        after = session.evaluate(dataset.batch(np.arange(50)))
    assert after["loss"] < 0.5 * before["loss"]


def test_cached_features_find_the_same_rate(blobs):
    """What is computed once are the same batches, so that the same steps find what those of the whole model do."""
    _, cached, plain, dataset = blobs
    batches = list(itertools.islice(repeated(dataset, 8, 0), 6))
    features = feature_batches(cached, iter(batches), 6, seed=5, threads=1)
    rng = np.random.default_rng(5)
    same = (batches[number] for _ in itertools.count() for number in rng.permutation(6))
    assert find_rate(cached, features, threads=1) == find_rate(plain, same, threads=1)


def test_no_batch_is_shorter_than_the_others(blobs):
    """One sample alone would make a batch normalization's statistics meaningless."""
    batches = itertools.islice(repeated(blobs[3], 8, 0), 20)
    assert {len(batch["labels"]) for batch in batches} == {8}
    assert {len(batch["labels"]) for batch in itertools.islice(repeated(blobs[3], 64, 0), 3)} == {50}

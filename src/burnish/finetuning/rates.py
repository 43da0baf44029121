"""The learning rate of a model on its data, found by range tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.data import Dataset, DataSpec, Loader
from burnish.errors import NonFiniteLossError
from burnish.program import Program
from burnish.training.session import Session

LOWEST_RATE, HIGHEST_RATE = 1e-5, 1.0
STEPS = 20
"""Steps of a range test, over the five decades between these rates."""
RATIO = (HIGHEST_RATE / LOWEST_RATE) ** (1 / (STEPS - 1))
FEWEST_TESTS, MOST_TESTS, STEPS_A_TEST = 2, 4, 100
"""Fewest and most range tests; steps of a run for each further one."""
SMOOTHING = 0.3
DIVERGED = 0.5
"""Relative growth of the loss over its start at which a test ends; later losses tell nothing, such as the 0 of a dead network."""
HARMLESS = 4
"""First steps of a test, which hardly change a model; their losses give the initial loss and the spread over batches."""
BELOW_THE_LEAST = 6
"""Steps by which further tests begin below the rate of the least loss in the first."""
LOWER, TIMES_LOWER = 1e-3, 2
"""A test that diverges at once is repeated at rates a thousandth as high, at most twice."""
BACK_AT_MOST = 8.0
"""Highest factor over the rate at the least loss at which the loss counts as back at its start; the last rate tried is another
limit. Rates that did no harm count no further either."""
BELOW_THE_EDGE = 3
"""Divisor of the edge rate. 2 is as good on average over models, but far worse if a long run is unstable at lower rates."""
UNKNOWN_RATE = 0.001
"""Rate of SGD with momentum 0.9 if nothing is known, from PyTorch's tutorial on transfer learning."""
HIGHEST_OF_ADAMW, BELOW_THE_LEAST_OF_ADAMW, BELOW_DIVERGENCE_OF_ADAMW = 0.1, 10, 100
"""For AdamW, whose steps are about as long as its rate: the highest rate tried, and the divisors of the rate at the least loss
and of the diverging rate."""
USUAL_OF_ADAMW, USUAL_OF_ADAPTERS = 5e-5, 2e-4
"""Rates of AdamW if nothing is known: the defaults of Hugging Face's Trainer and of PEFT's examples."""
BELOW_DIVERGENCE = 10
WEIGHT_OF_DIVERGENCE = 2 / 3
"""Weight of a tenth of the diverging rate against a third of the valley's rate: it varies half as much between tests."""
FAR_BELOW_DIVERGENCE, FAR_BELOW_THE_LAST = 30, 300
"""If the least loss is this many times below the diverging rate, or below the last rate of tests that never diverge, it comes
from easy batches."""
LEAST_FALL, DEVIATIONS = 0.02, 2.0
"""A fall is clear if it exceeds this share of the loss and this many standard deviations of batch losses."""
TRIAL_STEPS, MOST_TRIALS, MOST_IDLE = 100, 8, 4
"""Steps of a trial at one rate, if range tests tell nothing; most rates tried; most rates tried without effect."""
TRIAL_RATIO = 10**0.5
"""Ratio of a rate to the next lower one."""
TRIAL_RISE, TRIAL_END = 0.1, 0.25
"""Share of a trial in which the rate rises, and share whose losses are averaged at the end."""
TRIAL_FALL = 0.05
"""Share of the initial loss by which the loss of a trial must fall."""
AS_GOOD = 0.9
"""Share of the largest fall at which another rate is as good."""
TRIAL_BYTES = 1 << 28
"""Bytes of batches kept so that all trials take the same ones."""


@dataclass(frozen=True)
class RangeTest:
    """Steps from the initial state at rates that rise by ``RATIO``.

    Attributes:
        lowest: the first rate.
        losses: loss of each step.
        smoothed: the losses, smoothed.
        has_diverged: True if the loss grew to one and a half times its start, or became non-finite.
    """

    lowest: float
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    has_diverged: bool

    @property
    def start(self) -> tuple[float, ...]:
        """The losses of the first steps."""
        return self.losses[:HARMLESS]

    @property
    def initial(self) -> float:
        """The mean loss of the first steps."""
        return float(np.mean(self.start))

    @property
    def least(self) -> int:
        """The step with the least smoothed loss."""
        return int(np.argmin(self.smoothed)) if self.smoothed else 0

    @property
    def back(self) -> float:
        """The lowest rate above that of the least loss at which the loss is back at its start, or the last rate tried."""
        steps = (step for step in range(self.least, len(self.smoothed)) if self.smoothed[step] > self.initial)
        step = next(steps, len(self.losses) - 1)
        return min(self.rate(step), BACK_AT_MOST * self.rate(self.least))

    @property
    def last(self) -> float:
        return self.rate(len(self.losses) - 1)

    @property
    def below_the_edge(self) -> float:
        """A rate below the edge of instability, which is between the rate of the least loss and ``back``."""
        return math.sqrt(self.rate(self.least) * self.back) / BELOW_THE_EDGE

    @property
    def below_divergence(self) -> float:
        """A tenth of the rate at which the loss diverged.

        If it did not diverge, the last rate is a lower bound, which raises ``below_the_edge`` or leaves it.
        """
        if self.has_diverged:
            return self.last / BELOW_DIVERGENCE
        return max(self.below_the_edge, min(self.last, BACK_AT_MOST * self.rate(self.least)) / BELOW_DIVERGENCE)

    @property
    def is_too_high(self) -> bool:
        """True if the loss grew before it could fall."""
        return self.has_diverged and self.least < HARMLESS and len(self.losses) < 2 * HARMLESS

    def rate(self, step: int) -> float:
        return self.lowest * RATIO**step

    @classmethod
    def take(cls, session: Session, batches: Iterator[Mapping[str, Any]], lowest: float, highest: float) -> RangeTest:
        """Take the steps from the session's present state; they end early if the batches do."""
        losses: list[float] = []
        smoothed: list[float] = []
        has_diverged = False
        while not has_diverged and (rate := lowest * RATIO ** len(losses)) <= highest * (1 + 1e-9):
            batch = next(batches, None)
            if batch is None:
                break
            try:
                loss = session.step(batch, lr=rate)["loss"]
            except NonFiniteLossError:
                has_diverged = True
                break
            losses.append(loss)
            smoothed.append(SMOOTHING * smoothed[-1] + (1 - SMOOTHING) * loss if smoothed else loss)
            initial = float(np.mean(losses[:HARMLESS]))
            has_diverged = smoothed[-1] > initial + DIVERGED * abs(initial)
        return cls(lowest, tuple(losses), tuple(smoothed), has_diverged)


@dataclass(frozen=True)
class RateTrial:
    """Steps from the initial state at one rate.

    Attributes:
        rate: rate after the rise.
        losses: loss of each step.
        has_diverged: True if the loss grew to one and a half times its start, or became non-finite.
    """

    rate: float
    losses: tuple[float, ...]
    has_diverged: bool

    @property
    def final(self) -> float:
        """The mean loss of the last steps; infinite if it diverged."""
        return (
            math.inf if self.has_diverged else float(np.mean(self.losses[-max(HARMLESS, round(TRIAL_END * len(self.losses))) :]))
        )

    @classmethod
    def take(cls, session: Session, batches: Sequence[Mapping[str, Any]], rate: float, steps: int, falls: bool) -> RateTrial:
        """Take the steps from the session's present state.

        Args:
            session: session that takes ``lr`` with each step.
            batches: batches, used in turn.
            rate: rate after a short rise.
            steps: number of steps.
            falls: True to let the rate fall like a cosine after the rise, as in a whole run.
        """
        losses: list[float] = []
        smoothed, rise = 0.0, max(1, round(TRIAL_RISE * steps))
        for step in range(steps):
            part = (step + 1) / rise if step < rise else 1.0
            if falls and step >= rise:
                part = (1 + math.cos(math.pi * (step - rise) / (steps - rise))) / 2
            try:
                loss = session.step(batches[step % len(batches)], lr=rate * part)["loss"]
            except NonFiniteLossError:
                return cls(rate, tuple(losses), True)
            losses.append(loss)
            smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * loss if step else loss
            initial = float(np.mean(losses[:HARMLESS]))
            if smoothed > initial + DIVERGED * abs(initial):
                return cls(rate, tuple(losses), True)
        return cls(rate, tuple(losses), False)


def find_rate(
    program: Program,
    batches: Iterable[Mapping[str, Any]],
    tests: int = FEWEST_TESTS,
    highest: float = HIGHEST_RATE,
    usual_of_adamw: float | None = None,
    *,
    steps: int = TRIAL_STEPS,
    is_trained: bool = True,
    is_constant: bool = False,
    **options: Any,
) -> tuple[float, str]:
    """Return a learning rate for a program, and a line with the reason.

    A range test takes steps on the batches at rates that rise from 1e-5 to 1, and ends when the loss diverges. Between the rate
    at the least loss and the rate at which the loss is back at its start, training turns from fast to unstable; a third of their
    geometric mean is one estimate. It is noisy, as each batch has its own loss: a lucky batch puts the least loss at a rate many
    times lower. A tenth of the diverging rate is a less noisy estimate, and counts twice in the geometric mean of both. Without
    divergence, the second estimate equals the first, or is higher if higher rates did no harm. Several tests are taken, each from
    the initial state on the batches that follow; the result is their geometric mean.

    If the loss falls by no more than batch losses vary (as on a few dozen samples), or only at rates far below the harmless ones,
    the rate is a tenth of the diverging one, or 0.001 if no test diverged.

    For AdamW the rate is a tenth of the rate at the least loss, the lowest of all tests; if the loss does not fall clearly, a
    hundredth of the diverging rate, or a usual one. ``docs/language-models.md`` lists the experiments.

    All this suits pretrained weights. With random ones the loss may stay flat for longer than a range test before it falls. Then
    up to 100 steps are taken at each of several rates, from the highest down by half decades, from the initial state on the same
    batches; the rate with the least final loss is taken. The same is done if range tests tell nothing.

    Source of the test: Smith, "Cyclical learning rates for training neural networks", 2017. Averaging several tests and the
    weights of both estimates were fitted on small networks (``benchmarks/results/finetuning.md`` lists them).

    Args:
        program: program that takes ``lr`` with each step.
        batches: batches for ``Session.step``; up to 20 for each test, and few more.
        tests: number of tests.
        highest: highest rate tried; on a few samples, soon memorized, no loss may show that a rate is too high.
        usual_of_adamw: rate of an AdamW program if nothing is known; None for SGD.
        steps: steps of the run; no trial at one rate is longer.
        is_trained: True for pretrained weights. Otherwise rates are tried one by one at once, not only if range tests tell
            nothing.
        is_constant: True if the rate stays the same during the run.
        options: options of ``Session``.
    """
    supply = iter(batches)
    done: list[RangeTest] = []
    tests = tests if is_trained else 1
    with Session(program, **options) as session:
        initial = session.state()
        lowest, is_lowered = LOWEST_RATE, 0
        while len(done) < tests:
            test = RangeTest.take(session, supply, lowest, highest)
            session.load_state(initial)
            if not done and test.is_too_high and is_lowered < TIMES_LOWER:
                lowest, is_lowered = lowest * LOWER, is_lowered + 1
                continue
            if not test.losses and done:
                break  # no batch is left
            done.append(test)
            lowest = max(lowest, done[0].rate(done[0].least - BELOW_THE_LEAST))
        found = _judged(done) if usual_of_adamw is None else _judged_of_adamw(done, usual_of_adamw)
        if not is_trained or (usual_of_adamw is None and _tells_nothing(done)):
            top = min([highest, *(test.last for test in done if test.has_diverged)])
            if usual_of_adamw is not None:
                top /= BELOW_THE_LEAST_OF_ADAMW
            length = min(TRIAL_STEPS, steps)
            kept = _kept(supply, length)
            trials = _trials(session, initial, kept, top, length, length == steps and not is_constant) if kept else []
            return _best_of(trials, is_trained or usual_of_adamw is not None) or found
    return found


def _judged_of_adamw(tests: list[RangeTest], usual: float) -> tuple[float, str]:
    diverged = [test.last for test in tests if test.has_diverged]
    if tests and _have_fallen(tests):
        least = min(test.rate(test.least) for test in tests)
        many = f"{len(tests)} range test{'s' * (len(tests) != 1)}, {sum(len(test.losses) for test in tests)} steps"
        lr = _rounded(least / BELOW_THE_LEAST_OF_ADAMW)
        return lr, f"lr: {lr:g} of AdamW; in {many}, the loss was least from {least:.2g} on: a tenth of that"
    if diverged:
        lr = _rounded(_mean(diverged) / BELOW_DIVERGENCE_OF_ADAMW)
        return (
            lr,
            f"lr: {lr:g} of AdamW, a hundredth of the rate at which trial steps diverged, as their loss fell clearly at none",
        )
    why = "as there was no batch to try" if not tests else "as the loss of trial steps fell clearly at no rate"
    return usual, f"lr: {usual:g}, a usual one of AdamW, {why}"


def _tells_nothing(tests: list[RangeTest]) -> bool:
    """True if the loss of no test fell clearly, and none diverged."""
    return not any(test.has_diverged for test in tests) and not _have_fallen(tests)


def _kept(batches: Iterator[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return so many batches, or fewer if they take much memory."""
    kept: list[Mapping[str, Any]] = []
    size = 0
    for batch in itertools.islice(batches, count):
        kept.append(batch)
        size += sum(np.asarray(array).nbytes for array in batch.values())
        if size > TRIAL_BYTES:
            break
    return kept


def _trials(
    session: Session, state: Mapping[str, Any], batches: list[Mapping[str, Any]], top: float, steps: int, falls: bool
) -> list[RateTrial]:
    """Try rates from the top down until the loss ends above that of a higher rate with a clear fall."""
    trials: list[RateTrial] = []
    rate = top
    while len(trials) < MOST_TRIALS:
        trials.append(RateTrial.take(session, batches, rate, steps, falls))
        session.load_state(state)
        best = min(trial.final for trial in trials)
        has_passed = trials[-1].final > best and _fall(trials) > 0
        if has_passed or (not _fall(trials) and sum(not trial.has_diverged for trial in trials) >= MOST_IDLE):
            break
        rate /= TRIAL_RATIO
    return trials


def _start(trials: list[RateTrial]) -> float:
    return float(np.mean(trials[-1].losses[:HARMLESS])) if trials[-1].losses else math.inf


def _fall(trials: list[RateTrial]) -> float:
    """The largest fall of the loss; 0 if it is not clear."""
    start = _start(trials)
    fall = start - min(trial.final for trial in trials)
    least = max(TRIAL_FALL * abs(start), DEVIATIONS * _deviation([trial.losses[:HARMLESS] for trial in trials]))
    return fall if math.isfinite(fall) and fall > least else 0.0


def _best_of(trials: list[RateTrial], is_trained: bool) -> tuple[float, str] | None:
    """The rate from trials, and a line with the reason; None if they tell nothing."""
    harmless = [trial for trial in trials if not trial.has_diverged]
    if not harmless:
        return None
    start, fall, steps = _start(trials), _fall(trials), len(harmless[0].losses)
    if not fall and is_trained:
        return None
    if not fall:
        least = min(trial.final for trial in harmless)
        lr = _rounded(max(trial.rate for trial in harmless if trial.final <= least + LEAST_FALL * abs(start)))
        return lr, (
            f"lr: {lr:g}, the highest that does no harm, as the loss fell clearly in none of {len(trials)} trials of {steps} "
            "steps at one rate each"
        )
    best = [trial.rate for trial in harmless if start - trial.final >= AS_GOOD * fall]
    lr = _rounded(_mean(best))
    ends = ", ".join(
        f"{'diverged' if trial.has_diverged else f'{trial.final:.2g}'} at {_rounded(trial.rate):g}" for trial in reversed(trials)
    )
    between = f", the geometric mean of {len(best)} that are as good" if len(best) > 1 else ""
    return lr, f"lr: {lr:g}{between}; in {steps} trial steps at one rate each the loss came from {start:.2g} to {ends}"


def _judged(tests: list[RangeTest]) -> tuple[float, str]:
    if not tests:
        return UNKNOWN_RATE, f"lr: {UNKNOWN_RATE:g}, the usual one of SGD with momentum, as there was no batch to try"
    diverged = [test.last for test in tests if test.has_diverged]
    if _have_fallen(tests):
        least = _mean([test.rate(test.least) for test in tests])
        back = _mean([test.back for test in tests])
        edge = _mean([test.below_the_edge for test in tests])
        far_below = FAR_BELOW_DIVERGENCE if len(diverged) == len(tests) else FAR_BELOW_THE_LAST
        if edge >= _mean([test.last for test in tests]) / far_below:
            below = _mean([test.below_divergence for test in tests])
            lr = _rounded(edge ** (1 - WEIGHT_OF_DIVERGENCE) * below**WEIGHT_OF_DIVERGENCE)
            many = f"{len(tests)} range test{'s' * (len(tests) != 1)}, {sum(len(test.losses) for test in tests)} steps"
            where = "where it diverged" if len(diverged) == len(tests) else "where it diverged or did no harm"
            both = f", {edge:.2g}, and, counted twice, a tenth of {where}, {below:.2g}" if lr != _rounded(edge) else ""
            return lr, (
                f"lr: {lr:g}; in {many}, the loss was least at {least:.2g} and back where it began from {back:.2g} on: a third "
                f"of the geometric mean{both}"
            )
    if diverged:
        lr = _rounded(_mean(diverged) / BELOW_DIVERGENCE)
        return lr, f"lr: {lr:g}, a tenth of the rate at which trial steps diverged, as their loss fell clearly at none near it"
    lr = UNKNOWN_RATE
    return lr, f"lr: {lr:g}, the usual one of SGD with momentum, as the loss of trial steps fell clearly at no rate near it"


def _have_fallen(tests: list[RangeTest]) -> bool:
    """True if the mean fall of the loss over the tests exceeds the spread of batch losses.

    The spread comes from differences of neighbours at the first rates, where the loss hardly falls.
    """
    start = [loss for test in tests for loss in test.start]
    if not all(test.losses for test in tests) or not start:
        return False
    initial = float(np.mean(start))
    fall = initial - float(np.mean([test.smoothed[test.least] for test in tests]))
    return fall > max(LEAST_FALL * abs(initial), DEVIATIONS * _deviation([test.start for test in tests]))


def _deviation(starts: Sequence[Sequence[float]]) -> float:
    """The standard deviation of batch losses, from differences of neighbours; infinite if there are none."""
    differences = np.concatenate([np.diff(start) for start in starts])
    return math.sqrt(float(np.mean(differences**2)) / 2) if len(differences) else math.inf


def _mean(rates: list[float]) -> float:
    return math.exp(float(np.mean(np.log(rates))))


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def tests_of(steps: int) -> int:
    """Return the number of range tests for a run of so many steps: from 2 to 4."""
    return min(FEWEST_TESTS + steps // STEPS_A_TEST, MOST_TESTS)


def repeated(dataset: Dataset, batch_size: int, seed: int, spec: DataSpec | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield full batches of a data set for ``find_rate``, epoch after epoch in another order.

    Args:
        dataset, batch_size, seed, spec: as in ``Loader``.
    """
    size = min(batch_size, len(dataset))
    loader = Loader(dataset, size, seed=seed, drop_last=True, spec=spec)
    for epoch in itertools.count():
        yield from loader.epoch(epoch)


def feature_batches(
    program: Program, batches: Iterable[Mapping[str, Any]], each: int, seed: int = 0, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """Yield batches for the steps of a program with cached features: the same few, in another order each time.

    Args:
        program: program that computes the features.
        batches: batches of the model's inputs.
        each: number of batches in an epoch.
        seed: seed of the order.
        options: options of ``Session``.
    """
    with Session(program, **options) as session:
        computed = [session.features.batch(batch) for batch in itertools.islice(batches, min(each, MOST_TESTS * STEPS))]
    rng = np.random.default_rng(seed)
    while True:
        yield from (computed[number] for number in rng.permutation(len(computed)))

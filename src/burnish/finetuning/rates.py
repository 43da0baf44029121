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
"""Of a range test, over the five decades between them."""
RATIO = (HIGHEST_RATE / LOWEST_RATE) ** (1 / (STEPS - 1))
FEWEST_TESTS, MOST_TESTS, STEPS_A_TEST = 2, 4, 100
"""Of a run's steps, one more range test for so many."""
SMOOTHING = 0.3
DIVERGED = 0.5
"""By so much of itself the loss grows beyond where it began; what comes after tells nothing, such as the 0 of a dead network."""
HARMLESS = 4
"""The first steps of a test hardly change a model; their losses tell where it begins, and how much those of batches differ."""
BELOW_THE_LEAST = 6
"""Steps by which a further test begins below the rate at which the first had its least loss."""
LOWER, TIMES_LOWER = 1e-3, 2
"""Where a test diverges at once, it is taken again at rates a thousandth as high, twice at most."""
BACK_AT_MOST = 8.0
"""Times the rate at the least loss: there the loss is taken to be back at the latest, and at the last rate that was tried.

What a test did without harm counts no further either."""
BELOW_THE_EDGE = 3
"""Half came to as much in the mean over models, and to far less where a long run is unstable at lower rates than a test."""
UNKNOWN_RATE = 0.001
"""Of SGD with momentum 0.9 where nothing is known: that of PyTorch's tutorial on transfer learning."""
HIGHEST_OF_ADAMW, BELOW_THE_LEAST_OF_ADAMW, BELOW_DIVERGENCE_OF_ADAMW = 0.1, 10, 100
"""Of AdamW, whose steps are about as long as its rate: the highest that is tried, and how far below the least loss, or where it
diverged, its rate is."""
USUAL_OF_ADAMW, USUAL_OF_ADAPTERS = 5e-5, 2e-4
"""Of AdamW where nothing is known: those that Hugging Face's Trainer and PEFT's examples begin with."""
BELOW_DIVERGENCE = 10
WEIGHT_OF_DIVERGENCE = 2 / 3
"""Of a tenth of the diverging rate beside a third of that of the valley: it differs half as much from test to test."""
FAR_BELOW_DIVERGENCE, FAR_BELOW_THE_LAST = 30, 300
"""Times lower than the diverging rate, or than the last of tests that never diverge, the least loss is that of easy batches."""
LEAST_FALL, DEVIATIONS = 0.02, 2.0
"""A fall is clear beyond so much of the loss, and beyond so many standard deviations of losses of batches."""
TRIAL_STEPS, MOST_TRIALS, MOST_IDLE = 100, 8, 4
"""Steps that are taken at one rate, where range tests do not tell; rates that are tried at most, and without any effect."""
TRIAL_RATIO = 10**0.5
"""Between a rate and the next lower one that is tried."""
TRIAL_RISE, TRIAL_END = 0.1, 0.25
"""The parts of a trial in which the rate rises, and whose losses are what it came to."""
TRIAL_FALL = 0.05
"""The loss of a trial has fallen clearly beyond so much of where it began."""
AS_GOOD = 0.9
"""Of the largest fall: a rate whose loss falls by so much is as good."""
TRIAL_BYTES = 1 << 28
"""Batches that are kept, for all trials to take the same."""


@dataclass(frozen=True)
class RangeTest:
    """Steps from the initial state at rates that rise by ``RATIO``.

    Attributes:
        lowest: the first rate.
        losses: one for each step.
        smoothed: the same, less noisy.
        has_diverged: whether the steps ended as the loss had grown to one and a half times what it began with, or was no longer
            finite.
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
        """The loss that they came to."""
        return float(np.mean(self.start))

    @property
    def least(self) -> int:
        """The step with the least smoothed loss."""
        return int(np.argmin(self.smoothed)) if self.smoothed else 0

    @property
    def back(self) -> float:
        """The lowest rate above that of the least loss at which the loss is where it began, or the last that was tried."""
        steps = (step for step in range(self.least, len(self.smoothed)) if self.smoothed[step] > self.initial)
        step = next(steps, len(self.losses) - 1)
        return min(self.rate(step), BACK_AT_MOST * self.rate(self.least))

    @property
    def last(self) -> float:
        """The last rate that was tried."""
        return self.rate(len(self.losses) - 1)

    @property
    def below_the_edge(self) -> float:
        """A rate below that at which training turns unstable, which lies between that of the least loss and ``back``."""
        return math.sqrt(self.rate(self.least) * self.back) / BELOW_THE_EDGE

    @property
    def below_divergence(self) -> float:
        """A tenth of the rate at which the loss diverged.

        Where it did not, the last rate is a lower bound of that, which raises ``below_the_edge`` or leaves it.
        """
        if self.has_diverged:
            return self.last / BELOW_DIVERGENCE
        return max(self.below_the_edge, min(self.last, BACK_AT_MOST * self.rate(self.least)) / BELOW_DIVERGENCE)

    @property
    def is_too_high(self) -> bool:
        """Whether the loss grew before it could fall."""
        return self.has_diverged and self.least < HARMLESS and len(self.losses) < 2 * HARMLESS

    def rate(self, step: int) -> float:
        """Return the rate of a step."""
        return self.lowest * RATIO**step

    @classmethod
    def take(cls, session: Session, batches: Iterator[Mapping[str, Any]], lowest: float, highest: float) -> RangeTest:
        """Take the steps, from the state that the session is in; they end where the batches do."""
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
        rate: that it rises to.
        losses: one for each step.
        has_diverged: whether the loss grew to one and a half times what it began with, or was no longer finite.
    """

    rate: float
    losses: tuple[float, ...]
    has_diverged: bool

    @property
    def final(self) -> float:
        """The loss that the last steps came to; infinite if it diverged."""
        return (
            math.inf if self.has_diverged else float(np.mean(self.losses[-max(HARMLESS, round(TRIAL_END * len(self.losses))) :]))
        )

    @classmethod
    def take(cls, session: Session, batches: Sequence[Mapping[str, Any]], rate: float, steps: int, falls: bool) -> RateTrial:
        """Take the steps, from the state that the session is in.

        Args:
            session: takes ``lr`` with each step.
            batches: taken in turn.
            rate: after a short rise.
            steps: how many.
            falls: let the rate fall as a cosine does after the rise, as that of a whole run.
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
    """Return a learning rate for a program, and a line that says why.

    A range test takes steps on the batches at rates that rise from 1e-5 to 1, and ends where the loss diverges. Between the rate
    at its least loss and that at which the loss is back where it began, training turns from fast to unstable: a third of their
    geometric mean is one estimate. It is noisy, as each batch has its own loss: a lucky batch puts the least loss at a rate many
    times lower. A tenth of the rate at which the loss diverges is another, less noisy one, and counts twice as much in the
    geometric mean of both; where the loss does not diverge, it is the first, or more where higher rates did no harm. Several
    tests are taken, each from the program's initial state on the batches that follow; the rate is the geometric mean over them.

    Where the loss falls by no more than losses of batches differ, as it may on a few dozen samples, or only at rates far below
    those that do no harm, the rate is a tenth of that at which it diverges, or 0.001 where no test did.

    Of AdamW the rate is a tenth of that at the least loss, the lowest of all tests; where the loss does not fall clearly, a
    hundredth of that at which it diverges, or a usual one. ``docs/language-models.md`` says what was tried.

    All this suits weights that were trained before. From random ones the loss may stay where it is for longer than a range test,
    and then fall. Then up to 100 steps are taken at each of some rates, from the highest down by half decades, all from the
    initial state on the same batches; the rate is the one at which the loss came to least. So it is if range tests tell nothing.

    Source of the test: Smith, "Cyclical learning rates for training neural networks", 2017. Mean of several, and how the two
    estimates are weighed: fitted on small networks (``docs/finetuning.md`` says which, and what it comes to on others).

    Args:
        program: takes ``lr`` with each step.
        batches: as ``Session.step`` takes them; up to 20 of them for each test, and few more.
        tests: how many tests are taken.
        highest: rate that is tried; on a few samples, which the steps soon know by heart, no loss may tell that it is too high.
        usual_of_adamw: the rate of a program with AdamW where nothing is known; None for one with SGD.
        steps: of the run; no trial at one rate is longer.
        is_trained: whether the weights were trained before. If not, rates are tried one by one; else only if range tests tell
            nothing.
        is_constant: whether the rate stays the same during the run.
        options: as ``Session`` takes them.
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
    """The rate that range tests say for AdamW, and a line that says why."""
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
    """Try rates from the top down until the loss comes to more than at a higher one, at which it fell clearly."""
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
    """The loss where all trials began, as those of the lowest rate tell."""
    return float(np.mean(trials[-1].losses[:HARMLESS])) if trials[-1].losses else math.inf


def _fall(trials: list[RateTrial]) -> float:
    """By how much the loss fell at best; 0 if that is not clear."""
    start = _start(trials)
    fall = start - min(trial.final for trial in trials)
    least = max(TRIAL_FALL * abs(start), DEVIATIONS * _deviation([trial.losses[:HARMLESS] for trial in trials]))
    return fall if math.isfinite(fall) and fall > least else 0.0


def _best_of(trials: list[RateTrial], is_trained: bool) -> tuple[float, str] | None:
    """The rate that trials say, and a line that says why; None if they do not tell either."""
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
    """The rate that range tests say, and a line that says why."""
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
    """Whether the loss fell by more than those of batches differ, in the mean over the tests.

    How much they differ is told from the differences of neighbours at the first rates, which a fall hardly adds to.
    """
    start = [loss for test in tests for loss in test.start]
    if not all(test.losses for test in tests) or not start:
        return False
    initial = float(np.mean(start))
    fall = initial - float(np.mean([test.smoothed[test.least] for test in tests]))
    return fall > max(LEAST_FALL * abs(initial), DEVIATIONS * _deviation([test.start for test in tests]))


def _deviation(starts: Sequence[Sequence[float]]) -> float:
    """The standard deviation of losses of batches, from the differences of neighbours; infinite where there are none."""
    differences = np.concatenate([np.diff(start) for start in starts])
    return math.sqrt(float(np.mean(differences**2)) / 2) if len(differences) else math.inf


def _mean(rates: list[float]) -> float:
    return math.exp(float(np.mean(np.log(rates))))


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def tests_of(steps: int) -> int:
    """Return how many range tests a run of so many steps is worth: from 2 to 4."""
    return min(FEWEST_TESTS + steps // STEPS_A_TEST, MOST_TESTS)


def repeated(dataset: Dataset, batch_size: int, seed: int, spec: DataSpec | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield batches of a data set, epoch after epoch in another order, for ``find_rate``; none is shorter than the others.

    Args:
        dataset, batch_size, seed, spec: as ``Loader`` takes them.
    """
    size = min(batch_size, len(dataset))
    loader = Loader(dataset, size, seed=seed, drop_last=True, spec=spec)
    for epoch in itertools.count():
        yield from loader.epoch(epoch)


def feature_batches(
    program: Program, batches: Iterable[Mapping[str, Any]], each: int, seed: int = 0, **options: Any
) -> Iterator[Mapping[str, Any]]:
    """Yield batches as the steps of a program with cached features take them: the same few, in another order each time.

    Args:
        program: whose features are computed.
        batches: of the model's inputs.
        each: how many batches an epoch has.
        seed: of the order.
        options: as ``Session`` takes them.
    """
    with Session(program, **options) as session:
        computed = [session.features.batch(batch) for batch in itertools.islice(batches, min(each, MOST_TESTS * STEPS))]
    rng = np.random.default_rng(seed)
    while True:
        yield from (computed[number] for number in rng.permutation(len(computed)))

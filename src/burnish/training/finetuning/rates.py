"""The learning rate of a model on its data, found by trial steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from burnish.data import Dataset, Loader
from burnish.errors import NonFiniteLossError
from burnish.program import Program
from burnish.training.session import Session

LOWEST_RATE, HIGHEST_RATE = 1e-5, 1.0
TRIALS, FEWEST_TRIALS = 40, 16
"""Trial steps at most; at least, where a run has few steps itself."""
SMOOTHING, DIVERGED = 0.7, 3.0
UNKNOWN_RATE = 0.001
"""Of SGD with momentum 0.9 where nothing is known: that of PyTorch's tutorial on transfer learning."""
HARMLESS_RATE = 1e-4
"""Up to this rate the first trials hardly change a model; their losses tell how much those of batches differ."""
BELOW_THE_LEAST = 4
"""A tenth came to 3 to 12 points less in five epochs of small data (``benchmarks/finetune.py``)."""
BELOW_DIVERGENCE = 100
LEAST_FALL = 0.02


def find_rate(program: Program, batches: Iterable[Mapping[str, Any]], trials: int = TRIALS, **options: Any) -> tuple[float, str]:
    """Return a learning rate for a program, a quarter of that from which on its loss no longer falls, and a line that says why.

    The loss has to fall by more than losses of batches differ, else the rate is 0.001, or a hundredth of that at which the loss
    diverged, where that is less: on little data the least loss may be that of an easy batch.

    Steps on the batches, at rates that rise from 1e-5 to 1, from the program's initial state, in a session of their own. The rate
    at the least smoothed loss is what the search ends at. Source: Smith, "Cyclical learning rates for training neural networks",
    2017.

    Args:
        program: takes ``lr`` with each step.
        batches: as ``Session.step`` takes them.
        trials: how many of them are used at most.
        options: as ``Session`` takes them.
    """
    least = smoothed = diverged = math.inf
    best, until = UNKNOWN_RATE, 0
    losses: list[float] = []
    with Session(program, **options) as session:
        for trial, batch in enumerate(batches):
            if trial == trials:
                break
            rate = _rate_at(trial, trials)
            try:
                loss = session.step(batch, lr=rate)["loss"]
            except NonFiniteLossError:
                diverged = rate
                break
            losses.append(loss)
            smoothed = loss if math.isinf(smoothed) else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
            if smoothed > DIVERGED * least:
                diverged = rate
                break
            if smoothed < least:
                least, best, until = smoothed, rate, trial
    harmless = sum(_rate_at(trial, trials) <= HARMLESS_RATE for trial in range(trials))
    first = losses[: max(min(harmless, until + 1), 1)]
    if first and least < np.mean(first) - max(LEAST_FALL * np.mean(first), np.std(first)):
        lr = _rounded(best / BELOW_THE_LEAST)
        return lr, f"lr: {lr:g}, a quarter of the rate at which trial steps had the least loss"
    lr = _rounded(min(UNKNOWN_RATE, diverged / BELOW_DIVERGENCE))
    if lr < UNKNOWN_RATE:
        return lr, f"lr: {lr:g}, a hundredth of the rate at which trial steps diverged; at none did their loss fall clearly"
    return lr, f"lr: {lr:g}, the usual one of SGD with momentum, as the loss of trial steps fell clearly at no rate"


def _rate_at(trial: int, trials: int) -> float:
    return LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (trial / (trials - 1))


def _rounded(rate: float) -> float:
    return float(f"{rate:.1g}")


def trials_of(steps: int) -> int:
    """Return how many trial steps a run of so many steps is worth: a quarter of them, from 16 to 40."""
    return min(max(steps // 4, FEWEST_TRIALS), TRIALS)


def repeated(dataset: Dataset, batch_size: int, seed: int) -> Iterable[Mapping[str, Any]]:
    """Batches of a data set, epoch after epoch, for the trials of ``find_rate``."""
    loader = Loader(dataset, min(batch_size, len(dataset)), seed=seed)
    for epoch in range(TRIALS):
        yield from loader.epoch(epoch)


def begun(program: Program, batches: Iterable[Mapping[str, Any]], each: int, **options: Any) -> Iterator[Mapping[str, Any]]:
    """Batches as the steps of a program with cached features take them; the same few come again, and are computed once.

    Args:
        program: whose features are computed.
        batches: of the model's inputs.
        each: how many batches an epoch has.
        options: as ``Session`` takes them.
    """
    with Session(program, **options) as session:
        computed = [session.features.batch(batch) for batch in itertools.islice(batches, min(each, TRIALS))]
    yield from itertools.cycle(computed)

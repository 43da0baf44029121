"""The learning rate of a model on its data, found by trial steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from burnish.data import Dataset, Loader
from burnish.errors import NonFiniteLossError
from burnish.program import Program
from burnish.training.session import Session

LOWEST_RATE, HIGHEST_RATE = 1e-5, 1.0
TRIALS, FEWEST_TRIALS = 40, 16
"""Trial steps at most; at least, where a run has few steps itself."""
SMOOTHING, DIVERGED = 0.7, 3.0
UNKNOWN_RATE = 0.001


def find_rate(program: Program, batches: Iterable[Mapping[str, Any]], trials: int = TRIALS, **options: Any) -> float:
    """Return a learning rate for a program: a tenth of that from which on its loss no longer falls.

    Steps on the batches, at rates that rise from 1e-5 to 1, from the program's initial state, in a session of their own. The rate
    at the least smoothed loss is what the search ends at. Source: Smith, "Cyclical learning rates for training neural networks",
    2017.

    Args:
        program: takes ``lr`` with each step.
        batches: as ``Session.step`` takes them.
        trials: how many of them are used at most.
        options: as ``Session`` takes them.
    """
    least = smoothed = math.inf
    best = UNKNOWN_RATE
    with Session(program, **options) as session:
        for trial, batch in enumerate(batches):
            if trial == trials:
                break
            rate = LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (trial / (trials - 1))
            try:
                loss = session.step(batch, lr=rate)["loss"]
            except NonFiniteLossError:
                break
            smoothed = loss if math.isinf(smoothed) else SMOOTHING * smoothed + (1 - SMOOTHING) * loss
            if smoothed > DIVERGED * least:
                break
            if smoothed < least:
                least, best = smoothed, rate
    return float(f"{best / 10:.1g}")


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

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

LOWEST_RATE, HIGHEST_RATE, TRIALS = 1e-5, 1.0, 40
SMOOTHING, DIVERGED = 0.7, 3.0
UNKNOWN_RATE = 0.001


def find_rate(program: Program, batches: Iterable[Mapping[str, Any]], **options: Any) -> float:
    """Return a learning rate for a program: a tenth of that from which on its loss no longer falls.

    Steps on the batches, at rates that rise from 1e-5 to 1, from the program's initial state, in a session of their own. The rate
    at the least smoothed loss is what the search ends at. Source: Smith, "Cyclical learning rates for training neural networks",
    2017.

    Args:
        program: takes ``lr`` with each step.
        batches: as ``Session.step`` takes them; at most 40 are used.
        options: as ``Session`` takes them.
    """
    least = smoothed = math.inf
    best = UNKNOWN_RATE
    with Session(program, **options) as session:
        for trial, batch in enumerate(batches):
            if trial == TRIALS:
                break
            rate = LOWEST_RATE * (HIGHEST_RATE / LOWEST_RATE) ** (trial / (TRIALS - 1))
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

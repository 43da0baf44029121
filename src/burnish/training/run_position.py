"""The position of a run in its data, which checkpoints hold, so that it goes on as if it had never stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.metrics import higher_is_better
from burnish.training.metric_totals import Means, Sums
from burnish.validation import is_whole

Batch = Mapping[str, np.ndarray]


@dataclass
class Position:
    """Where a run is; with the session's state, all that it takes to go on.

    Attributes:
        epoch: the epoch under way, from 0.
        batch: batches of it that are done.
        step, samples, seconds: done since the run first started.
        stepping, waited: seconds of these that steps took, with the waiting for their batches; and that waiting alone.
        rate: learning rate of the last step; None before the first, and where there is none.
        unheeded: how many steps the figures of the last epoch are still to be given to, so that an update reads them.
        since_row, since_epoch: averages since the last row of ``metrics.csv``, and since the epoch began; of sums, the sum.
        best: as ``TrainingResult.best``.
        best_loss: the loss of that epoch; None where there is none, or it is not known.
        metrics: as ``TrainingResult.metrics``, after the last whole epoch.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    stepping: float = 0.0
    waited: float = 0.0
    rate: float | None = None
    unheeded: int = 0
    since_row: Means = field(default_factory=Means)
    since_epoch: Means = field(default_factory=Means)
    best: dict[str, Any] | None = None
    best_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Position:
        """Return the position that ``dataclasses.asdict`` gave.

        Raises:
            KeyError, TypeError: these are not the values of a position.
        """
        means = {name: Means(**values[name]) for name in ("since_row", "since_epoch")}
        read = cls(**{**values, **means})
        counts = {name: getattr(read, name) for name in ("epoch", "batch", "step", "samples", "unheeded")}
        wrong = [name for name, count in counts.items() if not is_whole(count) or count < 0]
        wrong += [
            name
            for name in ("seconds", "stepping", "waited", "rate", "best_loss")
            if not _is_figure(getattr(read, name)) and not (name in ("rate", "best_loss") and getattr(read, name) is None)
        ]
        wrong += [name for name, mean in means.items() if not (_are_figures(mean.samples) and _are_figures(mean.sums))]
        wrong += [name for name, mean in means.items() if name not in wrong and mean.samples.keys() != mean.sums.keys()]
        wrong += [] if _are_figures(read.metrics) else ["metrics"]
        wrong += [] if read.best is None or _is_best(read.best) else ["best"]
        if wrong:
            raise TypeError(f"{wrong[0]} is {getattr(read, wrong[0])!r}")
        return read

    def add_step(self, metrics: Mapping[str, float], samples: int, sums: Sums) -> None:
        """Count a step that is done: its loss and metrics, of which ``sums`` add up, and the samples of its batch."""
        self.batch += 1
        self.step += 1
        self.samples += samples
        self.since_row.add(metrics, samples, sums)
        self.since_epoch.add(metrics, samples, sums)

    @property
    def waiting(self) -> float:
        """The share of the time of the steps that went by until their batches were there, 0 to 1."""
        return self.waited / self.stepping if self.stepping > 0 else 0.0

    def end_epoch(self) -> None:
        """Move on to the first batch of the next epoch."""
        self.epoch += 1
        self.batch = 0
        self.since_epoch = Means()

    def take_best(self, watched: str) -> bool:
        """Record the last epoch as the best where its ``watched``, the loss or a metric, is better; return whether it is.

        Of epochs with the same figure the one with the least loss is the best: a few samples to evaluate on give the same
        accuracy again and again, and a detector that finds nothing yet a precision of 0.
        """
        value, loss = self.metrics[watched], self.metrics.get("loss")
        if self.best is not None and not is_better(watched, value, self.best["value"], loss, self.best_loss):
            return False
        self.best, self.best_loss = {"epoch": self.epoch, "metric": watched, "value": value}, loss
        return True


class StepClock:
    """Measures how long a run waits for its batches. The first step of a process counts nothing: it also loads the graph."""

    def __init__(self) -> None:
        self._is_first = True

    def timed(self, batches: Iterable[Batch], position: Position) -> Iterator[Batch]:
        """Yield batches; count in ``position`` how long each is waited for, and that with the step that is taken on it."""
        begin = time.monotonic()
        for batch in batches:
            waited = time.monotonic() - begin
            yield batch
            end = time.monotonic()
            if not self._is_first:
                position.waited += waited
                position.stepping += end - begin
            self._is_first = False
            begin = end


def _is_figure(value: object) -> bool:
    """Return whether something is a number, of whatever value: a figure may be NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_figures(values: object) -> bool:
    return isinstance(values, dict) and all(_is_figure(value) for value in values.values())


def _is_best(best: object) -> bool:
    return (
        isinstance(best, dict)
        and is_whole(best.get("epoch"))
        and isinstance(best.get("metric"), str)
        and _is_figure(best.get("value"))
    )


def is_better(metric: str, value: float, than: float, loss: float | None = None, than_loss: float | None = None) -> bool:
    """Return whether an epoch is better than another.

    Args:
        metric: the figure that decides. It says whether more is better; of the loss, less is. NaN is worse than all.
        value, than: the figures.
        loss, than_loss: the losses, which decide where the figures are the same; None where one is not known.
    """
    if value == than or (math.isnan(value) and math.isnan(than)):
        if loss is None or than_loss is None:
            return False
        return loss < than_loss or (math.isnan(than_loss) and not math.isnan(loss))
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value > than if higher_is_better(metric) else value < than

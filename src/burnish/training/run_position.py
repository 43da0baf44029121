"""The position of a run in its data, stored in checkpoints so that a resumed run continues exactly."""

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
    """The position of a run; together with the session's state, all that resuming needs.

    Attributes:
        epoch: current epoch, from 0.
        batch: finished batches of it.
        step, samples, seconds: totals since the run first started.
        stepping, waited: seconds of steps including the wait for batches; seconds of that wait.
        rate: learning rate of the last step; None before the first, or without one.
        unheeded: number of further steps that get the figures of the last epoch, so that an update reads them.
        since_row, since_epoch: averages since the last row of ``metrics.csv``, and since the epoch began; sums are added.
        best: as in ``TrainingResult.best``.
        best_loss: loss of that epoch, or None.
        metrics: as in ``TrainingResult.metrics``, after the last complete epoch.
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
        """Return the position from the result of ``dataclasses.asdict``.

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
        """Count a finished step: its loss and metrics (``sums`` add up), and its samples."""
        self.batch += 1
        self.step += 1
        self.samples += samples
        self.since_row.add(metrics, samples, sums)
        self.since_epoch.add(metrics, samples, sums)

    @property
    def waiting(self) -> float:
        """The share of step time spent waiting for batches, 0 to 1."""
        return self.waited / self.stepping if self.stepping > 0 else 0.0

    def end_epoch(self) -> None:
        """Move on to the first batch of the next epoch."""
        self.epoch += 1
        self.batch = 0
        self.since_epoch = Means()

    def take_best(self, watched: str) -> bool:
        """Record the last epoch as the best if ``watched``, the loss or a metric, is better; return True if so.

        Ties go to the lower loss: with few evaluation samples the same accuracy occurs again and again, and a detector without
        hits has a precision of 0.
        """
        value, loss = self.metrics[watched], self.metrics.get("loss")
        if self.best is not None and not is_better(watched, value, self.best["value"], loss, self.best_loss):
            return False
        self.best, self.best_loss = {"epoch": self.epoch, "metric": watched, "value": value}, loss
        return True


class StepClock:
    """A clock for the wait for batches. The first step of a process does not count, as it also loads the graph."""

    def __init__(self) -> None:
        self._is_first = True

    def timed(self, batches: Iterable[Batch], position: Position) -> Iterator[Batch]:
        """Yield batches; add the wait for each, and the wait plus its step, to ``position``."""
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
    """Return True for a number; a figure may be NaN."""
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
    """Return True if an epoch is better than another.

    Args:
        metric: deciding figure, which knows if more is better; for the loss, less is. NaN is worse than any number.
        value, than: the figures.
        loss, than_loss: losses, which decide ties; None if unknown.
    """
    if value == than or (math.isnan(value) and math.isnan(than)):
        if loss is None or than_loss is None:
            return False
        return loss < than_loss or (math.isnan(than_loss) and not math.isnan(loss))
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value > than if higher_is_better(metric) else value < than

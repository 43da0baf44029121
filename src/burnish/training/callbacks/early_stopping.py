"""Stop a run that gets no better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from burnish.errors import ConfigurationError
from burnish.metrics import higher_is_better
from burnish.settings import is_whole
from burnish.training.callbacks.base import Callback, EpochReport, Run


class EarlyStopping(Callback):
    """Stops a run whose figure has not become better for some epochs. Its count is kept in checkpoints.

    Args:
        patience: after how many epochs without a better figure the run stops.
        metric: the loss, or a metric; on the evaluation data, or on the training data where there are none.
        min_delta: by how much a figure must be better to count, 0 or more.

    Raises:
        ConfigurationError: a number out of range.
    """

    def __init__(self, patience: int = 3, metric: str = "loss", min_delta: float = 0.0):
        if not is_whole(patience) or patience < 1:
            raise ConfigurationError(f"patience={patience!r}: give a whole number of epochs, 1 or more")
        if not min_delta >= 0:
            raise ConfigurationError(f"min_delta={min_delta!r}: give by how much a figure must be better, 0 or more")
        self.patience, self.metric, self.min_delta = int(patience), metric, float(min_delta)
        self._best: float | None = None
        self._waited = 0

    def on_run_begin(self, run: Run) -> None:
        self._stop_if_due(run)

    def on_epoch_end(self, run: Run, report: EpochReport) -> None:
        figures = report.evaluation or report.training
        if self.metric not in figures:
            raise ConfigurationError(
                f"metric='{self.metric}': the run reports {', '.join(repr(name) for name in figures)}; watch one of these"
            )
        value = figures[self.metric]
        if self._is_better(value):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        self._stop_if_due(run)

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._best, self._waited = state["best"], int(state["waited"])

    def _is_better(self, value: float) -> bool:
        if math.isnan(value) or self._best is None:
            return not math.isnan(value)
        gain = value - self._best if higher_is_better(self.metric) else self._best - value
        return gain > self.min_delta

    def _stop_if_due(self, run: Run) -> None:
        if self._waited >= self.patience:
            best = "is no number" if self._best is None else f"was best at {self._best:.4f}"
            epochs = "1 epoch" if self._waited == 1 else f"{self._waited} epochs"
            run.stop(f"{self.metric} {best}, and has not become better for {epochs}")

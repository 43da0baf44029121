"""Figures of several steps together, and how fast they went: what loggers write."""

from __future__ import annotations

from burnish.training.callbacks.base import StepReport
from burnish.training.totals import Means


class Speed:
    """Gathers the reports of steps, and gives averages every so many.

    Args:
        every: steps.
    """

    def __init__(self, every: int):
        self._every = every
        self._means = Means()
        self._since: StepReport | None = None
        self._pending: StepReport | None = None

    def add(self, report: StepReport) -> dict[str, float] | None:
        """Add a step; return ``train/<figure>``, ``learning_rate`` and ``speed/samples_per_second`` where it is time for them."""
        self._means.add(report.figures, report.batch_samples)
        # The first step also loads the graph: speed is measured from its end on.
        self._since, self._pending = self._since or report, report
        return None if report.step % self._every else self._averages(report)

    def rest(self) -> tuple[int, dict[str, float]] | None:
        """Return the number of the last step, and the same of the steps since the last averages; None where there are none."""
        last = self._pending
        return None if last is None else (last.step, self._averages(last))

    def _averages(self, report: StepReport) -> dict[str, float]:
        since = self._since or report
        averages = {f"train/{name}": value for name, value in self._means.values().items()}
        if report.rate is not None:
            averages["learning_rate"] = report.rate
        seconds = report.seconds - since.seconds
        if seconds > 0:
            averages["speed/samples_per_second"] = (report.samples - since.samples) / seconds
        self._means, self._since, self._pending = Means(), report, None
        return averages

"""The progress of a run for the user: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TextIO, runtime_checkable

from burnish.errors import ConfigurationError, escaped
from burnish.settings import call_hint
from burnish.training.cells import in_notebook

EPOCHS_SHOWN = 10
"""Most lines of epochs in a notebook cell."""
SECONDS_BETWEEN = 0.5
"""Seconds between two updates of a cell."""
LINE_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class Reached:
    """The progress of a run.

    Attributes:
        epoch: number of the epoch, from 1.
        epochs: number of epochs.
        step: steps done since the run first started.
        steps: steps of the whole run.
        samples: samples seen by this process.
        metrics: loss and metrics, averaged since the epoch began.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    samples: int
    metrics: Mapping[str, float]


@runtime_checkable
class Progress(Protocol):
    """The receiver of a trainer's progress."""

    def start(self, step: int, steps: int) -> None:
        """Report that the run begins, or resumes, at ``step`` of ``steps``."""
        ...

    def step(self, reached: Reached) -> None:
        """Report a finished step."""
        ...

    def epoch(self, reached: Reached, evaluation: Mapping[str, float]) -> None:
        """Report a finished epoch; ``evaluation`` is empty if there is no evaluation data."""
        ...

    def note(self, text: str) -> None:
        """Show a note to the user."""
        ...

    def close(self) -> None:
        """Report that the run is over, or stopped."""
        ...


def progress_of(progress: bool | Progress, reports: bool = True) -> Progress:
    """Return the progress display of a run: the given object, one that suits the terminal, or none.

    Args:
        progress: as in ``Trainer``.
        reports: False for a worker that leaves reports to another.

    Raises:
        ConfigurationError: the value is none of these.
    """
    if isinstance(progress, bool):
        return automatic() if progress and reports else Silent()
    if isinstance(progress, type) or not isinstance(progress, Progress):
        raise ConfigurationError(
            f"progress must be True, False or an object with the methods of burnish.training.progress.Progress, not "
            f"{progress!r}{call_hint(progress)}"
        )
    return progress if reports else Silent()


class Silent:
    def start(self, step: int, steps: int) -> None:
        pass

    def step(self, reached: Reached) -> None:
        pass

    def epoch(self, reached: Reached, evaluation: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Lines:
    """One line per epoch, and at most one per minute within it: for logs and pipes."""

    def __init__(self) -> None:
        self._speed = _Speed()
        self._last_line = time.monotonic()

    def start(self, step: int, steps: int) -> None:
        self._speed.start(step)
        self._last_line = time.monotonic()

    def step(self, reached: Reached) -> None:
        self._speed.step(reached)
        if time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
            place = f"epoch {reached.epoch}/{reached.epochs}, step {reached.step:,} of {reached.steps:,}"
            self._print(f"{place}  {figures(reached.metrics)}  {self._speed.text(reached)}")

    def epoch(self, reached: Reached, evaluation: Mapping[str, float]) -> None:
        self._print(epoch_line(reached, evaluation) + f"  {self._speed.text(reached)}")

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        try:
            print(escaped(text), flush=True)
        except BrokenPipeError:  # after | head nobody reads any more, and the run continues
            drop_output(sys.stdout)


class Bar:
    """A bar with loss, metrics, samples per second and time left; one line remains for each epoch."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self._speed = _Speed()
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            TextColumn("[dim]{task.fields[speed]}"),
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, figures="", speed="")

    def start(self, step: int, steps: int) -> None:
        self._speed.start(step)
        self._bar.start()
        self._bar.update(self._task, total=steps, completed=step)

    def step(self, reached: Reached) -> None:
        self._speed.step(reached)
        self._bar.update(
            self._task,
            completed=reached.step,
            description=f"epoch {reached.epoch}/{reached.epochs}",
            figures=escaped(figures(reached.metrics)),
            speed=self._speed.text(reached),
        )

    def epoch(self, reached: Reached, evaluation: Mapping[str, float]) -> None:
        self._bar.console.print(escaped(epoch_line(reached, evaluation)), highlight=False, markup=False, emoji=False)

    def note(self, text: str) -> None:
        self._bar.console.print(escaped(text), highlight=False, markup=False, emoji=False)

    def close(self) -> None:
        self._bar.stop()


class NotebookProgress(Lines):
    """Progress that updates in place in a notebook cell: a bar and the last epochs; notes are separate lines."""

    def __init__(self) -> None:
        super().__init__()
        self._epochs: deque[str] = deque(maxlen=EPOCHS_SHOWN)
        self._count, self._last, self._state, self._handle = 0, -math.inf, "", None

    def step(self, reached: Reached) -> None:
        self._speed.step(reached)
        share = round(24 * reached.step / max(1, reached.steps))
        bar = "█" * share + "░" * (24 - share)
        self._state = f"{bar} epoch {reached.epoch}/{reached.epochs}  {figures(reached.metrics)}  {self._speed.text(reached)}"
        if time.monotonic() - self._last >= SECONDS_BETWEEN:
            self._show()

    def epoch(self, reached: Reached, evaluation: Mapping[str, float]) -> None:
        self._count += 1
        self._epochs.append(epoch_line(reached, evaluation))
        if time.monotonic() - self._last >= SECONDS_BETWEEN:
            self._show()

    def close(self) -> None:
        self._state = ""
        if self._count:
            self._show()

    def _show(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        self._last = time.monotonic()
        left_out = self._count - len(self._epochs)
        lines = [f"... {left_out:,} epochs before"] * (left_out > 0) + [*self._epochs]
        shown = {"text/plain": "\n".join(map(escaped, [*lines, *filter(None, [self._state])]))}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


class _Speed:
    """Samples per second and time left, from the steps of this process."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._first_step = 0
        self._samples_before = 0

    def start(self, step: int) -> None:
        self._first_step = step

    def step(self, reached: Reached) -> None:
        # The first step also loads the graph, so timing begins after it.
        if self._begin is None:
            self._begin, self._first_step, self._samples_before = time.monotonic(), reached.step, reached.samples

    def text(self, reached: Reached) -> str:
        done = reached.step - self._first_step
        if self._begin is None or done < 1:
            return ""
        elapsed = max(time.monotonic() - self._begin, 1e-9)
        rate = (reached.samples - self._samples_before) / elapsed
        left = (reached.steps - reached.step) * elapsed / done
        return f"{rate:,.0f} samples/s, {duration(left)} left"


def automatic() -> Progress:
    """Return a display that updates in place in a notebook, a bar on a terminal, lines elsewhere."""
    if in_notebook():
        return NotebookProgress()
    return Bar() if sys.stdout is not None and sys.stdout.isatty() else Lines()


def drop_output(stream: TextIO) -> None:
    """Discard further writes to standard output or standard error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def epoch_line(reached: Reached, evaluation: Mapping[str, float]) -> str:
    """Return one epoch's figures on a line."""
    width = len(str(reached.epochs))
    line = f"epoch {reached.epoch:>{width}}/{reached.epochs}  train {figures(reached.metrics)}"
    return line + (f"  evaluation {figures(evaluation)}" if evaluation else "")


def figures(metrics: Mapping[str, float]) -> str:
    """Return ``loss 0.1234 accuracy 0.9870``."""
    return " ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def duration(seconds: float) -> str:
    """Return ``7 s``, ``2:05`` (minutes) or ``1:02:05`` (hours)."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

"""The results of a run: ``metrics.csv``, ``curves.png``, the trainer's result, and the stop by Ctrl-C or SIGTERM."""

from __future__ import annotations

import csv
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from burnish.errors import CheckpointError
from burnish.files.file_writing import replacing
from burnish.graph import garbage_kept
from burnish.installing import install_command
from burnish.stopping import watch_interrupts
from burnish.training.cells import cell

Row = dict[str, int | float | None]

COUNTS = frozenset({"step", "epoch", "samples"})
POSITION_COLUMNS = ("step", "epoch", "samples", "seconds", "lr")
EVALUATION_PREFIX = "eval_"
CURVES_IN_A_CELL = 2
TABLE, STAGES = "metrics.csv", "stages"
"""Names in the folder of a run: its figures, and the folder of earlier stages, by number."""


class MetricsTable:
    """The file ``metrics.csv``: rows are appended at once. Numbers are written so that they read back exactly.

    Columns: ``step`` and ``samples`` so far, ``epoch`` from 1, ``seconds`` of training, ``lr``; loss and metrics of the training
    batches since the previous row; in the last row of an epoch ``eval_...``, the same figures on the evaluation data.

    Args:
        path: the file.
        names: loss, metrics and other figures of a step.
        last_step: keep the rows of an earlier file up to this step, and drop later ones; None starts a new file.
        training_only: those of ``names`` without an evaluation figure.
        evaluation_only: figures that only evaluation has, such as the average precision of a whole data set.

    Raises:
        CheckpointError: the earlier file is not such a table, or the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        last_step: int | None = None,
        training_only: Collection[str] = (),
        evaluation_only: Sequence[str] = (),
    ):
        self.path = path
        evaluated = [*(name for name in names if name not in training_only), *evaluation_only]
        self.columns = (*POSITION_COLUMNS, *names, *(EVALUATION_PREFIX + name for name in evaluated))
        earlier = [] if last_step is None else self._read()
        self.rows: list[Row] = [row for row in earlier if last_step is not None and (row["step"] or 0) <= last_step]
        with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows(self._values(row) for row in self.rows)

    def append(self, row: Mapping[str, int | float | None]) -> None:
        """Add a row; missing columns stay empty."""
        whole: Row = {name: row.get(name) for name in self.columns}
        self.rows.append(whole)
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerow(self._values(whole))
        except OSError as error:
            raise CheckpointError(f"'{self.path}' cannot be written: {error}. Free space on the disk, then resume") from error

    def _values(self, row: Row) -> list[str]:
        return ["" if row[name] is None else repr(row[name]) for name in self.columns]

    def _read(self) -> list[Row]:
        return read_rows(self.path, self.columns) if self.path.exists() else []


def read_rows(path: Path, columns: Sequence[str] | None = None) -> list[Row]:
    """Return the rows of a ``metrics.csv``.

    Args:
        path: the file.
        columns: required columns; None accepts any.

    Raises:
        CheckpointError: the file cannot be read, or is not such a table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            read = tuple(reader.fieldnames or ())
            if read != tuple(columns or read) or read[: len(POSITION_COLUMNS)] != POSITION_COLUMNS:
                raise ValueError(f"its columns are {', '.join(read)}")
            # A crash may leave the last row incomplete; it is later than the checkpoint and is written again.
            return [
                {name: _number(name, text) for name, text in values.items()} for values in reader if None not in values.values()
            ]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"'{path}' is not the table of this run ({error}): move it away, and training resumes with a new one"
        ) from error


def _number(name: str, text: str) -> int | float | None:
    if text == "":
        return None
    return int(text) if name in COUNTS else float(text)


@garbage_kept()  # makes the import of Matplotlib a third faster
def draw_curves(rows: Sequence[Row], path: Path, names: Sequence[str]) -> str | None:
    """Draw loss and metrics over the steps, training and evaluation, as a PNG file.

    Returns:
        None, or the reason why nothing was drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return (
            f"'{path.name}' was not drawn, as matplotlib is not installed ({install_command('matplotlib')}); "
            "metrics.csv holds the same figures"
        )
    width, height = 5.0 * len(names), 3.6
    figure = Figure(figsize=(width, height))
    # Fixed margins in inches: a computed layout draws everything twice.
    figure.subplots_adjust(
        left=0.7 / width, right=1 - 0.15 / width, bottom=0.55 / height, top=1 - 0.35 / height, wspace=0.85 / (5.0 - 0.85)
    )
    axes: Any = figure.subplots(1, len(names), squeeze=False)[0]
    for panel, name in zip(axes, names, strict=True):
        for column, label in ((name, "training"), (EVALUATION_PREFIX + name, "evaluation")):
            points = [(row["step"], row[column]) for row in rows if row.get(column) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                panel.plot(steps, values, label=label, marker="." if len(points) < 40 else None)
        panel.set_xlabel("step")
        panel.set_title(name.replace("_", " "))
        panel.grid(alpha=0.3)
        panel.legend()
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    return None


@dataclass(frozen=True)
class TrainingResult:
    """The result of a run.

    Attributes:
        metrics: loss and metrics after the last epoch: on the evaluation data if there are any, otherwise averages over the
            training batches of that epoch; for a loss with ``reduction="sum"``, the sum.
        history: rows of ``metrics.csv``; with several workers, only the first has them.
        best: ``epoch`` (from 1), ``metric``, ``value`` of the best epoch; its state is in ``checkpoints/best.safetensors``.
        steps: steps since the run first started.
        seconds: seconds of training since the run first started.
        waiting: share of step time spent waiting for data, 0 to 1.
        run_directory: folder of reports and checkpoints.
        stopped: reason of a callback for an early stop, or None.
    """

    metrics: dict[str, float]
    history: list[Row]
    best: dict[str, Any] | None
    steps: int
    seconds: float
    run_directory: Path
    waiting: float = 0.0
    stopped: str | None = None

    def __repr__(self) -> str:
        """The figures and the folder in one line; ``history`` has the rows."""
        reached = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        best = "" if self.best is None else f", best epoch {self.best['epoch']}"
        stopped = "" if self.stopped is None else f", stopped: {self.stopped}"
        return f"TrainingResult({reached}{best}, {self.steps:,} steps, '{self.run_directory}'{stopped})"

    def _repr_html_(self) -> str:
        return cell("Training result", [*self.table(), ("folder", self.run_directory)], curves(self.history))

    def table(self) -> list[tuple[str, Any]]:
        """Return the figures, the best epoch, steps and time, as names and values."""
        rows = [(name.replace("_", " "), f"{value:.4g}") for name, value in self.metrics.items()]
        rows += [*best_epoch(self.best), ("steps", f"{self.steps:,}"), ("time", f"{self.seconds:,.1f} s")]
        return rows if self.stopped is None else [*rows, ("stopped", self.stopped)]


def best_epoch(best: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the table row of the best epoch, from ``TrainingResult.best``; empty if there is none."""
    if best is None:
        return []
    return [("best epoch", f"{best['epoch']} ({best['metric'].replace('_', ' ')} {best['value']:.4g})")]


def curves(rows: Sequence[Row]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the curves of the loss and the first metric, on the training and the evaluation data, for ``cell``."""
    names = [name for name in (rows[0] if rows else {}) if name not in POSITION_COLUMNS]
    drawn = [name for name in names if not name.startswith(EVALUATION_PREFIX)][:CURVES_IN_A_CELL]
    kinds = (("training", ""), ("evaluation", EVALUATION_PREFIX))
    return {
        name.replace("_", " "): {
            label: [(float(row["step"] or 0), float(value)) for row in rows if (value := row.get(prefix + name)) is not None]
            for label, prefix in kinds
        }
        for name in drawn
    }


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM stopped a run, after its state was saved.

    Attributes:
        checkpoint: file to resume from; None if the run keeps none, as in ``burnish.finetune``.
        signal: number of the signal, ``signal.SIGINT`` or ``signal.SIGTERM``.
    """

    def __init__(self, checkpoint: Path | None, epoch: int, batch: int, signal: int = signal.SIGINT):
        kept = f"Everything is saved in '{checkpoint}'; resume, and training goes on as if it had not stopped"
        if checkpoint is None:
            kept = "Nothing is saved, as burnish.finetune keeps no checkpoints; the command burnish finetune does"
        super().__init__(f"Stopped in epoch {epoch + 1} after {batch} of its batches. {kept}")
        self.checkpoint = checkpoint
        self.signal = signal


class StopNoted:
    """A context in which Ctrl-C and SIGTERM are only noted. A second one, before ``taken``, stops at once.

    Python delivers signals only to the main thread: in other threads the caller's handlers stay, and so does the program's own
    handler of SIGTERM.
    """

    stops_runs = True
    """Marks runs to stop if they do not end soon after the signal (``burnish.stopping``)."""

    def __init__(self) -> None:
        self._noted: int | None = None
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._earlier = {signal.SIGINT: signal.signal(signal.SIGINT, self)}
        handler = signal.getsignal(signal.SIGTERM)
        if handler is signal.SIG_DFL or getattr(handler, "stops_runs", False):
            self._earlier[signal.SIGTERM] = signal.signal(signal.SIGTERM, self)
        watch_interrupts()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._earlier.items():
                signal.signal(number, handler)

    @property
    def noted(self) -> int | None:
        """The signal noted since the last ``taken``, or None."""
        return self._noted

    def taken(self) -> int | None:
        """Return the signal noted since the last call, or None."""
        noted, self._noted = self._noted, None
        return noted

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        self._restore()

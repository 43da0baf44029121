"""The base class of callbacks, what they are told, and what they see of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from burnish.data.loader import Loader
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.program import Program
from burnish.training.reports import Row
from burnish.training.session import Session


class Run(Protocol):
    """What a callback sees of a run: the ``Trainer``.

    Attributes:
        program, session: what is trained, and where its state is.
        loader, eval_loader: the batches that are trained and evaluated on.
        epochs, steps: of the whole run.
        run_directory: the folder of the run.
        group: the workers of the run; of one, where it trains alone.
        rows: the rows of ``metrics.csv`` so far.
        best_epoch: ``epoch``, ``metric`` and ``value`` of the best epoch so far; None before the first is done.
        stop_reason: why a callback asked for the end of the run; None where none did.
    """

    program: Program
    session: Session
    loader: Loader
    eval_loader: Loader | None
    epochs: int
    run_directory: Path

    @property
    def steps(self) -> int: ...

    @property
    def group(self) -> ProcessGroup: ...

    @property
    def rows(self) -> list[Row]: ...

    @property
    def best_epoch(self) -> dict[str, Any] | None: ...

    @property
    def stop_reason(self) -> str | None: ...

    def stop(self, reason: str) -> None:
        """Stop after the step under way: the state is saved, and ``Trainer.run`` returns."""
        ...

    def note(self, text: str) -> None:
        """Say something to the person who watches the run."""
        ...


@dataclass(frozen=True)
class StepReport:
    """A step that is done.

    Attributes:
        epoch: number of the epoch, from 1.
        step: steps done since the run first started, this one among them.
        samples: samples seen since then.
        seconds: time spent in training since then, in seconds.
        batch: what this worker gave the step, arrays by input name; not to be changed.
        batch_samples: samples in the batch of the step, over all workers.
        figures: loss, metrics and what else the step reports.
        rate: learning rate of the step; None where there is none.
    """

    epoch: int
    step: int
    samples: int
    seconds: float
    batch: Mapping[str, Any]
    batch_samples: int
    figures: Mapping[str, float]
    rate: float | None


@dataclass(frozen=True)
class EpochReport:
    """An epoch that is done.

    Attributes:
        epoch: its number, from 1.
        step, samples, seconds: as in ``StepReport``.
        training: loss and metrics, averaged over the batches of the epoch.
        evaluation: the same on the evaluation data; empty where there are none.
        is_best: whether it is the best epoch so far.
    """

    epoch: int
    step: int
    samples: int
    seconds: float
    training: Mapping[str, float]
    evaluation: Mapping[str, float]
    is_best: bool


class Callback:
    """Is told what happens in a run. A subclass defines the methods that it needs; the others cost nothing.

    Callbacks are called in the order in which the trainer was given them. In a step: the step, its row of ``metrics.csv``,
    ``on_step_end``, the checkpoint that is due and ``on_checkpoint``. At the end of an epoch: evaluation and ``on_evaluate``, the
    row, ``on_epoch_end``, then the checkpoints. Of several workers, the first alone has callbacks; they may not call what all
    workers are to call together (``Session.state``).

    An exception stops the run as a ``CallbackError`` that names the callback and the event; the state is saved.
    """

    def on_run_begin(self, run: Run) -> None:
        """The run begins, or goes on from a checkpoint."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """The run is over. It is called whatever happened, also where ``on_run_begin`` was not reached or failed.

        Args:
            run: the trainer.
            error: what stopped the run; None where it came to its end, or a callback stopped it.
        """

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        """An epoch, by its number from 1, begins or goes on in its midst."""

    def on_epoch_end(self, run: Run, report: EpochReport) -> None:
        """An epoch is done and evaluated; its checkpoint is written after this."""

    def on_step_end(self, run: Run, report: StepReport) -> None:
        """A step is done."""

    def on_evaluate(self, run: Run, figures: Mapping[str, float]) -> None:
        """The evaluation data were evaluated: loss and metrics."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """A checkpoint was written."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as if it had not stopped: JSON-compatible values, kept in checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state`` returned when the checkpoint was written."""

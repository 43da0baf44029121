"""The base class of callbacks, what they are told, and how a run calls them: in their order, their errors named."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from burnish.data.loader import Loader
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.errors import BurnishError, CallbackError, ConfigurationError
from burnish.metrics import higher_is_better
from burnish.program import Program
from burnish.settings import call_hint
from burnish.training.run_results import Row
from burnish.training.session import Session
from burnish.validation import is_whole


class Run(Protocol):
    """A run as a callback sees it: the ``Trainer``.

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


class StoppedByCallback(BaseException):
    """A callback asked for the end of the run, and its state is saved. It leaves no method of the trainer but ``run``."""


class Callbacks:
    """The callbacks of a run.

    Args:
        callbacks: in the order in which they are called.
        is_first: False for a worker that leaves them to the first one.

    Raises:
        ConfigurationError: something among them is no callback.

    Attributes:
        stop_reason: why a callback asked for the end of the run; None where none did.
        tell_steps: whether any callback defines ``on_step_end``.
        tell_checkpoints: whether any defines ``on_checkpoint``.
    """

    def __init__(self, callbacks: Sequence[Callback], is_first: bool = True):
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigurationError(
                    f"callbacks: {callback!r} is no burnish.training.callbacks.Callback{call_hint(callback)}: give objects of "
                    "subclasses of it"
                )
        self._callbacks = list(callbacks) if is_first else []
        self.stop_reason: str | None = None
        self.tell_steps = any(_defines(callback, "on_step_end") for callback in self._callbacks)
        self.tell_checkpoints = any(_defines(callback, "on_checkpoint") for callback in self._callbacks)

    def call(self, event: str, run: Run, *told: Any) -> None:
        """Call a method of all callbacks that define it.

        Raises:
            CallbackError: one of them raised an exception.
        """
        for callback in self._callbacks:
            if _defines(callback, event):
                _call(callback, event, run, *told)

    def end(self, run: Run, error: BaseException | None) -> None:
        """Call ``on_run_end`` of all callbacks, also of those that come after one that fails.

        Raises:
            CallbackError: one raised an exception, and no error is on its way; else it is a note.
        """
        failures: list[BurnishError] = []
        for callback in self._callbacks:
            try:
                _call(callback, "on_run_end", run, error)
            except CallbackError as raised:
                failures.append(raised)
        for failure in failures[error is None :]:
            run.note(str(failure))
        if failures and error is None:
            raise failures[0]

    def states(self) -> list[dict[str, Any]]:
        """Return what a checkpoint keeps of them.

        Raises:
            CallbackError: a state is not JSON-compatible, or could not be given.
        """
        states = []
        for callback in self._callbacks:
            state = _call(callback, "state")
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise CallbackError(
                    f"The callback {_name(callback)} returned a state that no checkpoint can hold: {error}. Return a dict of "
                    "numbers, texts, lists and dicts"
                ) from error
            if state:
                states.append({"callback": _name(callback), "state": state})
        return states

    def load_states(self, states: object) -> None:
        """Give each callback its state of a checkpoint, by its name and by its place among those of that name.

        Raises:
            CallbackError: one cannot take its state.
        """
        left = [entry for entry in states if isinstance(entry, Mapping)] if isinstance(states, list) else []
        for callback in self._callbacks:
            own = next((entry for entry in left if entry.get("callback") == _name(callback)), None)
            if own is not None:
                left.remove(own)
                _call(callback, "load_state", own.get("state"))


def _name(callback: Callback) -> str:
    return type(callback).__name__


def _defines(callback: Callback, event: str) -> bool:
    return getattr(type(callback), event) is not getattr(Callback, event)


def _call(callback: Callback, event: str, *arguments: Any) -> Any:
    try:
        return getattr(callback, event)(*arguments)
    except CallbackError:
        raise
    except Exception as error:
        said = str(error) if isinstance(error, BurnishError) else f"{type(error).__name__}: {error}"
        raise CallbackError(
            f"The callback {_name(callback)} failed in {event}: {said.rstrip('.')}. Mend it or leave it out"
        ) from error


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

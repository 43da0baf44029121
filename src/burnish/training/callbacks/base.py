"""The base class of callbacks, their events, and the calls: in order, with errors that name the callback."""

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
        program, session: the trained program, and the session with its state.
        loader, eval_loader: training and evaluation batches.
        epochs, steps: those of the whole run.
        run_directory: folder of the run.
        group: workers of the run; one if it trains without others.
        rows: rows of ``metrics.csv`` so far.
        best_epoch: ``epoch``, ``metric`` and ``value`` of the best epoch so far; None before the end of the first.
        stop_reason: reason of a callback to stop the run, or None.
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
        """Stop after the current step: the state is saved, and ``Trainer.run`` returns."""
        ...

    def note(self, text: str) -> None:
        """Show a text to the person who watches the run."""
        ...


@dataclass(frozen=True)
class StepReport:
    """A finished step.

    Attributes:
        epoch: number of the epoch, from 1.
        step: steps since the run first started, including this one.
        samples: samples since then.
        seconds: seconds of training since then.
        batch: this worker's batch, arrays by input name; not to be changed.
        batch_samples: samples of the step over all workers.
        figures: loss, metrics and other outputs of the step.
        rate: learning rate of the step, or None.
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
    """A finished epoch.

    Attributes:
        epoch: its number, from 1.
        step, samples, seconds: as in ``StepReport``.
        training: loss and metrics, averaged over the batches of the epoch.
        evaluation: loss and metrics on the evaluation data; empty if there are none.
        is_best: True if it is the best epoch so far.
    """

    epoch: int
    step: int
    samples: int
    seconds: float
    training: Mapping[str, float]
    evaluation: Mapping[str, float]
    is_best: bool


class Callback:
    """Base class of callbacks. A subclass defines the methods that it needs; the others cost nothing.

    Callbacks are called in the order given to the trainer. In a step: the step, its row of ``metrics.csv``, ``on_step_end``, the
    checkpoint if due and ``on_checkpoint``. At the end of an epoch: evaluation and ``on_evaluate``, the row, ``on_epoch_end``,
    then the checkpoints. With several workers, only the first has callbacks; they may not call methods that all workers must call
    together (``Session.state``).

    An exception stops the run as a ``CallbackError`` that names the callback and the event; the state is saved.
    """

    def on_run_begin(self, run: Run) -> None:
        """Called when the run begins or resumes."""

    def on_run_end(self, run: Run, error: BaseException | None) -> None:
        """Called when the run is over, in every case, even if ``on_run_begin`` failed or was not reached.

        Args:
            run: the trainer.
            error: error that stopped the run; None if it finished or a callback stopped it.
        """

    def on_epoch_begin(self, run: Run, epoch: int) -> None:
        """Called when an epoch (from 1) begins, or resumes in its middle."""

    def on_epoch_end(self, run: Run, report: EpochReport) -> None:
        """Called after an epoch and its evaluation, before its checkpoint is written."""

    def on_step_end(self, run: Run, report: StepReport) -> None:
        """Called after a step."""

    def on_evaluate(self, run: Run, figures: Mapping[str, float]) -> None:
        """Called after an evaluation, with loss and metrics."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Called after a checkpoint was written."""

    def state(self) -> dict[str, Any]:
        """Return the JSON-compatible state that a resumed run needs; it is stored in checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``state`` from a checkpoint."""


class StoppedByCallback(BaseException):
    """Raised when a callback stops the run, after its state is saved. ``Trainer.run`` catches it."""


class Callbacks:
    """The callbacks of a run.

    Args:
        callbacks: callbacks in calling order.
        is_first: False for a worker that leaves them to the first one.

    Raises:
        ConfigurationError: an object is not a callback.

    Attributes:
        stop_reason: reason of a callback to stop the run, or None.
        tell_steps: True if any callback defines ``on_step_end``.
        tell_checkpoints: True if any defines ``on_checkpoint``.
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
            CallbackError: a callback raised an exception.
        """
        for callback in self._callbacks:
            if _defines(callback, event):
                _call(callback, event, run, *told)

    def end(self, run: Run, error: BaseException | None) -> None:
        """Call ``on_run_end`` of all callbacks, even after one fails.

        Raises:
            CallbackError: a callback raised an exception, and the run ends without an error; otherwise a note is shown.
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
        """Return the states of the callbacks for a checkpoint.

        Raises:
            CallbackError: a state is not JSON-compatible, or a callback failed to give it.
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
        """Load the states from a checkpoint, matched by name and by order among callbacks of the same name.

        Raises:
            CallbackError: a callback cannot load its state.
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
    """Stop a run if a metric has not improved for some epochs. The count is stored in checkpoints.

    Args:
        patience: epochs without improvement before the run stops.
        metric: the loss or a metric, on the evaluation data, or on the training data if there are none.
        min_delta: smallest improvement that counts, 0 or more.

    Raises:
        ConfigurationError: a number is out of range.
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

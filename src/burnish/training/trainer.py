"""The trainer: epochs over a data set, with evaluation, reports, checkpoints, and going on where a run stopped."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from burnish.data import DataSource, Loader, Wanted, as_dataset
from burnish.data.loader import Augmentation
from burnish.engines import Engine
from burnish.errors import BurnishError, CheckpointError, ConfigurationError, NonFiniteLossError
from burnish.metrics import higher_is_better
from burnish.program import Program, Role
from burnish.random import check_seed
from burnish.training import schedule as schedules
from burnish.training.checkpoint_folder import CheckpointFolder
from burnish.training.inputs import broken_rule
from burnish.training.progress import Progress, Reached, Silent, automatic
from burnish.training.rates import Rates
from burnish.training.reports import EVALUATION_PREFIX, MetricsTable, Row, draw_curves
from burnish.training.session import STEP_REPORT, Session
from burnish.training.totals import Means

ROWS_PER_EPOCH = 10
DRAW_EVERY_SECONDS = 60.0


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a run, after its state was saved.

    Attributes:
        checkpoint: the file to resume from.
    """

    def __init__(self, checkpoint: Path, epoch: int, batch: int):
        super().__init__(
            f"Stopped in epoch {epoch + 1} after {batch} of its batches. Everything is saved in '{checkpoint}'; "
            "resume, and training goes on as if it had not stopped"
        )
        self.checkpoint = checkpoint


@dataclass(frozen=True)
class TrainingResult:
    """What a run came to.

    Attributes:
        metrics: loss and metrics after the last epoch: on the evaluation data where there are any, else the averages over
            the training batches of that epoch.
        history: the rows of ``metrics.csv``.
        best: ``epoch`` (from 1), ``metric``, ``value`` of the best epoch, whose state ``checkpoints/best.safetensors`` holds.
        steps: steps since the run first started.
        seconds: time spent in training since the run first started.
        run_directory: where reports and checkpoints are.
    """

    metrics: dict[str, float]
    history: list[Row]
    best: dict[str, Any] | None
    steps: int
    seconds: float
    run_directory: Path


@dataclass
class _Position:
    """Where a run is; with the session's state, all that it takes to go on.

    Attributes:
        epoch: the epoch under way, from 0.
        batch: batches of it that are done.
        step, samples, seconds: done since the run first started.
        rate: learning rate of the last step; None before the first, and where there is none.
        unheeded: how many steps the figures of the last epoch are still to be given to, so that an update reads them.
        since_row, since_epoch: averages since the last row of ``metrics.csv``, and since the epoch began.
        best: as ``TrainingResult.best``.
        metrics: as ``TrainingResult.metrics``, after the last whole epoch.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    rate: float | None = None
    unheeded: int = 0
    since_row: Means = field(default_factory=Means)
    since_epoch: Means = field(default_factory=Means)
    best: dict[str, Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> _Position:
        means = {name: Means(**values[name]) for name in ("since_row", "since_epoch")}
        return cls(**{**values, **means})


class Trainer:
    """Trains a program on a data set and keeps the run in a folder.

    The folder holds ``metrics.csv``, ``curves.png`` and ``checkpoints/``: ``latest.safetensors``, and ``best.safetensors`` of
    the epoch with the best figure on the evaluation data, or on the training data where there are none. Everything random
    follows ``seed`` and the position alone: a resumed run computes, to the bit, what an uninterrupted one does.

    Args:
        program: what to train.
        train_data: a data set, a source of one (``digits``, a path), ``(x, y)``, or arrays by input name.
        eval_data: the same, to evaluate on after every epoch.
        epochs: how often to go through the training data, in all.
        batch_size: samples in a batch; the last one of an epoch may be smaller, and is left out where the program does not
            take it (``norm="ghost:<size>"``).
        seed: of the order of the data, of augmentation, and of the random key.
        run_directory: the folder of the run.
        checkpoint_every: also save after this many steps; each epoch is saved in any case.
        keep_checkpoints: how many checkpoints to keep, as ``step-<steps>.safetensors``; with 1 there is ``latest`` alone. A
            resumed run falls back on an earlier one where the latest was damaged.
        best_metric: the metric (or ``loss``) that decides which epoch is the best; by default the first metric, or the loss.
        resume: go on with the run in ``run_directory``.
        overwrite: start anew in a ``run_directory`` that holds a run.
        engine, device, threads: as in ``Session``.
        state: where to start, as ``Session`` takes it.
        lr: learning rate, in place of the program's.
        schedule: how it changes: ``constant``, ``cosine``, or a function (step from 0, steps of the run) -> factor. Neither
            this nor ``lr`` for a program that was compiled with a schedule of ``burnish.optim.schedules``.
        monitor: the figure that a ``plateau`` schedule in the program is given after each epoch: the loss (None) or a metric, on
            the evaluation data, or on the training data where there are none.
        augment: random changes to training batches, as ``Loader`` takes them.
        progress: True for a bar on a terminal and lines elsewhere, False for nothing, or a ``Progress``.

    Raises:
        ConfigurationError: a number out of range, a run longer than the program's schedule, or a folder that holds a run already.
        DataError: data that cannot be read, or that do not fit the program.
        CheckpointError: nothing to resume, or a run that was started with other options.
        EngineError: the engine is not there.
    """

    def __init__(
        self,
        program: Program,
        train_data: DataSource,
        eval_data: DataSource | None = None,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        seed: int = 0,
        run_directory: str | Path = "runs/latest",
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 1,
        best_metric: str | None = None,
        resume: bool = False,
        overwrite: bool = False,
        engine: str | Engine = "auto",
        device: str | None = None,
        threads: int | None = None,
        state: Mapping[str, np.ndarray] | None = None,
        lr: float | None = None,
        schedule: str | schedules.Schedule = "constant",
        monitor: str | None = None,
        augment: Augmentation | None = None,
        progress: bool | Progress = True,
    ):
        whole_numbers = {
            "epochs": epochs,
            "batch_size": batch_size,
            "checkpoint_every": checkpoint_every,
            "keep_checkpoints": keep_checkpoints,
        }
        for name, number in whole_numbers.items():
            if number is not None and (not isinstance(number, int | np.integer) or number < 1):
                raise ConfigurationError(f"{name}={number!r}: give a whole number of 1 or more")
        check_seed(seed)
        wanted = Wanted.by(program)
        train = as_dataset(train_data, wanted)
        classes = getattr(train, "classes", None)
        evaluation = None if eval_data is None else as_dataset(eval_data, wanted, classes=classes)
        self.program = program
        self.epochs = epochs
        self.checkpoint_every = checkpoint_every
        self.run_directory = Path(run_directory)
        self.checkpoints = CheckpointFolder(self.run_directory / "checkpoints", keep_checkpoints)
        rest = _left_out(program, len(train), batch_size)
        self.loader = Loader(train, batch_size, seed, drop_last=rest > 0, augment=augment)
        self.eval_loader = None if evaluation is None else Loader(evaluation, batch_size, shuffle=False)
        self._names = [entry.name for entry in program.signature["step"].outputs_of(*STEP_REPORT)]
        self._watched = _watched(program, best_metric)
        self._notes = [note for data in (train, evaluation) if (note := getattr(data, "note", None)) is not None]
        if rest:
            self._notes.append(f"Each epoch leaves {rest} of its samples out: the program takes no batch of {rest}")
        self._rates = Rates.of(program, lr, schedule, monitor, self._names)
        # What the course of a run depends on, beside the program: a resumed run has to agree.
        self._course = {"seed": seed, "batch_size": batch_size, "samples": len(train)}
        if not resume and not overwrite and self.checkpoints.exists:
            raise ConfigurationError(
                f"'{self.run_directory}' holds a run already: go on with it (resume=True), choose another run_directory, "
                "or drop it (overwrite=True)"
            )
        self.session = Session(program, engine, state, seed, device, threads)
        self._position = self._restored() if resume else _Position()
        self._rates.check_end(self.session.step_count, self.steps - self._position.step)
        self._table = MetricsTable(
            _in_folder(self.run_directory) / "metrics.csv",
            self._names,
            self._position.step if resume else None,
            training_only=[entry.name for entry in program.signature["step"].outputs_of(Role.DIAGNOSTIC)],
        )
        if not resume:
            self.checkpoints.clear()
        self._progress: Progress = progress if not isinstance(progress, bool) else automatic() if progress else Silent()
        self._interrupted = False
        self._drawn = time.monotonic()

    @property
    def latest(self) -> Path:
        """The checkpoint to resume from."""
        return self.checkpoints.latest

    @property
    def best(self) -> Path:
        """The checkpoint of the best epoch."""
        return self.checkpoints.best

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * len(self.loader)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done."""
        return self._position.epoch >= self.epochs

    @property
    def learning_rate(self) -> float | None:
        """The learning rate that the schedule changes; None where the program computes its own, or has none."""
        return self._rates.start

    def run(self) -> TrainingResult:
        """Train to the last epoch.

        Raises:
            TrainingInterrupted: Ctrl-C, after the step under way was finished and the state saved.
            NonFiniteLossError: the loss became NaN or infinite; the state from before that step is saved.
            BurnishError: any other error, after the state was saved where it could be.
        """
        self._progress.start(self._position.step, self.steps)
        for note in self._notes:
            self._progress.note(note)
        if self.finished:
            self._progress.note(
                f"'{self.run_directory}': already finished after {self._position.step:,} steps; nothing to train: raise epochs "
                f"(--epochs) above {self._position.epoch}"
            )
        try:
            with self._ctrl_c_noted():
                while not self.finished:
                    self._run_epoch()
        except BurnishError as error:
            raise self._stopped_by(error) from error
        finally:
            self._draw(at_once=True)
            self._progress.close()
        position = self._position
        return TrainingResult(
            position.metrics, self._table.rows, position.best, position.step, position.seconds, self.run_directory
        )

    def _run_epoch(self) -> None:
        position = self._position
        begin = time.monotonic()
        for batch in self.loader.epoch(position.epoch, position.batch):
            latest = position.metrics if position.unheeded else {}
            given = self._rates.given(position.step, self.steps, latest)
            results = self.session.step(batch, **given)
            metrics = {name: results[name] for name in self._names}
            position.rate = self._rates.used(given, results)
            if position.unheeded and not results.get("skipped"):
                position.unheeded -= 1
            samples = min(self.loader.batch_size, len(self.loader.dataset) - position.batch * self.loader.batch_size)
            position.batch += 1
            position.step += 1
            position.samples += samples
            now = time.monotonic()
            position.seconds += now - begin
            begin = now
            position.since_row.add(metrics, samples)
            position.since_epoch.add(metrics, samples)
            self._progress.step(self._reached())
            if position.batch < len(self.loader):
                if position.batch % math.ceil(len(self.loader) / ROWS_PER_EPOCH) == 0:
                    self._add_row({})
                if self.checkpoint_every and position.step % self.checkpoint_every == 0:
                    self._save()
            self._stop_if_interrupted()
        self._finish_epoch(begin)

    def _finish_epoch(self, begin: float) -> None:
        position = self._position
        evaluation: dict[str, float] = {}
        if self.eval_loader is not None:
            evaluation = self.session.evaluate_data(self.eval_loader.epoch(0), progress=lambda _: self._stop_if_interrupted())
        averages = position.since_epoch.values()
        position.metrics = evaluation or averages
        position.seconds += time.monotonic() - begin
        self._progress.epoch(self._reached(), evaluation)
        self._add_row(evaluation)
        position.epoch += 1
        position.batch = 0
        position.unheeded = self._rates.every
        position.since_epoch = Means()
        self._keep_best()
        self._save()
        self._draw()
        if position.epoch < self.epochs:
            self._stop_if_interrupted()

    def _reached(self) -> Reached:
        position = self._position
        means = position.since_epoch.values()
        return Reached(position.epoch + 1, self.epochs, position.step, self.steps, position.samples, means)

    def _add_row(self, evaluation: Mapping[str, float]) -> None:
        position = self._position
        self._table.append(
            {
                "step": position.step,
                "epoch": position.epoch + 1,
                "samples": position.samples,
                "seconds": round(position.seconds, 3),
                "lr": position.rate,
                **position.since_row.values(),
                **{EVALUATION_PREFIX + name: value for name, value in evaluation.items()},
            }
        )
        position.since_row = Means()

    def _keep_best(self) -> None:
        position = self._position
        value = position.metrics[self._watched]
        if position.best is None or _is_better(self._watched, value, position.best["value"]):
            position.best = {"epoch": position.epoch, "metric": self._watched, "value": value}
            self.checkpoints.save_best(self.session, self._extra())

    def _save(self) -> None:
        self.checkpoints.save(self.session, self._extra())

    def _extra(self) -> dict[str, Any]:
        return {"course": self._course, "position": asdict(self._position)}

    def _restored(self) -> _Position:
        if not self.checkpoints.exists:
            raise CheckpointError(f"There is nothing to resume in '{self.run_directory}': start the run without resume")
        extra, path, passed_over = self.checkpoints.restore(self.session)
        self._notes += passed_over
        try:
            course, position = extra["course"], _Position.from_dict(extra["position"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"'{path}' was not written by a Trainer and does not say where in the data it was: "
                "load it with Session.restore, or start a new run from its state"
            ) from error
        for name, value in self._course.items():
            if course.get(name) != value:
                raise CheckpointError(
                    f"The run in '{self.run_directory}' was started with {name}={course.get(name)}, and is now to go on with "
                    f"{name}={value}: give it what it was started with, or start a new run"
                )
        return position

    def _stopped_by(self, error: BurnishError) -> BurnishError:
        """Save what there is; return the error with where that is and, for a loss that is not finite, how to go on."""
        position = self._position
        text = f"{str(error).rstrip('.')}. Training stopped in epoch {position.epoch + 1}, batch {position.batch + 1}"
        try:
            self._save()
            text += f"; the state before it is saved in '{self.latest}'"
        except CheckpointError:
            text += f"; '{self.latest}' holds the last state that was whole" if self.latest.exists() else ""
        if isinstance(error, NonFiniteLossError):
            rate = self._rates.at(position.step, self.steps)
            if rate is not None:
                text += f". Try a learning rate below {rate:.3g}, such as {rate / 10:.3g}, from the start"
                text += " or from there (resume)" if self.latest.exists() else ""
            elif position.rate is not None:
                text += (
                    f". The step before had a learning rate of {position.rate:.3g}: compile with a schedule that stays below it"
                )
        return type(error)(text)

    @contextlib.contextmanager
    def _ctrl_c_noted(self) -> Iterator[None]:
        """Let Ctrl-C finish the step under way. A second one stops at once.

        Python delivers signals to the main thread alone: elsewhere KeyboardInterrupt stays the caller's.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        earlier = signal.getsignal(signal.SIGINT)

        def note(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, earlier)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, earlier)

    def _stop_if_interrupted(self) -> None:
        if self._interrupted:
            self._interrupted = False
            self._save()
            raise TrainingInterrupted(self.latest, self._position.epoch, self._position.batch)

    def _draw(self, at_once: bool = False) -> None:
        if not self._table.rows or (not at_once and time.monotonic() - self._drawn < DRAW_EVERY_SECONDS):
            return
        self._drawn = time.monotonic()
        try:
            reason = draw_curves(self._table.rows, self.run_directory / "curves.png", self._names)
        except CheckpointError as error:
            # A picture that cannot be written must not hide why a run stopped, nor stop one.
            reason = str(error)
        if reason is not None and at_once:
            self._progress.note(reason)


def _watched(program: Program, best_metric: str | None) -> str:
    """Return the figure that decides which epoch is the best."""
    signature = program.signature["step"]
    names = [entry.name for entry in signature.outputs_of(Role.METRIC)] + [
        entry.name for entry in signature.outputs_of(Role.LOSS)
    ]
    if best_metric is None:
        return names[0]
    if best_metric not in names:
        raise ConfigurationError(
            f"best_metric: the program reports no '{best_metric}'; it reports {', '.join(repr(name) for name in names)}. "
            "Name one of these, or compile with metrics=[...]"
        )
    return best_metric


def batches_per_epoch(program: Program, samples: int, batch_size: int) -> int:
    """Return how many steps an epoch over so many samples has, without the last batch where the program takes none of its size.

    Raises:
        ConfigurationError: the program takes no batch of ``batch_size``.
    """
    rest = _left_out(program, samples, batch_size)
    return (samples - rest) // batch_size if rest else -(-samples // batch_size)


def _left_out(program: Program, samples: int, batch_size: int) -> int:
    """Return how many samples are left at the end of an epoch that make no batch which the program takes."""
    signature = program.signature["step"]
    rule = broken_rule(signature, batch_size)
    if rule is not None and samples >= batch_size:
        raise ConfigurationError(f"batch_size={batch_size}: {rule.reason}; give another batch_size, or {rule.remedy}")
    rest = samples % batch_size
    return rest if samples > batch_size and rest and broken_rule(signature, rest) is not None else 0


def _is_better(metric: str, value: float, than: float) -> bool:
    if math.isnan(value) or math.isnan(than):
        return not math.isnan(value)
    return value > than if higher_is_better(metric) else value < than


def _in_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"The folder '{path}' cannot be made: {error}. Choose a folder you can write to") from error
    return path

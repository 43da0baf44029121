"""The trainer: epochs over a data set, with evaluation, reports, and checkpoints to resume from."""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from burnish.data import DataSource
from burnish.data.batches import Batches
from burnish.data.splitting import EvalSplit, read_split
from burnish.distributed import DataParallel
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.errors import BurnishError, CallbackError, CheckpointError, ConfigurationError, NonFiniteLossError, WorkerError
from burnish.metrics.base import total_of
from burnish.options import takes
from burnish.program import Program, Role
from burnish.program.state import averages
from burnish.stopping import RunStopped, TimeLimit, runs_kept
from burnish.training import workers
from burnish.training.callbacks.base import Callbacks, EpochReport, StepReport, StoppedByCallback
from burnish.training.cells import cell, shell
from burnish.training.learning_rates import Rates, warn_of_what_is_not_reached
from burnish.training.metric_totals import Sums
from burnish.training.progress import Reached, progress_of
from burnish.training.run_data import RunData
from burnish.training.run_folder import FollowedFolder, RunFolder, fresh_folder
from burnish.training.run_position import Position, StepClock
from burnish.training.run_results import Row, StopNoted, TrainingInterrupted, TrainingResult, best_epoch, curves
from burnish.training.session import STEP_REPORT, Session
from burnish.training.trainer_options import TrainerOptions
from burnish.version import __version__

ROWS_PER_EPOCH = 10
STEPS_PER_ROW = 20
"""Fewest steps between two rows of an epoch. A short epoch has one row, at its end."""


class Trainer:
    """Train a program on a data set, and keep the run in a folder.

    The folder has ``metrics.csv``, ``curves.png`` and ``checkpoints/``: ``latest.safetensors``, and ``best.safetensors`` from the
    epoch with the best figure on the evaluation data, or on the training data if there are none. ``metrics.csv`` has a row for
    each epoch, and up to nine more within an epoch of more than twenty steps. All randomness depends only on ``seed`` and the
    position: a resumed run is bitwise equal to an uninterrupted one.

    Args:
        program: program to train.
        train_data: a data set, a source of one (``digits``, a path), ``(x, y)``, or arrays by input name; or an iterable of
            batches: a PyTorch ``DataLoader``, or ``burnish.data.Batches``.
        eval_data: data to evaluate on after every epoch, in the forms of ``train_data``.
        eval_split: part of ``train_data`` to hold out for evaluation instead. A share, such as 0.2, is taken of each class, if
            the samples have classes. ``"group:COLUMN"`` holds out whole groups of rows with the same value in a column, about a
            fifth of all rows (``"group:COLUMN:0.3"``: another share). The choice depends on the data, the seed and this option.
            It is stored in the run folder as ``split.json``, and a resumed run uses that. An iterable of batches cannot be split.
        epochs: passes over the training data, in total.
        batch_size: samples in a batch; the last one of an epoch may be smaller, and is left out if the program does not take it
            (``norm="ghost:<size>"``).
        seed: seed of the order of the data, of augmentation, and of the random key.
        run_directory: folder of the run. If it has a run already, and neither ``resume`` nor ``overwrite`` is given, that is an
            error; in IPython and notebooks the new run goes to a folder with a number, ``-2`` and so on, and reports it.
        checkpoint_every: also save after this many steps; each epoch is always saved.
        step_timeout: seconds after which a step, or a batch of the evaluation, is stopped by an EngineError, with the state from
            before it saved; None: no limit. It can stop only between two operators, not inside one.
        keep_checkpoints: number of checkpoints to keep, as ``step-<steps>.safetensors``; with 1 there is only ``latest``. A
            resumed run falls back on an earlier one if the latest is damaged.
        journal: True to save, for embedding tables that are updated by rows, only the rows changed since the last checkpoint, as
            ``Session.save_checkpoint``. A resumed run may change it.
        best_metric: metric (or ``loss``) that decides which epoch is the best; by default the first metric, or the loss. Ties go
            to the lower loss.
        parameters: weights to evaluate after each epoch: the parameters, or the ``average`` of them that the optimizer keeps.
        resume: continue the run in ``run_directory``.
        overwrite: start a new run in a ``run_directory`` that has one.
        engine, device, threads: as in ``Session``.
        state: initial state, as in ``Session``.
        lr: learning rate, which overrides the program's.
        schedule: change of the rate: ``constant``, ``cosine``, or a function (step from 0, steps of the run) -> factor. Own rates
            of parameter groups change with it. Give neither this nor ``lr`` for a program compiled with a schedule of
            ``burnish.optim.schedules``.
        monitor: figure for a ``plateau`` schedule in the program after each epoch: the loss (None) or a metric, on the evaluation
            data, or on the training data if there are none.
        augment: random changes in training: to images, as a text (``crop,flip,rand_augment:2:9,mixup:0.2``) or an
            ``ImageAugmentation``; or to batches, a function as in ``Loader``.
        data_workers: processes that read batches ahead; None: some if images are decoded in every epoch. The batches do not
            depend on their number.
        pixels: preprocessing of images and byte arrays that are not yet a data set, as in ``burnish.data.open_dataset``.
            Checkpoints and exported models record it.
        text: tokenization of texts that are not yet a data set.
        sound: preprocessing of a folder of .wav files, as in ``burnish.data.open_dataset``.
        progress: True for a bar on a terminal and lines elsewhere, False for nothing, or a ``Progress``. With several workers,
            only the first reports.
        parallel: None trains without other workers. With ``burnish.DataParallel()`` every worker makes a trainer with the same
            arguments and runs it: each has its part of every batch, and the run equals that of one process with the whole
            batches. ``batch_size`` counts all workers together. The first one keeps the run folder; the others need no access to
            it.
        tables: as in ``Session``. With ``journal``, a resumed run reuses them.
        callbacks: objects that receive steps, epochs and checkpoints, and may stop the run (``burnish.training.callbacks``).

    Raises:
        ConfigurationError: a number is out of range, the run is longer than the program's schedule, or the folder has a run
            already, or an active one, in this process or another.
        DataError: the data cannot be read, do not fit the program, or differ from those that a run was started with.
        CheckpointError: there is nothing to resume, or the run was started with other options.
        EngineError: the engine is not available.
        WorkerError: another worker is missing, or trains something different.
    """

    @takes(TrainerOptions)
    def __init__(self, program: Program, train_data: DataSource, options: TrainerOptions):
        if not isinstance(program, Program):
            raise ConfigurationError(
                f"A trainer trains a program, not a {type(program).__name__}: give what burnish.compile or Program.load returns"
            )
        step_timeout, parallel, engine = options.step_timeout, options.parallel, options.engine
        self._limit = None if step_timeout is None else TimeLimit(step_timeout)
        asked: EvalSplit | None = options.eval_split  # type: ignore[assignment]  # as it was checked
        kept = read_split(Path(options.run_directory)) if asked is not None and options.resume else None
        told = options.pixels, options.text, options.augment, options.sound
        data = RunData.open(program, train_data, options.eval_data, *told, asked, options.seed, kept)
        self.epochs, self.checkpoint_every = options.epochs, options.checkpoint_every
        self.run_directory, folder_note = Path(options.run_directory), None
        if shell() is not None and parallel is None and not (options.resume or options.overwrite):
            self.run_directory = fresh_folder(Path(options.run_directory))
            if self.run_directory != Path(options.run_directory):
                folder_note = (
                    f"'{options.run_directory}' holds a run already: this one goes to '{self.run_directory}' "
                    "(resume=True goes on with a run, overwrite=True drops it)"
                )
        if parallel is not None:
            parallel, engine = parallel.joined(options.device), "torch" if engine == "auto" else engine
        self._group, self._steps_alone = (parallel and parallel.group) or ProcessGroup(0, 1), _steps_alone(parallel)
        size, seed = options.batch_size, options.seed
        self._data, self.loader = data, data.training_loader(program, size, seed, self._group, options.data_workers)
        self.eval_loader = data.evaluation_loader(program, size)
        self._notes = [*([] if folder_note is None else [folder_note]), *data.notes(program, self.loader, options.epochs)]
        self.program, self._names = program, [entry.name for entry in program.signature["step"].outputs_of(*STEP_REPORT)]
        self._watched = _watched_figure(program, options.best_metric, data)
        self._parameters = options.parameters
        if options.parameters is not None:
            averages(program.signature, options.parameters)
        self._sums = Sums.of(program)
        self._clock = StepClock()
        self._rates = Rates.of(program, options.lr, options.schedule, options.monitor, self._names)
        if self._group.rank == 0:
            data.warn_of_few_classes(program)
        course = {"seed": seed, "batch_size": size, **data.course()}
        self._callbacks = Callbacks(options.callbacks, self._group.rank == 0)
        self._progress = progress_of(options.progress, self._group.rank == 0)
        self.run_folder = self._open_folder(course, options.keep_checkpoints, options.journal)
        self._stop, self._stop_vote, self._position = StopNoted(), workers.StopVote(self._group), Position()
        try:
            self._agree(course, data.evaluation)
            self._check_folder(options.resume or options.overwrite)
            device, threads = options.device, options.threads
            self.session = Session(program, engine, options.state, seed, device, threads, parallel, options.tables)
            self._begin(data, options.resume)
        except BaseException as error:
            self.run_folder.leave()
            self._group.fail(error)
            raise

    def _open_folder(self, course: Mapping[str, Any], keep: int, journal: bool) -> RunFolder:
        kind = RunFolder if self._group.rank == 0 else FollowedFolder
        data = None if isinstance(self._data.train, Batches) else self._data.train
        return kind(self.run_directory, course, keep, journal, self._callbacks, data, self._data.split)

    def _check_folder(self, may_hold_run: bool) -> None:
        workers.on_first(self._group, self.run_folder.take, "the folder of the run")
        if not may_hold_run:
            workers.on_first(self._group, self.run_folder.check_unused, "the folder of the run")

    def _begin(self, data: RunData, resume: bool) -> None:
        if self.run_folder.checkpoints.journal:
            self.session.check_journal()
        self.session.metadata = data.described.metadata()
        if resume:
            self._resume()
        self._first_step = self._position.step
        remaining = self.steps - self._position.step
        self._rates.check_end(self.session.step_count, remaining)
        if self._group.rank == 0:
            warn_of_what_is_not_reached(self.program, self.session.step_count + remaining, self._steps_alone)
        diagnostics = [entry.name for entry in self.program.signature["step"].outputs_of(Role.DIAGNOSTIC)]
        last_step = self._position.step if resume else None
        evaluated = () if self.eval_loader is None else _evaluation_only(self.program, self._names)
        begin = functools.partial(self.run_folder.begin, self._names, diagnostics, last_step, evaluated)
        workers.on_first(self._group, begin, "the folder of the run")

    def __repr__(self) -> str:
        place, epochs = self._position, self.epochs
        return f"Trainer('{self.run_directory}', epoch {place.epoch}/{epochs}, step {place.step:,}/{self.steps:,})"

    def _repr_html_(self) -> str:
        place = self._position
        rows: list[tuple[str, Any]] = [
            ("epochs", f"{place.epoch} of {self.epochs}"),
            ("steps", f"{place.step:,} of {self.steps:,}"),
            ("batch size", f"{self.loader.batch_size:,}"),
            ("folder", self.run_directory),
        ]
        return cell("Trainer", [*rows, *best_epoch(place.best)], curves(self.rows))

    @property
    def latest(self) -> Path:
        """The checkpoint to resume from."""
        return self.run_folder.checkpoints.latest

    @property
    def best(self) -> Path:
        """The checkpoint of the best epoch."""
        return self.run_folder.checkpoints.best

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * len(self.loader)

    @property
    def finished(self) -> bool:
        """True if all epochs are done."""
        return self._position.epoch >= self.epochs

    @property
    def group(self) -> ProcessGroup:
        """The workers of the run; one if it trains without others."""
        return self._group

    @property
    def rows(self) -> list[Row]:
        """The rows of ``metrics.csv``; with several workers, only the first has them."""
        return self.run_folder.rows

    @property
    def best_epoch(self) -> dict[str, Any] | None:
        """The best epoch so far, as ``TrainingResult.best``."""
        return self._position.best

    @property
    def stop_reason(self) -> str | None:
        """The reason of a callback to stop the run, or None."""
        return self._callbacks.stop_reason

    def stop(self, reason: str) -> None:
        """Stop after the current step, for callbacks: the state is saved, and ``run`` returns.

        Args:
            reason: text for ``TrainingResult.stopped``.
        """
        self._callbacks.stop_reason = reason

    def note(self, text: str) -> None:
        """Show a note with the progress of the run."""
        self._progress.note(text)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate that the schedule changes; None if the program computes its own, or has none."""
        return self._rates.start

    def run(self) -> TrainingResult:
        """Train to the last epoch, or until a callback stops the run.

        Raises:
            CallbackError: a callback failed; the state is saved.
            TrainingInterrupted: Ctrl-C or SIGTERM, after the state was saved. The current step may finish within two seconds, and
                is stopped after that. A second signal ends the process at once.
            EngineError: a step took longer than ``step_timeout``; the state from before it is saved.
            NonFiniteLossError: the loss became NaN or infinite; the state from before that step is saved.
            WorkerError: another worker is gone; the state from before the step is saved.
            BurnishError: any other error, after the state was saved if possible.
        """
        self._progress.start(self._position.step, self.steps)
        for note in self._notes:
            self._progress.note(note)
        if self.finished:
            self._progress.note(
                f"'{self.run_directory}': already finished after {self._position.step:,} steps; nothing to train: raise epochs "
                f"(--epochs) above {self._position.epoch}"
            )
        error: BaseException | None = None
        stopped: str | None = None
        workers.on_first(self._group, self.run_folder.enter, "the folder of the run")
        try:
            for note in (
                () if self.finished else self._data.fill(self.session.features, self.loader.batch_size, self.run_directory)
            ):
                self._progress.note(note)
            self.session.limit(self._limit)
            with self._stop, nullcontext() if self._group.world_size == 1 else runs_kept():
                self._callbacks.call("on_run_begin", self)
                self._stop_vote.begin(self._wish())
                self._stop_if_asked()
                self._run_epochs()
        except StoppedByCallback:
            stopped = self._callbacks.stop_reason or "a callback of the first worker asked for it"
            self._progress.note(f"stopped after {self._position.step:,} steps: {stopped}")
        except BurnishError as raised:
            self._tell(raised)
            error = self._stopped_by(raised)
            raise error from raised
        except BaseException as raised:
            error = raised
            self._tell(error)
            raise
        finally:
            self._draw(at_once=True)
            try:
                self._callbacks.end(self, error)
            finally:
                self._progress.close()
                self.loader.close()
                if self._limit is not None:
                    self.session.limit(None)
                    self._limit.close()
                self.run_folder.leave()
        position = self._position
        metrics = position.metrics or self._sums.averages(position.since_epoch)
        return TrainingResult(
            metrics,
            self.run_folder.rows,
            position.best,
            position.step,
            position.seconds,
            self.run_directory,
            position.waiting,
            stopped,
        )

    def _run_epochs(self) -> None:
        try:
            while not self.finished:
                self._run_epoch()
        except RunStopped:  # by a signal: the step did not end soon after it
            if self._group.world_size == 1:
                self._stop_if_asked()
            raise

    def _run_epoch(self) -> None:
        position = self._position
        self._callbacks.call("on_epoch_begin", self, position.epoch + 1)
        begin = time.monotonic()
        for batch in self._clock.timed(self.loader.epoch(position.epoch, position.batch), position):
            latest = position.metrics if position.unheeded else {}
            hyperparameters = self._rates.hyperparameters(position.step, self.steps, latest)
            if self.session.meets:
                self._stop_vote.begin(self._wish())
            results = self.session.step(batch, **hyperparameters)
            metrics = {name: results[name] for name in self._names}
            position.rate = self._rates.used(hyperparameters, results)
            if position.unheeded and not results.get("skipped"):
                position.unheeded -= 1
            samples = self.loader.samples_in(position.batch)
            position.add_step(metrics, samples, self._sums)
            now = time.monotonic()
            position.seconds += now - begin
            begin = now
            self._progress.step(self._reached())
            steps_per_row = max(STEPS_PER_ROW, math.ceil(len(self.loader) / ROWS_PER_EPOCH))
            if position.batch < len(self.loader) and position.batch % steps_per_row == 0:
                self.run_folder.add_row(position, self._sums.averages(position.since_row), {})
            if self._callbacks.tell_steps:
                self._tell_step(batch, samples, metrics)
            is_due = self.checkpoint_every and position.step % self.checkpoint_every == 0
            if is_due and position.batch < len(self.loader):  # the end of an epoch always saves
                self._save()
            self._stop_if_asked()
        self._finish_epoch(begin)

    def _finish_epoch(self, begin: float) -> None:
        position = self._position
        evaluation: dict[str, float] = {}
        self.session.synchronize()
        if self.eval_loader is not None:
            evaluation = workers.evaluate(
                self._group,
                self.session,
                self.eval_loader,
                parameters=self._parameters,
                looked_up=self._stop_if_asked if self._group.world_size == 1 else self._group.check,
            )
            self._callbacks.call("on_evaluate", self, evaluation)
        training = self._sums.averages(position.since_epoch)
        position.metrics = evaluation or training
        if self._steps_alone and not evaluation:
            # Each worker has figures of its own parts, but all must make the same decision.
            position.metrics = workers.on_first(self._group, lambda: training, "the figures of the epoch")
        position.seconds += time.monotonic() - begin
        self._progress.epoch(self._reached(), evaluation)
        for remark in self._data.new_remarks():
            self._progress.note(remark)
        self.run_folder.add_row(position, self._sums.averages(position.since_row), evaluation)
        position.end_epoch()
        position.unheeded = self._rates.every
        is_best = position.take_best(self._watched)
        done = (position.epoch, position.step, position.samples, position.seconds)
        self._callbacks.call("on_epoch_end", self, EpochReport(*done, training, evaluation, is_best))
        if is_best:
            self.run_folder.save_best(self.session, position)
            self._callbacks.call("on_checkpoint", self, self.best)
        self._save(is_best)
        self._draw()
        if position.epoch < self.epochs:
            self._stop_vote.begin(self._wish())
            self._stop_if_asked()

    def _tell_step(self, batch: Mapping[str, Any], samples: int, figures: Mapping[str, float]) -> None:
        position = self._position
        done = (position.epoch + 1, position.step, position.samples, position.seconds)
        self._callbacks.call("on_step_end", self, StepReport(*done, batch, samples, figures, position.rate))

    def _reached(self) -> Reached:
        position = self._position
        means = self._sums.averages(position.since_epoch)
        return Reached(position.epoch + 1, self.epochs, position.step, self.steps, position.samples, means)

    def _agree(self, course: Mapping[str, object], evaluation: Any) -> None:
        """Check that all workers have the same options and data. Their sessions compare the programs."""
        if self._group.world_size == 1:
            return
        facts = {
            "the version of burnish": __version__,
            "the version of PyTorch": version("torch"),
            **course,
            "epochs": self.epochs,
            "checkpoint_every": self.checkpoint_every,
            "best_metric": self._watched,
            "what is held out": None if self._data.split is None else self._data.split.digest,
            "the training data": workers.described(self.loader.dataset),
            "the evaluation data": None if evaluation is None else workers.described(evaluation),
        }
        self._group.barrier(name="the others to read their data and compile")
        workers.agree(self._group, facts)

    def _resume(self) -> None:
        """Resume the run: the first worker reads the checkpoint and sends it to the others."""

        def restored() -> dict[str, object]:
            position, passed_over = self.run_folder.restored(self.session)
            return {"position": asdict(position), "notes": passed_over}

        checkpoint = workers.on_first(self._group, restored, "the checkpoint")
        self._position = Position.from_dict(checkpoint["position"])
        self._notes += checkpoint["notes"]
        workers.take_over_state(self._group, self.session)

    def start_from(self, path: str | Path) -> None:
        """Begin with the state of a checkpoint, as far as it fits (``Session.restore`` with ``strict=False``).

        Raises:
            CheckpointError: the file cannot be read, or belongs to another model.
            WorkerError: the same, on all workers but the first.
        """
        workers.restore(self._group, self.session, Path(path), strict=False)

    def _save(self, is_best: bool = False) -> None:
        # Other workers send their parts of the state once per file, and a callback may change it between the two.
        is_same = is_best and self._group.world_size == 1 and not self._callbacks.tell_checkpoints
        self.run_folder.save(self.session, self._position, is_same)
        self._group.barrier(name="the first worker to write a checkpoint")
        self._callbacks.call("on_checkpoint", self, self.latest)

    def _tell(self, error: BaseException) -> None:
        """Send the other workers the reason for the stop, unless all stop for the same reason."""
        is_alike = TrainingInterrupted if self._steps_alone else NonFiniteLossError | TrainingInterrupted
        if not isinstance(error, is_alike):
            self._group.fail(error)

    def _stopped_by(self, error: BurnishError) -> BurnishError:
        """Save the state; return the error with the path of the checkpoint and, for a non-finite loss, with advice."""
        position = self._position
        text = f"{str(error).rstrip('.')}. Training stopped in epoch {position.epoch + 1}, batch {position.batch + 1}"
        is_saved = False
        try:
            if self.run_folder.is_kept:
                self.run_folder.save(self.session, self._position)
                text += f"; the state before it is saved in '{self.latest}'"
                is_saved = True
        except (CallbackError, CheckpointError, WorkerError):
            text += f"; '{self.latest}' holds the last state that was whole" if self.latest.exists() else ""
        if isinstance(error, NonFiniteLossError):
            text += self._advice(is_saved)
        return WorkerError(text, error.comes_again) if isinstance(error, WorkerError) else type(error)(text)

    def _advice(self, is_saved: bool) -> str:
        """Return advice on a non-finite loss, which comes from the state before the step, whatever its rate.

        Args:
            is_saved: True if the latest checkpoint has that state, from which no rate helps.
        """
        position = self._position
        if position.step == self._first_step:
            began = "The run begins with it" if not position.step else "The state that the run went on from gives it"
            remedy = (
                "look at the scale of the inputs and of what they are compared with, at the weights, and at the precision"
                if not position.step
                else "begin again with a lower rate than it was trained with"
            )
            return f". {began}, before a step is taken, so that no learning rate changes it: {remedy}"
        rate = self._rates.at(position.step, self.steps)
        if rate is not None:
            advice = f". Try a learning rate below {rate:.3g}, such as {rate / 10:.3g}, from the start"
        elif position.rate is not None:
            advice = f". The step before had a learning rate of {position.rate:.3g}: compile with a schedule that stays below it"
        else:
            return ""
        best = position.best
        if not self.run_folder.is_kept:
            return advice
        if not is_saved and self.latest.exists():
            return advice + " or from there (resume)" * (rate is not None)
        if best is not None and math.isfinite(best["value"]) and self._keeps_best():
            advice += f"; or start a new run in the state after epoch {best['epoch']} (start_from, --start-from '{self.best}')"
        return advice

    def _keeps_best(self) -> bool:
        try:
            return self.best.exists()
        except OSError:
            return False

    def _wish(self) -> int:
        if self._stop.noted is not None:
            return workers.TERMINATE if self._stop.noted == signal.SIGTERM else workers.INTERRUPT
        return workers.GO_ON if self._callbacks.stop_reason is None else workers.STOP

    def _stop_if_asked(self) -> None:
        alone = self._group.world_size == 1
        wish = self._wish() if alone else self._stop_vote.passed()
        if wish == workers.GO_ON:
            return
        self._stop.taken()
        self._save()
        if wish == workers.STOP:
            raise StoppedByCallback
        number = signal.SIGTERM if wish == workers.TERMINATE else signal.SIGINT
        checkpoint = self.latest if self.run_folder.is_kept else None
        raise TrainingInterrupted(checkpoint, self._position.epoch, self._position.batch, number)

    def _draw(self, at_once: bool = False) -> None:
        reason = self.run_folder.draw(at_once)
        if reason is not None:
            self._progress.note(reason)


def _steps_alone(parallel: DataParallel | None) -> bool:
    return parallel is not None and bool(parallel.synchronize_every)


def _evaluation_only(program: Program, reported: Collection[str]) -> list[str]:
    """Return the figures that only evaluation has: those over whole data sets, such as average precision."""
    totals = (total_of(entry.name) for entry in program.signature["evaluate"].outputs)
    names = dict.fromkeys(total[0] for total in totals if total is not None)
    return [name for name in names if name not in reported and name.partition(":")[0] != "loss"]


def _watched_figure(program: Program, best_metric: str | None, data: RunData) -> str:
    """Return the figure that decides the best epoch; with evaluation data, it may be one over whole data sets."""
    signature = program.signature["step"]
    reported = [entry.name for entry in (*signature.outputs_of(Role.METRIC), *signature.outputs_of(Role.LOSS))]
    # Metrics first, as the reported figures also include the terms of a loss.
    metrics = [name for name in program.options.get("metrics", ()) if name in reported or data.evaluation is not None]
    names = [*metrics, *(name for name in reported if name not in metrics)]
    if best_metric is None:
        return names[0]
    if best_metric not in names:
        raise ConfigurationError(
            f"best_metric: the program reports no '{best_metric}'; it reports {', '.join(repr(name) for name in names)}. "
            "Name one of these, or compile with metrics=[...]"
        )
    return best_metric

"""One run of ``burnish train`` on this worker: from its options to the tuned model."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.adapters.exports import ONNX_ADAPTER, check_form
from burnish.adapters.peft_format import check_names
from burnish.cli import launch
from burnish.cli.compilation_options import FORMS, Compilation, is_program, untrained_weights_named
from burnish.cli.console import columns_line, counted, export_line, output, planned_line, waiting_line, what_trains
from burnish.cli.data_options import Pixels, TextOptions, pixels_line
from burnish.cli.optimizer_options import CONSTANT, kept_average, rate_of, take_over_checkpoints, updates_of, with_schedule
from burnish.cli.resumption import OWN_OPTIONS, WORKING_FOLDER
from burnish.cli.run_folders import CONFIGURATION
from burnish.cli.train_options import Course, Data, Results, Watching, check_overwritten
from burnish.compiler.options import STEPS_PER_EPOCH
from burnish.data import DataDescription, Dataset, DataSpec, Text, TextDataset, open_dataset
from burnish.data.splitting import held_out, parts, read_split
from burnish.data.text.chat_template import SETTINGS_FILES, TokenizerSettings
from burnish.data.text.settings import TOKENIZER
from burnish.distributed import DataParallel
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.errors import CarryOverWarning, CheckpointError, NonFiniteLossError
from burnish.files.file_writing import replacing, write_text
from burnish.finetuning.choices import remove_tuning
from burnish.finetuning.planning import Trial
from burnish.finetuning.preparation import folding_said
from burnish.finetuning.tune import metrics_entry, take_best
from burnish.program import Program
from burnish.program.carry_over import NOT_THERE
from burnish.stopping import Terminated
from burnish.training.callbacks import Callback, HtmlReport
from burnish.training.checkpoint import read_checkpoint
from burnish.training.environment import environment, peak_resident_bytes, session_line
from burnish.training.run_data import batches_per_epoch, within_the_model
from burnish.training.run_files import RECORD, RESULTS, CheckpointFolder, best_of, exported_epoch, read_record, remove_results
from burnish.training.run_folder import RunLock
from burnish.training.run_results import TrainingInterrupted, TrainingResult
from burnish.training.session import Session
from burnish.training.trainer import Trainer
from burnish.training.workers import on_all, on_first

TUNED = "tuned.onnx"
PEFT = "peft"
EARLIER_UPDATES = "earlier_updates"
"""Key in the record of a run: updates in its first state, after which its schedule begins."""


@dataclass
class TrainingRun:
    """A run in a folder: a new or a resumed one.

    Attributes:
        model, data, pixels, texts, compilation, course, results, watching: options of the command line.
        command: arguments of the command line, to print and to store.
        configuration: text of the file that repeats the run, to store.
        parallel, group: the workers, from ``join_workers``.
        callbacks: callbacks of the trainer.
        is_tuning: True to export the best epoch, with its figures, if there are evaluation data.
        earlier: folders of the earlier stages.
        best_of_all: True to export an epoch of an earlier stage if it is the best.
        adapter_forms: forms in which adapters are also written; None: according to the options of compilation.
        trial: compiled trial of the model with all options except the rate, used by a new run; None: compile it.
        otherwise: options of the command that differ from the resumed run's.
        split_seed: seed of the held-out part; None: that of the run.
        split_folder: folder with the stored held-out part; None: the run's own.
        going_on: command line that resumes the run.
        own_options: options of the command to record besides ``configuration``, for resuming.

    Raises:
        ConfigurationError: the folder has a run, and the options do not tell what to do with it.
        WorkerError: the same, on all workers but the first.
    """

    model: Path
    data: Data
    pixels: Pixels
    texts: TextOptions
    compilation: Compilation
    course: Course
    results: Results
    watching: Watching
    command: Sequence[str]
    configuration: str
    parallel: DataParallel | None
    group: ProcessGroup
    callbacks: Sequence[Callback] = ()
    is_tuning: bool = False
    earlier: Sequence[Path] = ()
    best_of_all: bool = False
    adapter_forms: Sequence[str] | None = None
    trial: Trial | None = None
    otherwise: Sequence[str] = ()
    split_seed: int | None = None
    split_folder: Path | None = None
    going_on: str = ""
    own_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.results.folder is not None
        self.folder = self.results.folder
        self.checkpoints = CheckpointFolder(self.folder / "checkpoints")
        self.console = output(quiet=self.group.rank > 0)
        self.lock: RunLock | None = None
        self.carried_over: list[str] = []
        self.earlier_updates = 0
        self.resumes: bool = on_first(self.group, self._resumes, "the folder of the run")
        self.start = None if self.resumes else self.course.start_from
        if self.start is not None and self.start.is_dir():
            self.start = CheckpointFolder(self.start / "checkpoints").latest
        # A resumed run has its original program, compiled from the file next to it.
        rate = self.compilation.optimizer.lr
        self.optimizer = None if self.trial is None or self.resumes or rate is None else self.trial.optimizer(rate)

    def train(self) -> TrainingResult | None:
        """Train to the last epoch, and write the tuned model.

        Returns:
            The result of the run; None on all workers but the first.

        Raises:
            KeyboardInterrupt: Ctrl-C, or Terminated for SIGTERM; the message has the command line for resuming.
            BurnishError: an error of compilation, the data or training.
        """
        if self.resumes:
            on_first(self.group, self._lock_folder, "the folder of the run")
        try:
            return self._train()
        finally:
            if self.lock is not None:
                self.lock.release()

    def _lock_folder(self) -> None:
        """Reject a folder with an active run of another process, before anything in it is changed."""
        if self.folder.is_dir():
            self.lock = RunLock(self.folder)

    def _train(self) -> TrainingResult | None:
        earlier = on_first(self.group, self._earlier_metadata, "the checkpoint")
        kept = on_first(self.group, self._kept_split, "what is held out")
        prepared = on_all(self.group, lambda: self._prepare(earlier, kept), "compile the model and read the data")
        program, train_set, eval_set = prepared
        course = {
            "lr": rate_of(program.options["optimizer"] if self.optimizer is None else self.optimizer.options()),
            "schedule": self.compilation.optimizer.schedule,
            "warmup": self.compilation.optimizer.warmup,
            "epochs": self.course.epochs,
        }
        program = self._with_schedule(program, len(train_set))
        if self.resumes:
            on_first(self.group, lambda: take_over_checkpoints(self.folder, program), "the checkpoints")
        command = launch.command_line(self.command)
        report = self.watching.html_report(self.configuration, command, kept_average(program), self.earlier)
        callbacks = [*self.callbacks, *self.watching.loggers(self.folder, kept_average(program))]
        if report is not None and not self.is_tuning:  # tuning first restores the best epoch
            callbacks.append(report)
        try:
            trainer = self._trainer(program, train_set, eval_set, callbacks)
        except CheckpointError as error:
            if not self.otherwise:
                raise
            raise CheckpointError(f"{error}. This command has other options than the run: {'; '.join(self.otherwise)}") from error
        if self.start is not None:
            self._start_from(trainer, self.start)
        if not (self.resumes or self.start or self.course.reinitialize or is_program(self.model)):
            trainer.session.compare_with(self.model)
        session = trainer.session.describe()
        self._say(session_line(session))
        if self.resumes:
            for note in self._changes(course):
                self._say(note)
            if self.group.rank == 0:
                write_text(self.folder / CONFIGURATION, self.configuration)
                self._add_to_record({"session": session, **self._of_command})
        elif self.group.rank == 0:
            self._record(program, DataDescription.of(train_set), course, session)
        if self.watching.profile and self.group.rank == 0:
            self.watching.write_profile(trainer, self.folder, self.course.device, self.course.threads)
        try:
            result = trainer.run()
        except (TrainingInterrupted, NonFiniteLossError) as error:
            if report is not None and self.is_tuning:
                report.on_run_end(trainer, error)
            if isinstance(error, NonFiniteLossError):
                raise
            stopped = Terminated if error.signal == signal.SIGTERM else KeyboardInterrupt
            raise stopped(f"{error}:\n  {self.going_on}") from error
        if self.group.rank:
            trainer.session.take_part()
            return None
        figures = self._take_best(trainer, result, eval_set is not None, report) if self.is_tuning else None
        self._record_end(result, figures)
        tuned, fold, parameters = self.tuned, self.results.fold, kept_average(program)
        trainer.session.export(tuned, fold_norm=fold, parameters=parameters)
        self._write_adapters(trainer.session, parameters)
        if (best := result.best) is not None and eval_set is not None and not (figures and "stage" in figures):
            self._say(f"best {best['metric']} {best['value']:.4f} in epoch {best['epoch']}: {trainer.best}")
        self._say(waiting_line(result.waiting))
        self._say(export_line(tuned, "the tuned model,", result.steps, program, fold, parameters))
        if (fed := columns_line(tuned, trainer.session)) is not None:
            self._say(fed)
        return result

    def _take_best(
        self, trainer: Trainer, result: TrainingResult, is_evaluated: bool, report: HtmlReport | None
    ) -> dict[str, Any]:
        folders = self.earlier if self.best_of_all else ()
        earlier = [(best_of(folder), CheckpointFolder(folder / "checkpoints").best) for folder in folders]
        figures = take_best(trainer, result, is_evaluated, earlier)
        trainer.session.metadata |= metrics_entry(figures)
        words = f"the state after epoch {figures['epoch']}"
        if "stage" in figures:
            words += f" of stage {figures['stage']}, the best of all stages"
        elif is_evaluated:
            words += ", the best"
        exported = exported_epoch(figures)
        if report is not None:
            report.best, report.judged = exported, words
            report.on_run_end(trainer, None)
        self._say(f"{TUNED}: {words}")
        if exported is not None and "stage" in exported:
            self._say(f"best {exported['metric']} {exported['value']:.4f}: {trainer.best}")
        return figures

    def _write_adapters(self, session: Session, parameters: str | None) -> None:
        for form in self._adapter_forms:
            path = self.folder / (form if form == PEFT else f"{form}.onnx")
            session.export(path, parameters=parameters, adapters=form)
            self._say(f"{path}: {FORMS[form]}")

    @property
    def tuned(self) -> Path:
        return self.results.export or self.folder / TUNED

    @property
    def _adapter_forms(self) -> Sequence[str]:
        forms = self.compilation.adapters.save_adapters if self.adapter_forms is None else self.adapter_forms
        return forms or ()

    def _say(self, line: str) -> None:
        self.console.print(line)

    def _resumes(self) -> bool:
        """True if the run in the folder is resumed; a folder with another run is rejected."""
        exists = self.checkpoints.exists
        if self.results.resume:
            return True
        if exists and (launch.is_restart() or (launch.run_id() and read_record(self.folder).get("launch") == launch.run_id())):
            return True
        if exists:
            check_overwritten(self.folder, self.results)
        return False

    def _earlier_metadata(self) -> Mapping[str, str]:
        """The metadata on data from the resumed run, or from the checkpoint that the run starts from."""
        if self.resumes:
            return self.checkpoints.metadata
        return {} if self.start is None else read_checkpoint(self.start).metadata

    def _kept_split(self) -> dict[str, Any] | None:
        folder = self.split_folder or (self.folder if self.resumes else None)
        return None if self.data.split is None or folder is None else read_split(folder)

    def _prepare(self, earlier: Mapping[str, str], kept: dict[str, Any] | None) -> tuple[Program, Dataset, Dataset | None]:
        """Return the program and the data; ``earlier`` is their metadata, ``kept`` the stored held-out part."""
        with folding_said() if self.is_tuning else nullcontext():
            program, seconds = self._compiled()
        for form in self._adapter_forms:
            check_form(form, program.metadata)
            if form == PEFT:
                check_names(program.metadata)
        done = "loaded" if is_program(self.model) else "compiled"
        self._say(f"{self.model}: {done} in {seconds:.1f} s; {what_trains(program, not self.is_tuning)}")
        if self.compilation.options.recompute is not None:
            self._say(planned_line(program, self.course.batch_size))
        data = self.data
        spec = DataSpec.by(program, earlier)
        if self.resumes or self.start is not None:  # columns are read as before, or raw if they were
            spec = replace(spec, is_training=False)
        train_set, cut = self._opened(program, spec)
        eval_set = None
        if data.split is not None:
            seed = self.course.seed if self.split_seed is None else self.split_seed
            train_set, eval_set = parts(train_set, held_out(train_set, data.split, seed, spec.label, kept))
        program = self._with_epochs(program, len(train_set))
        described = DataDescription.of(train_set)
        line = f"{data.data}: {counted(len(train_set), 'sample')}"
        if described.classes:
            line += " of 1 class" if len(described.classes) == 1 else f" of {len(described.classes)} classes"
        if data.eval_data is not None:
            eval_set = open_dataset(
                data.eval_data,
                spec.like(described),
                label=data.label,
                classes=described.classes,
                image_size=data.image_size,
                text=train_set.text if isinstance(train_set, TextDataset) else None,
                missing=data.missing,
                label_separator=data.label_separator,
            )
            line += f"; {data.eval_data}: {counted(len(eval_set), 'sample')} to evaluate on"
        elif eval_set is not None:
            line += f" to train on, {len(eval_set):,} to evaluate on"
        self._say(line)
        if (line_of_pixels := pixels_line(described, spec, self.pixels)) is not None:
            self._say(line_of_pixels)
        if described.sound is not None:
            self._say(f"sound: {described.sound.text()}")
        if described.text is not None:
            self._say(f"texts: {described.text.text()}")
        if cut is not None:
            self._say(cut)
        return program, train_set, eval_set

    def _compiled(self) -> tuple[Program, float]:
        """The program at a constant rate (for a trial, not yet the run's), and the seconds of compiling."""
        if self.trial is not None and self.optimizer is not None:
            with untrained_weights_named():
                return self.trial.taken(), self.trial.seconds
        begin = time.monotonic()
        program = self.compilation.program(self.model, self.course.batch_size, steps_per_epoch=1)
        return program, time.monotonic() - begin

    def _opened(self, program: Program, spec: DataSpec) -> tuple[Dataset, str | None]:
        data, asked = self.data, self.texts.settings()
        options: dict[str, Any] = {
            "label": data.label,
            "label_separator": data.label_separator,
            "image_size": data.image_size,
            "missing": data.missing,
            "columns": data.columns,
        }

        def opened(text: Text | None) -> Dataset:
            told: dict[str, Any] = {"pixels": self.pixels.settings(), "sound": data.sound, "split": data.split}
            return open_dataset(data.data, spec, text=text, **told, **options)

        return within_the_model(program, opened(asked), asked, opened)

    def _with_epochs(self, program: Program, samples: int) -> Program:
        """Return the program with the steps per epoch, if something in it counts epochs."""
        steps = batches_per_epoch(program, samples, self.course.batch_size, self.group.world_size)
        if STEPS_PER_EPOCH not in program.options or is_program(self.model) or steps == 1:
            return program
        return self.compilation.program(self.model, self.course.batch_size, steps_per_epoch=steps)

    def _with_schedule(self, program: Program, samples: int) -> Program:
        """Return the program with the learning rate of this run, which begins after the updates in a checkpoint.

        A resumed run reads their number from its folder.
        """
        start = self.start
        if start is not None:
            self.earlier_updates = on_first(
                self.group, lambda: updates_of(read_checkpoint(start), program), f"the checkpoint '{start}'"
            )
        elif self.resumes:
            self.earlier_updates = on_first(
                self.group, lambda: int(read_record(self.folder).get(EARLIER_UPDATES) or 0), "the record of the run"
            )
        steps = self.course.epochs * batches_per_epoch(program, samples, self.course.batch_size, self.group.world_size)
        remedy = "give fewer --warmup steps, or more --epochs"
        schedule, warmup = self.compilation.optimizer.schedule, self.compilation.optimizer.warmup
        return with_schedule(program, schedule, warmup, steps, remedy, self.earlier_updates, self.optimizer)

    def _trainer(self, program: Program, train_set: Dataset, eval_set: Dataset | None, callbacks: Sequence[Callback]) -> Trainer:
        course = self.course
        return Trainer(
            program,
            train_set,
            eval_set,
            **{**course.run_options(), "engine": course.chosen_engine()},
            run_directory=self.folder,
            resume=self.resumes,
            overwrite=self.results.overwrite and not self.resumes,
            parallel=self.parallel,
            parameters=kept_average(program),
            state=self._initial_state(program),
            augment=self.data.augment,
            data_workers=self.data.data_workers,
            callbacks=callbacks,
        )

    def _initial_state(self, program: Program) -> Mapping[str, np.ndarray] | None:
        """The initial state of a run that does not start from the model's weights; tables in files are initialized in place."""
        course = self.course
        if not course.reinitialize or self.resumes:
            return None if self.resumes else program.saved_state
        initial = program.initial_state if course.tables is None else program.initial_entries
        return initial(course.seed, course.reinitialize)

    def _start_from(self, trainer: Trainer, checkpoint: Path) -> None:
        """Begin with the state of a checkpoint, and print what was not carried over."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CarryOverWarning)
            trainer.start_from(checkpoint)
        for warning in caught:
            self.carried_over.append(str(warning.message))
            self._say(_of_stage(warning.message) if self.is_tuning else str(warning.message))

    def _changes(self, course: Mapping[str, object]) -> list[str]:
        started = read_record(self.folder).get("course")
        if not isinstance(started, dict) or not course.keys() <= started.keys():
            started = course
        # More epochs are the usual reason to resume; they change further steps only if the rate follows a schedule.
        names = [name for name in course if name != "epochs" or course["schedule"] != CONSTANT]
        notes = [
            f"--{name} {course[name]} is taken from here on; the run was started with {started[name]}"
            for name in names
            if course[name] != started[name]
        ]
        if self.course.reinitialize:
            notes.append("--reinitialize is not taken: a resumed run goes on with the weights that it has")
        said = (*(f"--{name} " for name in (*course, "reinitialize")), "MODEL ", "model ")
        return notes + [f"taken from here on: {option}" for option in self.otherwise if not option.startswith(said)]

    @property
    def _of_command(self) -> dict[str, Any]:
        return {OWN_OPTIONS: dict(self.own_options), WORKING_FOLDER: os.getcwd()}

    def _record_end(self, result: TrainingResult, tuned: Mapping[str, Any] | None) -> None:
        ending = {"best": result.best, "tuned": tuned, "stopped": result.stopped, "peak_bytes": peak_resident_bytes()}
        self._add_to_record({"result": ending})

    def _add_to_record(self, entries: Mapping[str, Any]) -> None:
        record = {**read_record(self.folder), **entries}
        write_text(self.folder / RECORD, json.dumps(record, indent=1) + "\n")

    def _record(
        self, program: Program, described: DataDescription, course: Mapping[str, Any], session: Mapping[str, Any]
    ) -> None:
        tokenizer = (
            None if self.texts.tokenizer is None else self.texts.tokenizer.read_bytes()
        )  # may be the file that is replaced
        beside = self._beside_tokenizer(described)
        remove_results(self.folder)  # results of the overwritten run would look like this run's
        if not self.is_tuning:
            remove_tuning(self.folder, self.model)
        program.save(self.folder / "program")
        if tokenizer is not None:
            with replacing(self.folder / TOKENIZER) as partial:
                partial.write_bytes(tokenizer)
            for name in SETTINGS_FILES:
                (self.folder / name).unlink(missing_ok=True)
        for name, text in beside.items():
            write_text(self.folder / name, text)
        record = {
            "command": launch.command_line(self.command),
            "model": str(self.model),
            "data": self.data.data,
            "eval_data": self.data.eval_data,
            "reading": {"label": self.data.label, "image_size": self.data.image_size, "missing": self.data.missing},
            "classes": described.classes,
            "pixels": None if described.preprocessing is None else described.preprocessing.options(),
            "text": None if described.text is None else described.text.options(),
            "sound": None if described.sound is None else described.sound.options(),
            "course": course,
            EARLIER_UPDATES: self.earlier_updates,
            "launch": launch.run_id(),
            "carried_over": self.carried_over,
            "parameters": kept_average(program),
            "environment": environment(),
            "session": session,
            "batch_size": self.course.batch_size,
            **self._of_command,
            RESULTS: self._results(),
        }
        write_text(self.folder / CONFIGURATION, self.configuration)
        write_text(self.folder / RECORD, json.dumps(record, indent=1) + "\n")

    def _beside_tokenizer(self, described: DataDescription) -> dict[str, str]:
        """The files stored with the tokenizer of a causal model: special tokens and a chat template."""
        if self.texts.tokenizer is None or described.text is None or described.text.task != "causal":
            return {}
        return TokenizerSettings.beside(self.texts.tokenizer).with_template(self.texts.chat_template).files()

    def _results(self) -> list[str]:
        """Requested result files inside the run folder, which an overwriting run removes."""
        asked = [self.watching.report, self.results.export, self.watching.tensorboard]
        for form in self._adapter_forms:
            file = self.folder / (form if form == PEFT else f"{form}.onnx")
            asked += [file] if form == PEFT else [file, file.with_suffix(ONNX_ADAPTER), file.with_suffix(".safetensors")]
        here = self.folder.absolute()
        paths = [path.absolute() for path in asked if path is not None]
        return [str(path.relative_to(here)) for path in paths if here in path.parents]


def _of_stage(warning: Warning | str) -> str:
    """Return a note on state that a stage does not carry over, a short one if that is expected.

    A stage with cached features has no state of the layers before them, which remain as in the start model.
    """
    if not isinstance(warning, CarryOverWarning) or warning.dropped or {*warning.fresh.values()} != {NOT_THERE}:
        return str(warning)
    weights = sum(name.startswith(("param/", "stat/")) for name in warning.fresh)
    parts = [f"{counted(weights, 'tensor')} that had not trained yet come from the start model"] if weights else []
    if others := len(warning.fresh) - weights:
        parts.append(f"{counted(others, 'tensor')} of the optimizer begin anew")
    return f"stage: {'; '.join(parts)} ({RECORD} names them)"

"""One run of ``burnish finetune``: each of its stages is a run of ``burnish train`` in its own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from burnish import losses
from burnish.cli.compilation_options import Compilation
from burnish.cli.console import output
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.optimizer_options import OptimizerOptions
from burnish.cli.option_groups import values_of
from burnish.cli.repetition import configuration_of
from burnish.cli.resumption import OTHERWISE, own_options
from burnish.cli.train_options import Course, Data, Results, Watching, check_overwritten
from burnish.cli.training_run import TrainingRun
from burnish.compiler.options import CompileOptions
from burnish.data import Dataset, open_dataset
from burnish.data.splitting import held_out, parts, read_split, split_of
from burnish.distributed.connection.process_group import ProcessGroup
from burnish.files.file_writing import write_text
from burnish.files.model_file import save_model
from burnish.finetuning.choices import ACCURACIES, START, Choices, remove_stages
from burnish.finetuning.planning import Plan, Trial, warmup_steps
from burnish.finetuning.tune import Run
from burnish.training.callbacks import EarlyStopping
from burnish.training.run_files import CheckpointFolder
from burnish.training.run_results import STAGES, TrainingResult
from burnish.training.trained_model import open_model

MIXES = ("mixup", "cutmix")
"""Changes made in the graph."""


@dataclass
class TuningRun(Run):
    """A run in a folder, which is also the folder of its last stage.

    Attributes:
        context, data, pixels, texts, course, results, watching: options of the command.
        patience: patience of early stopping.
        adapter_forms: forms in which adapters are also written.
        going_on: command line that resumes the run.
        trials: compiled trials of the stages; empty for a resumed run.
    """

    context: typer.Context
    data_options: Data
    pixels: Pixels
    texts: TextOptions
    course: Course
    results: Results
    watching: Watching
    patience: int | None
    adapter_forms: Sequence[str]
    going_on: str
    trials: Sequence[Trial | None] = ()

    def say(self, line: str) -> None:
        output().print(line)

    def begun(self) -> Choices | None:
        if self.resumes:
            return Choices.read(self.folder)
        earlier = self.folder / STAGES
        places = [self.folder, *(earlier.iterdir() if earlier.is_dir() else ())]
        if any(CheckpointFolder(place / "checkpoints").exists for place in places):
            check_overwritten(self.folder, self.results)
        return None

    def begin(self, choices: Choices, planned: Plan, dataset: Dataset) -> None:
        """Write the model with its head and the choices into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_stages(self.folder)
        save_model(planned.transfer.model, self.folder / START)
        if (split := split_of(dataset)) is not None:
            split.write(self.folder)
        choices.write(self.folder)
        trials = [planned.trial(stage) for stage in planned.stages]
        self.trials = [None if trial is None else trial.read_from(self.folder / START) for trial in trials]

    def train(self, choices: Choices, number: int, quantized: Path | None, loss: losses.Loss) -> tuple[Path, TrainingResult]:
        """Train a stage from the state of the previous one.

        Of the floating-point stages, the best epoch of any counts.
        """
        count, is_whole = len(choices.stages), choices.is_whole(number)
        places = [*(self.folder / STAGES / str(each) for each in range(1, count)), self.folder]
        is_last, earlier = number + 1 == count, places[:number]
        chosen = {"epochs": self.course.epochs, "lr": choices.lr, "batch_size": choices.batch_size}
        run = TrainingRun(
            quantized or self.folder / START,
            _unmixed(self.data_options),
            self.pixels,
            self.texts,
            _compilation_of(choices, number, loss),
            self._course(choices, number, earlier[-1] if earlier and quantized is None else None),
            self._results(places[number], is_last),
            self.watching if count == 1 else self.watching.of_stage(number + 1, is_last),
            self.context.meta["burnish.arguments"],
            configuration_of(self.context, seed=self.course.seed, **chosen),
            None,
            ProcessGroup(0, 1),
            [EarlyStopping(self.patience)] if is_whole and self.patience is not None else [],
            is_tuning=True,
            earlier=earlier,
            best_of_all=is_whole and quantized is None,
            adapter_forms=self.adapter_forms if is_last else (),
            trial=self.trials[number] if number < len(self.trials) else None,
            otherwise=self.context.meta.get(OTHERWISE, ()),
            split_seed=self.course.seed,
            split_folder=self.folder,
            going_on=self.going_on,
            own_options=own_options(self.context),
        )
        result = run.train()
        assert result is not None
        return run.tuned, result

    def data(self, tuned: Path, is_evaluation: bool) -> Dataset | None:
        options = self.data_options
        source = options.data if options.split is not None or not is_evaluation else options.eval_data
        if source is None:
            return None
        opened = open_model(tuned)
        described = opened.described
        dataset = open_dataset(
            source,
            opened.to_evaluate,
            label=options.label,
            classes=described.classes,
            image_size=options.image_size,
            pixels=self.pixels.settings() if described.preprocessing is None else None,
            text=self.texts.settings_for(tuned, source, described),
            missing=options.missing,
            split=options.split,
            label_separator=options.label_separator,
        )
        if options.split is None:
            return dataset
        kept = read_split(self.folder)
        split = held_out(dataset, options.split, self.course.seed, opened.to_evaluate.label, kept)
        return parts(dataset, split)[is_evaluation]

    def end(self, figures: Mapping[str, Any]) -> None:
        write_text(self.folder / ACCURACIES, json.dumps(figures, indent=1) + "\n")

    def _course(self, choices: Choices, number: int, earlier: Path | None) -> Course:
        """The course of a stage: its epochs, starting from the previous stage, in its own order."""
        stage, before = choices.stages[number], sum(stage.epochs for stage in choices.stages[:-1])
        grows = number + 1 == len(choices.stages) and not stage.quantized
        return replace(
            self.course,
            epochs=max(self.course.epochs - before, 1) if grows else stage.epochs,
            batch_size=choices.batch_size,
            seed=self.course.seed + number,
            start_from=earlier,
        )

    def _results(self, place: Path, is_last: bool) -> Results:
        """The results options of a stage; it resumes if its folder has checkpoints."""
        resumes = self.resumes and CheckpointFolder(place / "checkpoints").exists
        return replace(
            self.results,
            folder=place,
            resume=resumes,
            overwrite=self.results.overwrite or (self.resumes and not resumes),
            export=self.results.export if is_last else None,
            fold=self.results.fold and is_last,
        )


def _unmixed(data: Data) -> Data:
    parts = [] if data.augment is None else [part.strip() for part in data.augment.split(",")]
    rest = [part for part in parts if part.partition(":")[0] not in MIXES]
    return replace(data, augment=",".join(rest) or None)


def _compilation_of(choices: Choices, number: int, loss: losses.Loss) -> Compilation:
    stage = choices.stages[number]
    steps = stage.epochs * -(-choices.samples // choices.batch_size)
    scaled = [f"{name}=lr_scale={group['lr_scale']}" for name, group in stage.groups.items() if group != "frozen"]
    frozen = [name for name, group in stage.groups.items() if group == "frozen"]
    return Compilation(
        optimizer=OptimizerOptions(
            optimizer=choices.optimizer,
            lr=choices.rate(stage),
            group=scaled or None,
            freeze=frozen or None,
            layer_decay=None if stage.quantized else choices.layer_decay,
            schedule=choices.schedule,
            warmup=warmup_steps(steps, choices.schedule),
        ),
        options=CompileOptions(
            **values_of(CompileOptions, outputs=choices.outputs, metrics=[*choices.metrics]),
            batch=None if stage.quantized else choices.batch,
            loss=loss.options(),
            cached_features="auto" if stage.cached else None,
        ),
    )

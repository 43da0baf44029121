"""``burnish finetune``: a file that somebody else has trained learns other data, with as little to say as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from burnish.cli.compilation_options import AdapterOptions, ModelArgument, for_language, is_program
from burnish.cli.configuration import OTHERWISE, Repetition, configuration_of
from burnish.cli.data_options import Pixels, TextOptions, check_data_options
from burnish.cli.finetuning_choices import (
    OBJECTS,
    STAGES,
    START,
    QuantizedStage,
    Tuning,
    choose,
    compilation_of,
    course_of,
    read_choices,
    results_of,
    say_precision,
    unmixed,
)
from burnish.cli.optimizer_options import check_schedule
from burnish.cli.option_groups import takes_options
from burnish.cli.seeds import check_seeds, train_with_seeds
from burnish.cli.train_options import Course, Data, Results, Watching, check_overwritten, check_results, run_folder

if TYPE_CHECKING:
    from burnish.finetuning import Trial
    from burnish.training import TrainingResult

EPOCHS = 5


@takes_options(
    *("reinitialize", "journal", "tables", "start_from", "task", "masked_share", "joined"),
    helps={
        "epochs": f"By default {EPOCHS}.",
        "batch_size": "By default 32; fewer where an epoch would have fewer than ten steps, or memory does not hold a step.",
    },
)
def finetune(
    context: typer.Context,
    model: ModelArgument,
    *,
    data: Data,
    pixels: Pixels,
    texts: TextOptions,
    tuning: Tuning,
    adapters: AdapterOptions,
    course: Course,
    results: Results,
    repetition: Repetition,
    watching: Watching,
) -> None:
    """Tune a trained model on your own classes: finds its head, chooses the learning rate, and says what it does."""
    _check_options(model, results, tuning, adapters)
    _check_data(data, pixels, results, repetition, watching)
    folder = run_folder(model, results, "-finetuned")
    check_results(folder, results, watching, data, model)
    results = replace(results, folder=folder)
    course = course if "epochs" in course.named else replace(course, epochs=EPOCHS)
    command = context.meta["burnish.arguments"]
    from burnish.training.run_files import CheckpointFolder

    def run(course: Course, results: Results) -> TrainingResult | None:
        own = run_folder(model, results)
        trials: Sequence[Trial | None] = ()
        if results.resume:
            choices = read_choices(own)
        else:
            earlier = own / STAGES
            places = [own, *(earlier.iterdir() if earlier.is_dir() else ())]
            if any(CheckpointFolder(place / "checkpoints").exists for place in places):
                check_overwritten(own, results)
            choices, trials = choose(model, own, data, pixels, texts, tuning, adapters, course)
        chosen = {name: choices[name] for name in ("lr", "batch_size")}
        configuration = configuration_of(context, seed=course.seed, epochs=course.epochs, **chosen)
        course = replace(course, batch_size=choices["batch_size"])
        watched = watching.of_seed(course.seed, repetition.seeds)
        otherwise = context.meta.get(OTHERWISE, ())
        stages = _Stages(own, choices, trials, data, pixels, texts, course, results, watched, command, configuration, otherwise)
        return stages.train(tuning.patience, adapters.save_adapters or ())

    train_with_seeds(repetition.seeds, course, results, folder, run)


@dataclass(frozen=True)
class _Stages:
    """The stages of a run, one after the other.

    Attributes:
        folder: of the run, and of its last stage.
        choices: of the run.
        trials: what was compiled of the stages when they were chosen; empty where the run goes on.
        data, pixels, texts, course, results, watching: of the command.
        command, configuration, otherwise: as ``TrainingRun`` has them.
    """

    folder: Path
    choices: Mapping[str, Any]
    trials: Sequence[Trial | None]
    data: Data
    pixels: Pixels
    texts: TextOptions
    course: Course
    results: Results
    watching: Watching
    command: Sequence[str]
    configuration: str
    otherwise: Sequence[str] = ()

    def train(self, patience: int | None, adapter_forms: Sequence[str]) -> TrainingResult | None:
        """Train them all; the last writes adapters by themselves, where that is asked for.

        The last stage in floating-point numbers stops early, and so does the one in integers: all layers train in these. Of the
        stages in floating-point numbers the best epoch counts, whichever stage it is of.
        """
        from burnish.cli.training_run import TrainingRun
        from burnish.distributed.connection.process_group import ProcessGroup
        from burnish.training.callbacks import EarlyStopping

        result, earlier, stages = None, None, self.choices["stages"]
        places = [self.folder / STAGES / str(number) for number in range(1, len(stages))] + [self.folder]
        for number, (stage, place) in enumerate(zip(stages, places, strict=True)):
            is_last = number == len(stages) - 1
            is_whole = is_last or bool(stages[number + 1].get("quantized"))
            options = unmixed(self.data), self.pixels, self.texts
            integers, compilation = None, compilation_of(self.choices, stage)
            if earlier is not None and stage.get("quantized"):
                integers = QuantizedStage(self.folder, earlier, self.choices, *options, self.course).begun(self.results.resume)
                compilation = replace(compilation, options=replace(compilation.options, loss=integers.loss))
            run = TrainingRun(
                self.folder / START if integers is None else integers.start,
                *options,
                for_language(compilation, self.texts),
                course_of(self.course, self.choices, number, earlier if integers is None else None),
                results_of(self.results, place, is_last),
                self.watching if len(stages) == 1 else self.watching.of_stage(number + 1, is_last),
                self.command,
                self.configuration,
                None,
                ProcessGroup(0, 1),
                [EarlyStopping(patience)] if is_whole and patience is not None else [],
                is_tuning=True,
                earlier=places[:number],
                best_of_all=is_whole and integers is None,
                adapter_forms=adapter_forms if is_last else (),
                trial=self.trials[number] if number < len(self.trials) else None,
                otherwise=self.otherwise,
            )
            result = run.train()
            if integers is not None:
                integers.end(run.tuned)
            elif is_last and self.choices["kind"] == OBJECTS:
                say_precision(run.tuned, *options, self.course)
            earlier = place
        return result


def _check_options(model: Path, results: Results, tuning: Tuning, adapters: AdapterOptions) -> None:
    """Refuse what cannot be meant, before anything is read."""
    from burnish.finetuning import check_together

    if results.resume and results.overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite drops it; give one of them")
    if model.is_dir() and is_program(model):
        raise typer.BadParameter(f"'{model}' is a compiled program, whose head cannot be replaced: give the ONNX file")
    check_schedule(tuning.schedule, 0, tuning.lr)
    check_together(tuning.quantization(), adapters.source(), None)
    if adapters.save_adapters and adapters.source() is None and not results.resume:
        raise typer.BadParameter("--save-adapters: the run trains no adapters: give --adapter lora, or leave it out")


def _check_data(data: Data, pixels: Pixels, results: Results, repetition: Repetition, watching: Watching) -> None:
    """Refuse data, seeds and loggers that cannot be."""
    check_data_options(
        data.data,
        data.eval_data,
        label=data.label,
        image_size=data.image_size,
        pixels=pixels.first_named,
        missing=data.missing,
    )
    watching.check()
    check_seeds(repetition.seeds, results, watching.report)

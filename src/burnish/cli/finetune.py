"""``burnish finetune``: train a model that somebody else has trained on other data, with few options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.compilation_options import AdapterOptions, ModelArgument, is_program
from burnish.cli.data_options import Pixels, TextOptions
from burnish.cli.optimizer_options import check_schedule
from burnish.cli.option_groups import OptionGroup, takes_options
from burnish.cli.repetition import Repetition, check_run, train_with_seeds
from burnish.cli.run_folders import claimed, folder_asked
from burnish.cli.train_options import Course, Data, Results, Watching
from burnish.finetuning.options import FinetuneOptions, TuningOptions

if TYPE_CHECKING:
    from burnish.training import TrainingResult

EPOCHS = FinetuneOptions().epochs


@dataclass(frozen=True)
class Tuning(OptionGroup):
    """Options of tuning."""

    panel: ClassVar = "Tuning"
    options: TuningOptions = TuningOptions()


@takes_options(
    *("reinitialize", "journal", "tables", "start_from"),
    defaults={
        "epochs": str(EPOCHS),
        "batch_size": "32, or fewer if data or memory are small",
        "folder": "a new one, runs/MODEL-finetuned",
        "name": "MODEL-finetuned",
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
    """Tune a trained model on your own data.

    It finds the head, chooses the learning rate, and says what it does.
    """
    course = course if "epochs" in course.named else replace(course, epochs=EPOCHS)
    _check_options(model, results, tuning, adapters)
    base = folder_asked(model, results, "-finetuned")
    check_run(model, base, data, pixels, results, watching, repetition.seeds)
    from burnish.cli.tuning_run import TuningRun
    from burnish.finetuning.tune import tune

    options = FinetuneOptions(
        **vars(tuning.options),
        **data.tuning(pixels, texts),
        epochs=course.epochs,
        batch_size=course.named_batch_size,
        adapters=adapters.source(),
        engine=course.chosen_engine(),
        device=course.device,
        threads=course.threads,
    )

    with claimed(base, results) as folder:

        def run(course: Course, results: Results) -> TrainingResult | None:
            kept = TuningRun(
                results.folder or folder,
                results.resume,
                context,
                data,
                pixels,
                texts,
                course,
                results,
                watching.of_seed(course.seed, repetition.seeds),
                tuning.options.patience,
                adapters.save_adapters or (),
                launch.resuming("finetune", folder),
            )
            return tune(model, data.data, replace(options, seed=course.seed), kept)[1]

        train_with_seeds(repetition.seeds, course, replace(results, folder=folder), folder, run)


def _check_options(model: Path, results: Results, tuning: Tuning, adapters: AdapterOptions) -> None:
    if results.resume and results.overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite drops it; give one of them")
    if model.is_dir() and is_program(model):
        raise typer.BadParameter(f"'{model}' is a compiled program, whose head cannot be replaced: give the ONNX file")
    check_schedule(tuning.options.schedule, 0, tuning.options.lr)
    if adapters.save_adapters and adapters.source() is None and not results.resume:
        raise typer.BadParameter("--save-adapters: the run trains no adapters: give --adapter lora, or leave it out")

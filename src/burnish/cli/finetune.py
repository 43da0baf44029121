"""``burnish finetune``: a file that somebody else has trained learns other data, with as little to say as possible."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from burnish.cli.compilation_options import Compilation, ModelArgument, is_program
from burnish.cli.configuration import Repetition, configuration_of
from burnish.cli.console import output
from burnish.cli.data_options import check_data_options
from burnish.cli.optimizer_options import OptimizerOptions
from burnish.cli.option_groups import OptionGroup, takes_options
from burnish.cli.pixel_options import Pixels
from burnish.cli.seeds import check_seeds, train_with_seeds
from burnish.cli.text_options import TextOptions, for_language
from burnish.cli.train_options import Course, Data, Results, run_folder
from burnish.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from burnish.training import TrainingResult

EPOCHS = 5
CHOICES, START = "finetune.json", "start.onnx"
"""What was chosen, and the model with its new head, in the folder of the run."""


@dataclass(frozen=True)
class Tuning(OptionGroup):
    """What is tuned, and how fast."""

    panel: ClassVar = "Tuning"
    freeze_until: Annotated[
        str | None,
        typer.Option(
            "--freeze-until",
            metavar="NAME",
            help="head: train the head alone. Or a node, or a name or pattern of weights: leave what comes before the first of "
            "these as it is.",
        ),
    ] = None
    lr: Annotated[float | None, typer.Option("--lr", help="Learning rate; by default found by some trial steps.")] = None
    outputs: Annotated[
        str | None, typer.Option("--outputs", metavar="NAME", help="The output with the classes, where there are several.")
    ] = None


@takes_options("reinitialize", "journal", "tables", "start_from", "task", "masked_share", "joined")
def finetune(
    context: typer.Context,
    model: ModelArgument,
    *,
    data: Data,
    pixels: Pixels,
    texts: TextOptions,
    tuning: Tuning,
    course: Course,
    results: Results,
    repetition: Repetition,
) -> None:
    """Tune a trained model on your own classes: finds its head, chooses the learning rate, and says what it does."""
    if results.resume and results.overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite drops it; give one of them")
    if is_program(model):
        raise typer.BadParameter(f"'{model}' is a compiled program, whose head cannot be replaced: give the ONNX file")
    check_data_options(data.data, data.eval_data, label=data.label, image_size=data.image_size, pixels=pixels.first_named)
    check_seeds(repetition.seeds, results)
    folder = run_folder(model, results, "-finetuned")
    results = replace(results, folder=folder)
    if "epochs" not in course.named:
        course = replace(course, epochs=EPOCHS)
    from burnish.cli.training_run import TrainingRun
    from burnish.distributed.connection.process_group import ProcessGroup

    command, alone = context.meta["burnish.arguments"], ProcessGroup(0, 1)

    def run(course: Course, results: Results) -> TrainingResult | None:
        own = run_folder(model, results)
        if results.resume:
            choices = _read(own)
        else:
            check_free(own, results.overwrite)
            choices = _choose(model, own, data, pixels, texts, tuning, course)
        compilation = for_language(_compilation(choices), texts)
        configuration = configuration_of(context, seed=course.seed, epochs=course.epochs, lr=choices["lr"])
        options = (data, pixels, texts, compilation, course, results)
        return TrainingRun(own / START, *options, command, configuration, None, alone).train()

    train_with_seeds(repetition.seeds, course, results, folder, run)


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise ConfigurationError where the folder holds a run that is not to be overwritten."""
    from burnish.training.checkpoint_folder import CheckpointFolder

    if CheckpointFolder(folder / "checkpoints").exists and not overwrite:
        raise ConfigurationError(
            f"'{folder}' holds a run already: go on with it (--resume), start anew in it (--overwrite), or name another folder "
            "(--output)"
        )


def _choose(
    model: Path, folder: Path, data: Data, pixels: Pixels, texts: TextOptions, tuning: Tuning, course: Course
) -> dict[str, Any]:
    """Put the model with its head into the folder of the run, and return what was chosen; it is said, and kept beside."""
    from burnish.compiler.compile import compile
    from burnish.formats.model_file import save_model
    from burnish.training.finetuning import UNKNOWN_RATE, find_rate, repeated, transfer

    console = output()
    prepared, dataset = transfer(
        model,
        data.data,
        output=tuning.outputs,
        freeze_until=tuning.freeze_until,
        seed=course.seed,
        label=data.label,
        image_size=data.image_size,
        pixels=pixels.settings(),
        text=texts.settings(),
    )
    for note in prepared.notes:
        console.print(note)
    rate = tuning.lr
    if rate is None:
        program = compile(
            prepared.model,
            loss="cross_entropy",
            optimizer=prepared.optimizer(UNKNOWN_RATE),
            outputs=prepared.head.output,
            batch=prepared.batch,
        )
        trials = repeated(dataset, course.batch_size, course.seed)
        rate = find_rate(program, trials, engine=course.engine, device=course.device, threads=course.threads)
        console.print(
            f"lr: {rate:g}, a third of the rate from which on trial steps lowered the loss no further; --lr sets another"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_model(prepared.model, folder / START)
    choices = {
        "model": str(model),
        "lr": rate,
        "outputs": prepared.head.output,
        "batch": prepared.batch,
        "groups": prepared.groups(),
    }
    (folder / CHOICES).write_text(json.dumps(choices, indent=1) + "\n", encoding="utf-8")
    return choices


def _read(folder: Path) -> dict[str, Any]:
    """What was chosen when the run in a folder began."""
    try:
        choices = dict(json.loads((folder / CHOICES).read_text(encoding="utf-8")))
        choices["lr"], choices["groups"] = float(choices["lr"]), dict(choices["groups"])
        return choices
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"'{folder}' holds no run of burnish finetune that can go on ({error}): begin one, without --resume"
        ) from error


def _compilation(choices: dict[str, Any]) -> Compilation:
    """The options of ``burnish train`` that the choices come to."""
    groups = choices["groups"]
    scaled = [f"{name}=lr_scale={settings['lr_scale']}" for name, settings in groups.items() if settings != "frozen"]
    frozen = [name for name, settings in groups.items() if settings == "frozen"]
    optimizer = OptimizerOptions(lr=choices["lr"], group=scaled or None, freeze=frozen or None)
    return Compilation(optimizer=optimizer, outputs=choices["outputs"], batch=choices["batch"], metrics=["accuracy"])

"""``burnish train``: an ONNX file and data go in, a tuned ONNX file comes out."""

from __future__ import annotations

import json
import shlex
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burnish.cli import launch
from burnish.cli.console import counted, output
from burnish.cli.data_options import check_data_options
from burnish.cli.optimizer_options import kept_average, rate_of
from burnish.cli.options import (
    Compilation,
    FoldOption,
    ModelArgument,
    export_line,
    is_program,
    norms,
    planned_line,
    takes_compilation,
    was_given,
)
from burnish.cli.pixel_options import Pixels, pixels_line, takes_pixels
from burnish.cli.schedule_options import CONSTANT, TAKEOVER, check_schedule, take_over_checkpoints, updates_of, with_schedule
from burnish.errors import CarryOverWarning, ConfigurationError

if TYPE_CHECKING:
    from burnish.data import Dataset
    from burnish.distributed import DataParallel
    from burnish.distributed.connection.process_group import ProcessGroup
    from burnish.program import Program

DATA, COURSE, WORKERS, RESULT = "Data", "Course of training", "Several workers", "Results"


@takes_compilation()
@takes_pixels
def train(
    context: typer.Context,
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="digits, an .npz file (x, y), a folder of images (one subfolder per class), a .csv or a .parquet file.",
            show_default=False,
            rich_help_panel=DATA,
        ),
    ],
    eval_data: Annotated[
        str | None,
        typer.Option("--eval-data", help="The same, to evaluate on after every epoch.", rich_help_panel=DATA),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", help="Label column of a table; by default label, y, target or the last.", rich_help_panel=DATA),
    ] = None,
    image_size: Annotated[
        tuple[int, int] | None,
        typer.Option("--image-size", help="Height and width of images, where the model leaves them open.", rich_help_panel=DATA),
    ] = None,
    *,
    pixels: Pixels,
    compilation: Compilation,
    reinitialize: Annotated[
        str | None,
        typer.Option("--reinitialize", help="Train from scratch: kaiming or xavier.", rich_help_panel=COURSE),
    ] = None,
    epochs: Annotated[int, typer.Option("--epochs", min=1, rich_help_panel=COURSE)] = 1,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, rich_help_panel=COURSE)] = 32,
    seed: Annotated[int, typer.Option("--seed", min=0, rich_help_panel=COURSE)] = 0,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="By default the engine's choice.", rich_help_panel=COURSE)
    ] = None,
    engine: Annotated[str, typer.Option("--engine", rich_help_panel=COURSE)] = "auto",
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda; by default the engine's choice.", rich_help_panel=COURSE)
    ] = None,
    count: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            help="Processes of this machine that train together, each on its part of every batch.",
            rich_help_panel=WORKERS,
        ),
    ] = 1,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes",
            min=1,
            help="Machines, on each of which this command starts --workers; BURNISH_SECRET is the same on all of them.",
            rich_help_panel=WORKERS,
        ),
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, help="Which of them this is, from 0.", rich_help_panel=WORKERS)
    ] = None,
    master_address: Annotated[
        str | None, typer.Option("--master-address", help="Where the first machine is reached.", rich_help_panel=WORKERS)
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port",
            min=1,
            max=65535,
            help=f"Its port where all workers meet; by default {launch.PORT}.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            help="How often to go on when workers fail by what need not come again.",
            rich_help_panel=WORKERS,
        ),
    ] = 0,
    worker_timeout: Annotated[
        float,
        typer.Option("--worker-timeout", help="Seconds that workers wait for one that is late.", rich_help_panel=WORKERS),
    ] = 60.0,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Add up what workers exchange in the order of their ranks: runs are the same bit for bit.",
            rich_help_panel=WORKERS,
        ),
    ] = False,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression",
            metavar="TYPE",
            help="Let gradients travel between workers in 16 bits (float16, bfloat16) or as narrow matrices (powersgd).",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    bucket_size: Annotated[
        int | None,
        typer.Option(
            "--bucket-size",
            min=1,
            metavar="BYTES",
            help="Bytes of gradients that workers exchange at once, behind the rest of the backward pass; by default 25 MiB.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share/--no-share",
            help="Let batch normalization layers that do not wait for each other share an exchange.",
            rich_help_panel=WORKERS,
        ),
    ] = True,
    shard_optimizer: Annotated[
        bool,
        typer.Option(
            "--shard-optimizer",
            help="Let each worker keep the optimizer's state of a share of the parameters, instead of all of it.",
            rich_help_panel=WORKERS,
        ),
    ] = False,
    synchronize_every: Annotated[
        int | None,
        typer.Option(
            "--synchronize-every",
            min=1,
            metavar="STEPS",
            help="Let workers step alone for so many steps, and average their weights then.",
            rich_help_panel=WORKERS,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", min=1, help="Also save after so many steps, within epochs.", rich_help_panel=COURSE),
    ] = None,
    keep_checkpoints: Annotated[
        int,
        typer.Option("--keep-checkpoints", min=1, help="How many checkpoints to keep; 1: the latest.", rich_help_panel=COURSE),
    ] = 1,
    best_metric: Annotated[
        str | None,
        typer.Option("--best-metric", help="What decides the best epoch; by default the first metric.", rich_help_panel=COURSE),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            help="Start in the state of a checkpoint, or of the run in a folder, as far as it fits; what does not is named.",
            rich_help_panel=COURSE,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder of the run; by default runs/<model>.", rich_help_panel=RESULT),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.", rich_help_panel=RESULT)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.", rich_help_panel=RESULT)
    ] = False,
    fold: FoldOption = True,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Where to write the tuned model; by default tuned.onnx in the folder.", rich_help_panel=RESULT
        ),
    ] = None,
) -> None:
    """Train a model on data."""
    if resume and overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite drops it; give one of them")
    if start_from is not None and (resume or reinitialize):
        raise typer.BadParameter("--start-from says where a new run starts; leave out --resume and --reinitialize")
    from_program = is_program(model)
    schedule, warmup = compilation.schedule, compilation.warmup
    check_schedule(schedule, warmup, compilation.lr)
    if worker_timeout <= 0:
        raise typer.BadParameter(f"--worker-timeout {worker_timeout:g}: give a number of seconds above 0")
    machines = launch.Machines.of_options(nodes, node_rank, master_address, master_port)
    total = count * machines.count
    if total == 1 and not launch.is_worker() and was_given(context, "worker_timeout"):
        raise typer.BadParameter(
            "--worker-timeout says how long workers wait for each other, and one alone trains here: give --workers 2 or more, "
            "start with torchrun, or leave it out"
        )
    if max_restarts and total == 1:
        raise typer.BadParameter(
            "--max-restarts starts the workers of --workers again: give --workers 2 or more; torchrun has an option of its own "
            "for its workers"
        )
    check_data_options(data, eval_data, label=label, image_size=image_size, pixels=pixels.first)
    exchange = exchange_options(
        total,
        deterministic=deterministic,
        compression=compression,
        bucket_size=bucket_size,
        share=None if share else False,
        shard_optimizer=shard_optimizer,
        synchronize_every=synchronize_every,
    )
    if total > 1 and not launch.is_worker():
        launch.check_together(total, engine, norms(compilation.norm or []), "synchronize_every" not in exchange)
        launch.launch(context.meta["burnish.arguments"], count, max_restarts, _command(context, resume=True), machines)
        return
    if count > 1:
        launch.check_count(count)
    from burnish.data import DataDescription, Wanted, open_dataset
    from burnish.training.checkpoint import read_checkpoint
    from burnish.training.checkpoint_folder import CheckpointFolder
    from burnish.training.epoch_length import batches_per_epoch
    from burnish.training.interruption import TrainingInterrupted
    from burnish.training.trainer import Trainer
    from burnish.training.workers import on_all, on_first

    parallel, group = parallel_run(device, worker_timeout, exchange)
    folder = folder or Path("runs") / model.stem
    if start_from is not None and start_from.is_dir():
        start_from = CheckpointFolder(start_from / "checkpoints").latest

    def goes_on() -> bool:
        """Whether the run in the folder is gone on with; refuses a folder that holds another."""
        exists = CheckpointFolder(folder / "checkpoints").exists
        if resume or (exists and launch.is_restart()) or (exists and launch.run_id() and _launched(folder) == launch.run_id()):
            return resume or exists
        if exists and not overwrite:
            raise ConfigurationError(
                f"'{folder}' holds a run already: go on with it (--resume), start anew in it (--overwrite), or name another "
                "folder (--output)"
            )
        return False

    resume = on_first(group, goes_on, "the folder of the run")
    overwrite = overwrite and not resume
    console = output(quiet=group.rank > 0)

    start = start_from if not resume else None

    def metadata() -> dict[str, str]:
        """What the run that is gone on with, or the checkpoint that is started from, says of its data."""
        if resume:
            return CheckpointFolder(folder / "checkpoints").metadata
        return {} if start is None else read_checkpoint(start).metadata

    earlier = on_first(group, metadata, "the checkpoint")

    def prepared() -> tuple[Program, Dataset, Dataset | None]:
        """The program, and the data to train and to evaluate on."""
        begin = time.monotonic()
        program = compilation.program(model, batch_size)
        done = "loaded" if from_program else "compiled"
        console.print(f"{model}: {done} in {time.monotonic() - begin:.1f} s; {what_trains(program)}", markup=False)
        if compilation.recompute:
            console.print(planned_line(program, batch_size), markup=False)
        wanted = Wanted.by(program, earlier)
        train_set = open_dataset(data, wanted, label=label, image_size=image_size, pixels=pixels.settings())
        described = DataDescription.of(train_set)
        eval_set = None
        if eval_data is not None:
            read_alike = wanted.like(described)
            eval_set = open_dataset(eval_data, read_alike, label=label, classes=described.classes, image_size=image_size)
        console.print(_described(data, train_set, eval_data, eval_set), markup=False)
        if (line := pixels_line(described, wanted, pixels)) is not None:
            console.print(line, markup=False)
        return program, train_set, eval_set

    program, train_set, eval_set = on_all(group, prepared, "compile the model and read the data")
    described = DataDescription.of(train_set)
    rate = rate_of(program.options["optimizer"])
    steps = epochs * batches_per_epoch(program, len(train_set), batch_size)
    taken = (
        0 if start is None else on_first(group, lambda: updates_of(read_checkpoint(start), program), f"the checkpoint '{start}'")
    )
    program = with_schedule(program, schedule, warmup, steps, "give fewer --warmup steps, or more --epochs", taken)
    if resume:
        on_first(group, lambda: take_over_checkpoints(folder, program), "the checkpoints")
    trainer = Trainer(
        program,
        train_set,
        eval_set,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        run_directory=folder,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        best_metric=best_metric,
        resume=resume,
        overwrite=overwrite,
        engine=engine,
        device=device,
        threads=threads,
        parallel=parallel,
        parameters=kept_average(program),
        state=program.initial_state(seed, reinitialize) if reinitialize and not resume else None,
    )
    if start is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CarryOverWarning)
            trainer.start_from(start)
        for warning in caught:
            console.print(str(warning.message), markup=False)
    course = {"lr": rate, "schedule": schedule, "warmup": warmup, "epochs": epochs}
    if resume:
        for note in _resumed_otherwise(folder, course, reinitialize):
            console.print(note, markup=False)
    tuned = export or folder / "tuned.onnx"
    if not resume and group.rank == 0:
        # Of the run that is overwritten: they would pass for this run's.
        for left in ("tuned.onnx", TAKEOVER):
            (folder / left).unlink(missing_ok=True)
        program.save(folder / "program")
        (folder / "run.json").write_text(
            json.dumps(
                {
                    "command": _command(context),
                    "model": str(model),
                    "data": data,
                    "classes": described.classes,
                    "pixels": None if described.preprocessing is None else described.preprocessing.options(),
                    "course": course,
                    "launch": launch.run_id(),
                    "parameters": kept_average(program),
                },
                indent=1,
            )
            + "\n",
            encoding="utf-8",
        )
    try:
        result = trainer.run()
    except TrainingInterrupted as interrupt:
        raise KeyboardInterrupt(f"{interrupt}:\n  {_command(context, resume=True)}") from interrupt
    if group.rank:
        trainer.session.take_part()
        return
    trainer.session.export(tuned, fold_norm=fold, parameters=kept_average(program))
    if result.best is not None and eval_set is not None:
        best = result.best
        console.print(f"best {best['metric']} {best['value']:.4f} in epoch {best['epoch']}: {trainer.best}", markup=False)
    console.print(export_line(tuned, "the tuned model,", result.steps, program, fold, kept_average(program)), markup=False)


LAYERS_SHOWN = 3
"""How many layers a line names."""


def exchange_options(count: int, **given: Any) -> dict[str, Any]:
    """Return what was asked for of how workers exchange, as ``burnish.DataParallel`` takes it.

    Args:
        count: of workers.
        given: options by name; those that are None, and switches that are off, were not asked for.

    Raises:
        typer.BadParameter: something was, and there is one worker alone; or it is none of the choices.
    """
    asked: dict[str, Any] = {name: value for name, value in given.items() if value or (name == "share" and value is False)}
    if not asked:
        return {}
    first = next(iter(asked)).replace("_", "-")
    option = "--no-share" if first == "share" else f"--{first}"
    if count == 1 and not launch.is_worker():
        raise typer.BadParameter(
            f"{option} says how workers exchange, and one alone trains here: give --workers 2 or more, start with torchrun, or "
            "leave it out"
        )
    from burnish.distributed import DataParallel

    try:
        DataParallel(**asked)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error).removeprefix("DataParallel: ")) from error
    return asked


def parallel_run(device: str | None, timeout: float, exchange: Mapping[str, Any]) -> tuple[DataParallel | None, ProcessGroup]:
    """Join the other workers where a launcher has started several; returns what a trainer takes for them, and the group."""
    from burnish.distributed.connection.joining import join
    from burnish.distributed.connection.process_group import ProcessGroup

    if not launch.is_worker():
        return None, ProcessGroup(0, 1)
    from burnish.cli.console import warn_with_rank
    from burnish.distributed import DataParallel

    group = join(device or "cpu", timeout=timeout)
    warn_with_rank(group.rank)
    return DataParallel(group=group, **exchange), group


def what_trains(program: Program) -> str:
    """Return how much of a program trains, in words."""
    from burnish.program import Role

    signature = program.signature["step"]
    parameters = signature.inputs_of(Role.PARAMETER)
    trained = [entry for entry in parameters if entry.name in signature.updates]
    count = sum(program.weights[entry.name].size for entry in trained)
    rest = len(parameters) - len(trained)
    words = f"{counted(count, 'parameter')} in {counted(len(trained), 'tensor')} train"
    if rest:
        words += f", {counted(rest, 'tensor')} {'stays as it is' if rest == 1 else 'stay as they are'}"
    kept = program.options.get("auto_frozen_layers", [])
    if kept:
        shown = ", ".join(kept[:LAYERS_SHOWN]) + (f" and {len(kept) - LAYERS_SHOWN} more" if len(kept) > LAYERS_SHOWN else "")
        words += f"; batch normalization of which nothing trains keeps its statistics: {shown} (--norm train lets them move)"
    return words


def _launched(folder: Path) -> str | None:
    """Return the name of the launch that the run in a folder was started by."""
    try:
        return str(json.loads((folder / "run.json").read_text(encoding="utf-8"))["launch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _resumed_otherwise(folder: Path, course: Mapping[str, object], reinitialize: str | None) -> list[str]:
    """Return what a resumed run does otherwise than it was started, one line each."""
    try:
        started = json.loads((folder / "run.json").read_text(encoding="utf-8"))["course"]
        before = {name: started[name] for name in course}
    except (OSError, ValueError, KeyError, TypeError):
        before = dict(course)
    # More epochs are what one resumes for; they change the steps to come only where the rate follows a schedule.
    names = [name for name in course if name != "epochs" or course["schedule"] != CONSTANT]
    notes = [
        f"--{name} {course[name]} is taken from here on; the run was started with {before[name]}"
        for name in names
        if course[name] != before[name]
    ]
    if reinitialize:
        notes.append("--reinitialize is not taken: a resumed run goes on with the weights that it has")
    return notes


def _described(data: str, train_set: Dataset, eval_data: str | None, eval_set: Dataset | None) -> str:
    classes = getattr(train_set, "classes", None)
    count = "" if not classes else " of 1 class" if len(classes) == 1 else f" of {len(classes)} classes"
    text = f"{data}: {counted(len(train_set), 'sample')}{count}"
    return text + (f"; {eval_data}: {counted(len(eval_set), 'sample')} to evaluate on" if eval_set is not None else "")


def _command(context: typer.Context, resume: bool = False) -> str:
    """The command line as it was given; with ``resume``, the one that goes on."""
    arguments = [argument for argument in context.meta["burnish.arguments"] if not (resume and argument == "--overwrite")]
    if resume and "--resume" not in arguments:
        arguments.append("--resume")
    return shlex.join(["burnish", *arguments])

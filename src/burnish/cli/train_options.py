"""Options of the commands that train: data, length, engine, results, reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.table import Table

from burnish.cli.console import cell, output
from burnish.cli.data_options import Pixels, TextOptions, check_data_options
from burnish.cli.option_groups import COMMON, OptionGroup, declared_option
from burnish.data.formats import help_text
from burnish.errors import ConfigurationError
from burnish.finetuning.options import FinetuneOptions
from burnish.training.trainer_options import EvaluationOptions, RunOptions, SoundOptions, check_one_evaluation

if TYPE_CHECKING:
    from burnish.data.splitting import EvalSplit
    from burnish.engines import Engine
    from burnish.training import Trainer
    from burnish.training.callbacks import Callback, HtmlReport


KernelsOption = Annotated[
    bool | None,
    typer.Option(
        "--kernels/--no-kernels",
        help="Kernels of burnish on the engine onnxruntime: build missing ones, or use none.",
        show_default="those that are built",
    ),
]


def chosen_engine(engine: str, kernels: bool | None) -> str | Engine:
    """Return an engine: its name, or ONNX Runtime's with its kernels chosen.

    Raises:
        ConfigurationError: kernels are chosen for another engine than ``onnxruntime``.
        EngineError: kernels are to be built, and cannot be.
    """
    if kernels is None:
        return engine
    if engine not in ("auto", "onnxruntime"):
        raise ConfigurationError(
            f"--kernels and --no-kernels are for --engine onnxruntime, not for '{engine}': leave them out, or set "
            "BURNISH_KERNELS=off in the environment"
        )
    from burnish.engines.onnxruntime import OnnxRuntimeEngine

    return OnnxRuntimeEngine(kernels=kernels)


FoldOption = Annotated[
    bool,
    typer.Option(
        "--fold/--no-fold",
        help="Fold normalization into the layers beside it in the exported model; not for further training.",
    ),
]


@dataclass(frozen=True)
class Data(OptionGroup, EvaluationOptions, SoundOptions):
    """The training and evaluation data."""

    panel: ClassVar = "Data"
    placed: ClassVar = {"eval_split": "eval_data", "sound": "image_size"}
    data: Annotated[
        str,
        typer.Option(
            "--data",
            "-d",
            help=f"Data to train on: a folder of images, a table, arrays or texts.\n\nOne of: {help_text()}.",
            show_default=False,
        ),
        COMMON,
    ]
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", help="Data to evaluate on after every epoch, in any form of --data."), COMMON
    ] = None
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            help="Label column of a table, or several with commas between, or the .npy file with the labels.",
            show_default="label, y, target or the last",
        ),
        COMMON,
    ] = None
    label_separator: Annotated[
        str | None,
        typer.Option(
            "--label-separator",
            metavar="TEXT",
            help="Text between several labels in the label column, such as ';'.",
            show_default="one label in each row",
        ),
    ] = None
    image_size: Annotated[
        tuple[int, int] | None,
        typer.Option(
            "--image-size", help="Height and width of images, for a model that takes any.", show_default="as the model says"
        ),
    ] = None
    missing: Annotated[str, declared_option(FinetuneOptions, "missing")] = "auto"
    columns: Annotated[str, declared_option(FinetuneOptions, "columns")] = "auto"
    augment: Annotated[
        str | None,
        typer.Option(
            "--augment",
            metavar="CHANGES",
            help="Random changes to training images: crop,flip,rand_augment:2:9,mixup:0.2,cutmix:1, or some of these.",
        ),
        COMMON,
    ] = None
    data_workers: Annotated[
        int | None,
        typer.Option(
            "--data-workers", min=0, help="Processes that read ahead.", show_default="some if images are decoded in every epoch"
        ),
    ] = None

    def check_reading(self, pixels: Pixels) -> None:
        """Reject options without a meaning for the data, as ``check_data_options``."""
        sources, of_pixels = (self.data, self.eval_data), pixels.first_named
        check_data_options(
            *sources, label=self.label, image_size=self.image_size, pixels=of_pixels, missing=self.missing, columns=self.columns
        )

    def tuning(self, pixels: Pixels, texts: TextOptions) -> dict[str, Any]:
        """Return these options, and those of pixels and texts, for ``FinetuneOptions``."""
        return {
            "eval_data": self.eval_data,
            "eval_split": self.split,
            "augment": self.augment,
            "label": self.label,
            "label_separator": self.label_separator,
            "image_size": self.image_size,
            "pixels": pixels.settings(),
            "text": texts.settings(),
            "sound": self.sound,
            "missing": self.missing,
            "columns": self.columns,
        }

    @property
    def split(self) -> EvalSplit | None:
        """The part of the data to hold out, or None."""
        return self.eval_split  # type: ignore[return-value]  # as it was checked

    def __post_init__(self) -> None:
        super().__post_init__()
        check_one_evaluation(self.eval_data, self.eval_split)


@dataclass(frozen=True)
class Course(OptionGroup, RunOptions):
    """Length, start, engine and checkpoints of the training."""

    panel: ClassVar = "Course of training"
    placed: ClassVar = {"reinitialize": None, "kernels": "engine", "start_from": "best_metric"}
    reinitialize: Annotated[
        str | None, typer.Option("--reinitialize", help="Train from scratch: re-initialize the weights, by kaiming or xavier.")
    ] = None
    kernels: KernelsOption = None
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            help="Start in the state of a checkpoint or a run, as far as it fits; the rest is named.",
        ),
    ] = None

    @property
    def named_batch_size(self) -> int | None:
        """The batch size if the command line gives it, else None."""
        return self.batch_size if "batch_size" in self.named else None

    def chosen_engine(self) -> str | Engine:
        """Return the engine that trains: its name, or with its kernels chosen.

        Raises:
            ConfigurationError: kernels are chosen for another engine than ``onnxruntime``.
            EngineError: kernels are to be built, and cannot be.
        """
        return self.engine if not isinstance(self.engine, str) else chosen_engine(self.engine, self.kernels)


@dataclass(frozen=True)
class Results(OptionGroup):
    """The places of the run and the tuned model."""

    panel: ClassVar = "Results"
    folder: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the run.", show_default="a new one, runs/MODEL"),
        COMMON,
    ] = None
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            "-n",
            metavar="NAME",
            help="Name of the folder in runs/; a number follows if it is taken.",
            show_default="MODEL",
        ),
        COMMON,
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run: give its folder in place of MODEL, and no data."), COMMON
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False
    fold: FoldOption = True
    export: Annotated[
        Path | None, typer.Option("--export", help="File of the tuned model.", show_default="tuned.onnx in the folder")
    ] = None


def check_overwritten(folder: Path, results: Results) -> None:
    """Raise ConfigurationError unless the run in a folder may be overwritten."""
    if not results.overwrite:
        raise ConfigurationError(
            f"'{folder}' holds a run already: go on with it (--resume), start anew in it (--overwrite), or name another folder "
            "(--output)"
        )


SHOWN = 20
"""Most nodes of a profile to print."""


@dataclass(frozen=True)
class Watching(OptionGroup):
    """Reports and logs for people."""

    panel: ClassVar = "Reports"
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Write a report in one HTML file: curves, confusion matrix, worst examples, time and memory.",
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="FOLDER", help="Write TensorBoard's event files: scalars, histograms, examples."),
    ] = None
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            metavar="WHERE",
            help="Log to tensorboard, mlflow or wandb, with settings such as mlflow:experiment=digits; repeatable.",
        ),
    ] = None
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Time some steps before training, by node, to profile.csv and profile.trace.json.",
        ),
    ] = False

    def of_seed(self, seed: int, seeds: int) -> Watching:
        """Return these options for one of several runs, with a separate folder of event files."""
        if seeds == 1 or self.tensorboard is None:
            return self
        return replace(self, tensorboard=self.tensorboard / f"seed-{seed}")

    def of_stage(self, number: int, is_last: bool) -> Watching:
        """Return these options for one of several stages, from 1: only the last writes the report.

        Event files of each stage are in a separate folder, as each counts its steps from 1. Each stage has a profile, as their
        steps differ.
        """
        folder = None if self.tensorboard is None else self.tensorboard / f"stage-{number}"
        return replace(self, tensorboard=folder, report=self.report if is_last else None)

    def check(self) -> None:
        """Reject an unknown logger, before anything is read.

        Raises:
            ConfigurationError: it does not exist, lacks a setting, or needs a package that is not installed.
        """
        from burnish.training.callbacks import check_logger

        for text in self.log or []:
            check_logger(text)

    def loggers(self, folder: Path, parameters: str | None) -> list[Callback]:
        """Return the callbacks that write during a run.

        Args:
            folder: folder of the run.
            parameters: weights to evaluate, as in ``Trainer``.

        Raises:
            ConfigurationError: a package that one of them needs is not installed.
        """
        from burnish.training.callbacks import TensorBoard, logger

        named: list[Callback] = [logger(text, folder, parameters) for text in self.log or []]
        return named if self.tensorboard is None else [TensorBoard(self.tensorboard, parameters=parameters), *named]

    def html_report(
        self, configuration: str, command: str, parameters: str | None, stages: Sequence[Path] = ()
    ) -> HtmlReport | None:
        """Return the callback that writes the report at the end, or None.

        Args:
            configuration, command: texts about the run for the report.
            parameters: weights to evaluate, as in ``Trainer``.
            stages: folders of the earlier runs that this one continues.
        """
        from burnish.training.callbacks import HtmlReport

        if self.report is None:
            return None
        return HtmlReport(self.report, parameters=parameters, configuration=configuration, command=command, stages=stages)

    def write_profile(self, trainer: Trainer, folder: Path, device: str | None, threads: int | None) -> None:
        """Profile steps on the trainer's first batch; print the times and write them into the run folder.

        Raises:
            EngineError: the engine does not support profiles.
        """
        from burnish.data import DataSpec
        from burnish.training.feature_dataset import FeatureDataset
        from burnish.training.profiling import profile, shortened

        dataset = trainer.loader.dataset
        if isinstance(dataset, FeatureDataset):  # its features are computed when the run begins
            indices = trainer.loader.order(0)[: trainer.loader.batch_size]
            read = DataSpec.by(trainer.program).to_model(dataset.source.batch(indices))
            batch = trainer.session.features.batch(read)
        else:
            batch = next(iter(trainer.loader.epoch(0)))
        session, seed = trainer.session, trainer.loader.seed
        measured = profile(trainer.program, batch, session.engine, device=device, threads=threads, seed=seed)
        console = output()
        table = Table(box=None)
        for number, name in enumerate(("node of the model", "ms", "forward", "backward", "update", "share", "MB")):
            table.add_column(name, overflow="fold", justify="right" if number else "left")
        for source, *times, share, forward, backward, update, _ in shortened(measured.table(), SHOWN):
            moved = f"{(forward + backward + update) / 1e6:,.2f}"
            table.add_row(cell(source), *(f"{time:.3f}" for time in times), f"{share:.1%}", moved)
        console.print(table)
        measured.write_table(folder / "profile.csv")
        measured.write_trace(folder / "profile.trace.json")
        phases = ", ".join(f"{phase} {1000 * seconds:.2f}" for phase, seconds in measured.phases.items())
        took = f"{1000 * measured.step_seconds:.2f} ms a step while it is timed ({phases})"
        trace = folder / "profile.trace.json"
        console.print(f"{folder / 'profile.csv'}, {trace} (for chrome://tracing): {took}, on {measured.engine}")

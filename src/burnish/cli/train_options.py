"""Options of ``burnish train``: what to train on, for how long, and what becomes of the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from burnish.cli import launch
from burnish.cli.engine_options import KernelsOption, chosen_engine
from burnish.cli.option_groups import OptionGroup
from burnish.data.formats import help_text
from burnish.errors import ConfigurationError
from burnish.files.file_writing import check_output
from burnish.training.trainer_options import RunOptions

if TYPE_CHECKING:
    from burnish.cli.watching import Watching
    from burnish.engines import Engine

FoldOption = Annotated[
    bool,
    typer.Option(
        "--fold/--no-fold",
        help="In the exported model, fold normalization into the layers beside it; not where it is to be trained further.",
    ),
]


@dataclass(frozen=True)
class Data(OptionGroup):
    """What to train and to evaluate on."""

    panel: ClassVar = "Data"
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help=f"{help_text()}.",
            show_default=False,
        ),
    ]
    eval_data: Annotated[str | None, typer.Option("--eval-data", help="The same, to evaluate on after every epoch.")] = None
    label: Annotated[
        str | None, typer.Option("--label", help="Label column of a table; by default label, y, target or the last.")
    ] = None
    image_size: Annotated[
        tuple[int, int] | None, typer.Option("--image-size", help="Height and width of images, where the model leaves them open.")
    ] = None
    missing: Annotated[
        str, typer.Option("--missing", help="Rows of a table in which a value is missing: error, or drop to leave them out.")
    ] = "error"
    augment: Annotated[
        str | None,
        typer.Option(
            "--augment",
            metavar="CHANGES",
            help="Change training images at random: crop,flip,rand_augment:2:9,mixup:0.2,cutmix:1, or some of these.",
        ),
    ] = None
    data_workers: Annotated[
        int | None,
        typer.Option(
            "--data-workers", min=0, help="Processes that read ahead; by default some, where images are decoded in every epoch."
        ),
    ] = None


@dataclass(frozen=True)
class Course(OptionGroup, RunOptions):
    """How long training goes on, where it starts, what computes it, and what it keeps."""

    panel: ClassVar = "Course of training"
    placed: ClassVar = {"reinitialize": None, "kernels": "engine", "start_from": "best_metric"}
    reinitialize: Annotated[str | None, typer.Option("--reinitialize", help="Train from scratch: kaiming or xavier.")] = None
    kernels: KernelsOption = None
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            help="Start in the state of a checkpoint, or of the run in a folder, as far as it fits; what does not is named.",
        ),
    ] = None

    @property
    def named_batch_size(self) -> int | None:
        """The size of a batch where the command says one; None where it is left to what fits."""
        return self.batch_size if "batch_size" in self.named else None

    def chosen_engine(self) -> str | Engine:
        """The engine that trains: by its name, or with its kernels chosen.

        Raises:
            ConfigurationError: kernels are chosen for another engine than ``onnxruntime``.
            EngineError: they are to be built, and cannot be.
        """
        return self.engine if not isinstance(self.engine, str) else chosen_engine(self.engine, self.kernels)


@dataclass(frozen=True)
class Results(OptionGroup):
    """Where the run and the tuned model are written."""

    panel: ClassVar = "Results"
    folder: Annotated[Path | None, typer.Option("--output", "-o", help="The folder of the run; by default runs/<model>.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in a folder that holds a run.")] = False
    fold: FoldOption = True
    export: Annotated[
        Path | None, typer.Option("--export", help="Where to write the tuned model; by default tuned.onnx in the folder.")
    ] = None


def run_folder(model: Path, results: Results, suffix: str = "") -> Path:
    """Return the folder of a run: the one that was given, else runs/<model> with a suffix."""
    return results.folder or Path("runs") / f"{model.stem}{suffix}"


def check_results(folder: Path, results: Results, watching: Watching, data: Data, model: Path) -> None:
    """Refuse places that nothing is to be written to, before anything is read. Of workers, the first alone writes.

    Raises:
        ConfigurationError: as ``check_output``.
    """
    if launch.other_rank() is not None:
        return
    check_output(folder, "--output", is_folder=True)
    for option, path in (("--export", results.export), ("--report", watching.report)):
        if path is not None:
            check_output(path, option, read=(model, data.data, data.eval_data))
    if watching.tensorboard is not None:
        check_output(watching.tensorboard, "--tensorboard", is_folder=True)


def check_overwritten(folder: Path, results: Results) -> None:
    """Raise ConfigurationError where the run that a folder holds is not to be overwritten."""
    if not results.overwrite:
        raise ConfigurationError(
            f"'{folder}' holds a run already: go on with it (--resume), start anew in it (--overwrite), or name another folder "
            "(--output)"
        )

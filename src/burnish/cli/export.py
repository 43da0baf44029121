"""``burnish export``: the inference graph of a run; and ``burnish package``: a program to train or run without Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from burnish.cli.compilation_options import FORMS
from burnish.cli.console import columns_line, counted, export_line, output
from burnish.cli.data_options import read_extents
from burnish.cli.optimizer_options import AVERAGE
from burnish.cli.train_options import FoldOption
from burnish.errors import ModelError
from burnish.files.file_writing import check_output

if TYPE_CHECKING:
    from burnish.training import Session


MERGED = "merged"


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="The folder of a run, or a checkpoint in it.", show_default=False)
    ],
    path: Annotated[Path, typer.Option("--output", "-o", help="ONNX file to write.", show_default=False)],
    best: Annotated[
        bool | None,
        typer.Option(
            "--best/--latest", help="Weights of a run: the best epoch, or the latest state.", show_default="the one it exported"
        ),
    ] = None,
    fold: FoldOption = True,
    average: Annotated[
        bool | None,
        typer.Option(
            "--average/--no-average",
            help="Write the average of the weights that the optimizer keeps, or not.",
            show_default="as the run exported",
        ),
    ] = None,
    adapters: Annotated[
        str,
        typer.Option(
            "--adapters",
            metavar="FORM",
            help="Adapters of a run: merged, kept, apart (.onnx_adapter), inputs (.safetensors) or peft (a folder).",
        ),
    ] = MERGED,
    training: Annotated[
        bool, typer.Option("--training", help="Write the training and its state too, as training_info in the same file.")
    ] = False,
    with_preprocessing: Annotated[
        bool,
        typer.Option(
            "--with-preprocessing",
            help="Put resizing, cropping and scaling of images into the model.",
        ),
    ] = False,
) -> None:
    """Write the trained model as plain ONNX, for any runtime."""
    from burnish.errors import CheckpointError
    from burnish.files.training_info import write_training_model
    from burnish.program import Program
    from burnish.training import Session
    from burnish.training.run_files import checkpoint_of, exported_parameters, files_of, program_beside

    _check(bool(best) and source.is_file(), training, with_preprocessing, adapters)
    if source.suffix == ".onnx" and source.is_file():
        raise CheckpointError(f"'{source}' is a model already, not the run that trained it: give the folder of the run")
    checkpoint = checkpoint_of(source, best)
    run = source if source.is_dir() else checkpoint.parent.parent
    check_output(path, "--output", is_folder=adapters == "peft", read=[checkpoint, *files_of(run)])
    program = program_beside(checkpoint)
    if program is None:
        raise CheckpointError(
            f"The program of '{checkpoint}' is not beside it: a run keeps it in its folder 'program'. "
            "Export from Python: Session(program).restore(checkpoint), then export"
        )
    session = Session(Program.load(program))
    session.restore(checkpoint)
    if training:
        write_training_model(session.program.to_onnx(session.state(), session.metadata), path)
        output().print(f"{path}: the model and its training after {counted(session.step_count, 'step')}")
        return
    parameters = exported_parameters(program.parent) if average is None else AVERAGE if average else None
    _write(session, path, source, fold, parameters, adapters, with_preprocessing)


def _write(
    session: Session, path: Path, source: Path, fold: bool, parameters: str | None, adapters: str, with_preprocessing: bool
) -> None:
    if with_preprocessing:
        _check_described({**session.program.metadata, **session.metadata}, source)
    session.export(path, fold_norm=fold, parameters=parameters, adapters=adapters)
    if with_preprocessing:
        _read_images(path)
    what = FORMS.get(adapters, "the model" if parameters is None else "the average of the model's weights")
    output().print(export_line(path, what, session.step_count, session.program, fold and adapters == MERGED, parameters))
    if path.is_file() and (fed := columns_line(path, session)) is not None:
        output().print(fed)


def _check(chooses_in_file: bool, training: bool, with_preprocessing: bool, adapters: str) -> None:
    if chooses_in_file:
        raise typer.BadParameter("--best chooses among the checkpoints of a run; give the folder of the run")
    if training and with_preprocessing:
        raise typer.BadParameter("--training writes the program as it is; leave out --with-preprocessing")
    if adapters != MERGED and (training or with_preprocessing):
        raise typer.BadParameter("--adapters is for the model alone; leave out --training and --with-preprocessing")


def _check_described(metadata: Mapping[str, str], source: Path) -> None:
    """Raise ConfigurationError, before anything is written, if the pixel preprocessing is not recorded."""
    from burnish.data import DataDescription
    from burnish.errors import ConfigurationError

    if DataDescription.read(metadata, str(source)).preprocessing is None:
        raise ConfigurationError(
            f"'{source}' does not say what is done to its pixels, as it was trained on numbers: leave out --with-preprocessing, "
            "or put it in from Python (burnish.surgery.prepend_preprocessing)"
        )


def _read_images(path: Path) -> None:
    """Add the preprocessing to an exported model, so that it reads decoded images, and print a line."""
    from burnish.data import DataDescription
    from burnish.files.model_file import save_model
    from burnish.importer import load
    from burnish.surgery import prepend_preprocessing

    model = load(path)
    described = DataDescription.read(model.metadata_props, str(path)).preprocessing
    save_model(prepend_preprocessing(model), path)
    if described is not None:
        output().print(f"{path}: reads RGB images as uint8 [batch, height, width, 3]; in the model: {described.text()}")


def package(
    program: Annotated[
        Path,
        typer.Argument(
            metavar="PROGRAM", help="A program that burnish compile wrote, or the folder of a run.", show_default=False
        ),
    ],
    path: Annotated[Path, typer.Option("--output", "-o", help="Folder to write, or a .pt2 file.", show_default=False)],
    runtime: Annotated[
        str | None,
        typer.Option("--runtime", metavar="c", help="Write a folder with a client that trains the program, in this language."),
    ] = None,
    graph: Annotated[
        str | None, typer.Option("--graph", metavar="NAME", help="Graph that a .pt2 file runs.", show_default="step")
    ] = None,
    extent: Annotated[
        list[str] | None,
        typer.Option("--extent", metavar="NAME=N", help="Extent of a symbolic dimension in a .pt2 file; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Device of a .pt2 file.", show_default="cpu")] = None,
) -> None:
    """Pack a program for machines without Python.

    The package is a client in C (--runtime c), or one graph compiled into a .pt2 file.
    """
    from burnish.cli.summary import program_at
    from burnish.program import Program

    check_output(path, "--output", is_folder=path.suffix != ".pt2")
    folder = program_at(program)
    if folder is None:
        raise ModelError(f"'{program}' is a model, not a program: compile it first (burnish compile {program} -o program)")
    loaded = Program.load(folder)
    loaded.package(path, runtime=runtime, graph=graph, extents=read_extents(extent or []), device=device)
    output().print(f"{path}: the program of {program}")
    if runtime is not None:
        output().print(
            f"  make -C {path} ORT=/path/to/onnxruntime builds what trains it; {path / 'README.md'} says how to run it"
        )

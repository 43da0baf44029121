"""What ``predict`` and ``evaluate`` share: the options that choose a model, and what is printed of it and its data."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.table import Table

from burnish.cli.compilation_options import SampleAxisOption
from burnish.cli.console import cell, counted, echo
from burnish.cli.option_groups import OptionGroup, values_of
from burnish.cli.train_options import KernelsOption, chosen_engine
from burnish.compiler.options import CompileOptions
from burnish.errors import DataError, escaped
from burnish.files.file_writing import replacing

if TYPE_CHECKING:
    from burnish.training.trained_model import TrainedModel

MODEL, DATA, RESULT = "Model", "Data", "Results"

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="The folder of a run, a checkpoint, a saved program, or an ONNX file.", show_default=False
    ),
]
ImageSizeOption = Annotated[
    tuple[int, int] | None,
    typer.Option("--image-size", help="Height and width of images, where the model leaves them open.", rich_help_panel=DATA),
]
MissingOption = Annotated[
    str | None,
    typer.Option(
        "--missing",
        help="Rows of a table in which a value is missing: error, or drop to leave them out.",
        show_default="error",
        rich_help_panel=DATA,
    ),
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Samples at once.", rich_help_panel=DATA)]


@dataclass(frozen=True)
class SavedModel(OptionGroup):
    """Which weights of a model are read, and what computes it."""

    panel: ClassVar = MODEL
    program: Annotated[
        Path | None, typer.Option("--program", help="The saved program of a checkpoint that lies apart from its run.")
    ] = None
    best: Annotated[
        bool | None,
        typer.Option("--best/--latest", help="Of a run, the best epoch or the latest state; by default the one it exported."),
    ] = None
    average: Annotated[
        bool | None,
        typer.Option(
            "--average/--no-average",
            help="Read the average of the weights that the optimizer keeps, or not; by default as the run exported.",
        ),
    ] = None
    sample_axis: SampleAxisOption = None
    engine: Annotated[str, typer.Option("--engine")] = "auto"
    kernels: KernelsOption = None

    def open(self, model: Path, **objective: Any) -> TrainedModel:
        """Open a model to predict and to evaluate with; ``objective`` is what ``open_model`` takes besides.

        Raises:
            BurnishError: what ``open_model`` and ``chosen_engine`` raise.
        """
        from burnish.training.trained_model import open_model

        chosen: dict[str, Any] = {"best": self.best, "average": self.average}
        chosen["engine"] = chosen_engine(self.engine, self.kernels)
        chosen |= values_of(CompileOptions, sample_axis=self.sample_axis)
        return open_model(model, program=self.program, **chosen, **objective)


def describe(console: Console, model: TrainedModel, data: str, samples: int, preprocessing: Any, asked: bool) -> None:
    """Print which model reads how many samples, and what becomes of their pixels and why.

    Args:
        console: where to print.
        model: the model.
        data: where the samples are from.
        samples: how many there are.
        preprocessing: what is done to pixels; None where the data hold none.
        asked: whether the command line says what is done to them.
    """
    console.print(f"{model.name}; {data}: {counted(samples, 'sample')}")
    recorded = model.described.preprocessing
    if preprocessing is not None:
        reason = (
            " (the model does not say; --pixels for another, such as imagenet)"
            if recorded is None
            else " (as recorded with the model)"
        )
        console.print(f"pixels: {preprocessing.text()}{'' if asked else reason}")
    elif recorded is not None:
        console.print(f"pixels: none, the numbers are taken as they are; those of images are {recorded.formula()}")


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table; numbers have four digits after the point. On a terminal it fits in, else a row is a line of any length."""
    texts = [[f"{value:.4f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    if not console.is_terminal:  # plain lines: a table of rich's takes a second for a thousand rows
        lines = [[escaped(text) for text in line] for line in (header, *texts)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
        echo("\n".join(padded))
        return
    shown = Table(box=None)
    for name in header:
        shown.add_column(cell(name), overflow="fold")
    for line in texts:
        shown.add_row(*map(cell, line))
    console.print(shown)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, numbers with all their digits.

    Raises:
        DataError, CheckpointError: the file cannot be written; an earlier one is untouched.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    # Names of files that are no UTF-8 are written out, as on the screen.
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def cannot_write(path: Path, error: OSError) -> DataError:
    """Return the error for a result that cannot be written."""
    return DataError(f"'{path}' cannot be written: {error}; choose a file you can write to")

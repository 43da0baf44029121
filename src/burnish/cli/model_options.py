"""What ``predict`` and ``evaluate`` share: which model, of what, and what is said of both."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from burnish.cli.console import cell
from burnish.errors import DataError

if TYPE_CHECKING:
    from burnish.training.trained_model import TrainedModel

MODEL, DATA, RESULT = "Model", "Data", "Results"

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="The folder of a run, a checkpoint, a saved program, or an ONNX file.", show_default=False
    ),
]
ProgramOption = Annotated[
    Path | None,
    typer.Option("--program", help="The saved program of a checkpoint that lies apart from its run.", rich_help_panel=MODEL),
]
BestOption = Annotated[
    bool, typer.Option("--best", help="Of a run, take the best epoch instead of the latest state.", rich_help_panel=MODEL)
]
AverageOption = Annotated[
    bool | None,
    typer.Option(
        "--average/--no-average",
        help="Read the average of the weights that the optimizer keeps, or not; by default as the run exported.",
        rich_help_panel=MODEL,
    ),
]
EngineOption = Annotated[str, typer.Option("--engine", rich_help_panel=MODEL)]
ImageSizeOption = Annotated[
    tuple[int, int] | None,
    typer.Option("--image-size", help="Height and width of images, where the model leaves them open.", rich_help_panel=DATA),
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Samples at once.", rich_help_panel=DATA)]


def pixels_of(model: TrainedModel, done: Any, asked: bool) -> str | None:
    """Return what is said of pixels: what was done, and why; None where neither the data nor the model are of any."""
    known = model.described.preprocessing
    if done is None:
        taken = "pixels: none, the numbers are taken as they are; those of images are"
        return None if known is None else f"{taken} {known.formula()}"
    reason = ""
    if not asked:
        said = " (the model does not say; --pixels for another, such as imagenet)"
        reason = said if known is None else " (as recorded with the model)"
    return f"pixels: {done.text()}{reason}"


def print_table(console: Console, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table as it is: nothing in a name is markup. Numbers have four digits after the point."""
    shown = Table(box=None)
    for name in header:
        shown.add_column(cell(name), overflow="fold")
    for row in rows:
        shown.add_row(*(cell(f"{value:.4f}" if isinstance(value, float) else str(value)) for value in row))
    console.print(shown)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table, numbers with all their digits.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(rows)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> DataError:
    """The error of a result that cannot be written."""
    return DataError(f"'{path}' cannot be written: {error}; choose a file you can write to")

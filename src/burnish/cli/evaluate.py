"""``burnish evaluate``: loss and metrics of a model over labelled data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from burnish.cli.console import counted, output
from burnish.cli.data_options import Pixels, TextOptions, check_data_options
from burnish.cli.model_options import (
    DATA,
    RESULT,
    BatchSizeOption,
    ImageSizeOption,
    MissingOption,
    ModelArgument,
    SavedModel,
    describe,
    print_table,
    write_csv,
)
from burnish.cli.option_groups import takes_options, values_of
from burnish.compiler.options import CompileOptions
from burnish.files.file_writing import check_output

if TYPE_CHECKING:
    from burnish.data import Dataset, Text
    from burnish.training.trained_model import TrainedModel

OBJECTIVE = "What is measured of an ONNX file; a run has its own"


@takes_options()
def evaluate(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A folder of images (one subfolder per class), a COCO or PASCAL VOC folder, one of images and masks, an .npz, "
            ".csv or .parquet file, or digits:test.",
            show_default=False,
        ),
    ],
    *,
    saved: SavedModel,
    label: Annotated[
        str | None,
        typer.Option("--label", help="Label column of a table; by default label, y, target or the last.", rich_help_panel=DATA),
    ] = None,
    image_size: ImageSizeOption = None,
    missing: MissingOption = None,
    batch_size: BatchSizeOption = 32,
    pixels: Pixels,
    texts: TextOptions,
    loss: Annotated[
        str | None,
        typer.Option("--loss", help="As train takes it; by default what the file says.", rich_help_panel=OBJECTIVE),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics", help="Such as accuracy,top_5; by default what fits the loss.", rich_help_panel=OBJECTIVE),
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option("--outputs", metavar="NAME", help="The output that the loss reads.", rich_help_panel=OBJECTIVE),
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write loss and metrics there (.csv).", rich_help_panel=RESULT)
    ] = None,
) -> None:
    """Print loss and metrics of a model over labelled data."""
    if path is not None and path.suffix != ".csv":
        raise typer.BadParameter(f"--output {path}: figures are written as .csv")
    if path is not None:
        check_output(path, "--output", read=[data])
    check_data_options(data, label=label, image_size=image_size, pixels=pixels.first_named, missing=missing)
    opened = saved.open(model, **values_of(CompileOptions, loss=loss, metrics=metrics, outputs=outputs))
    names, settings = opened.described.classes, pixels.settings()
    text = texts.settings_for(model, data, opened.described)
    options: dict[str, Any] = {"label": label, "classes": names, "image_size": image_size, "missing": missing or "error"}
    dataset, cut = _read(opened, data, text, {**options, "pixels": settings})
    console = output()
    describe(console, opened, data, len(dataset), getattr(dataset, "preprocessing", None), settings is not None)
    if names is None and (classes := getattr(dataset, "classes", None)):
        console.print(f"classes: {', '.join(classes)}; the model does not say how its own are called")
    for note in (cut, getattr(dataset, "note", None)):
        if note is not None:
            console.print(note)
    figures = opened.evaluate(dataset, batch_size)
    print_table(console, ["figure", "value"], figures.items())
    if path is not None:
        write_csv(path, ["figure", "value"], figures.items())
        console.print(f"{path}: {counted(len(figures), 'figure')}")


def _read(opened: TrainedModel, data: str, text: Text | None, options: Mapping[str, Any]) -> tuple[Dataset, str | None]:
    """The data as the model takes them, and a line that says so where it takes texts cut off."""
    from burnish.data import open_dataset
    from burnish.training.run_data import within_the_opened

    read = partial(open_dataset, data, opened.to_evaluate, **options)
    return within_the_opened(opened, read(text=text), text, lambda text: read(text=text))

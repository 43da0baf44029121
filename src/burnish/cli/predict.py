"""``burnish predict``: what a model says of data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from burnish.cli.console import counted, output
from burnish.cli.model_options import (
    DATA,
    RESULT,
    AverageOption,
    BatchSizeOption,
    BestOption,
    EngineOption,
    ImageSizeOption,
    ModelArgument,
    ProgramOption,
    cannot_write,
    pixels_of,
    print_table,
    write_csv,
)
from burnish.cli.option_groups import takes_options
from burnish.cli.pixel_options import Pixels

SHOWN = 20


@takes_options()
def predict(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="An image, a folder of images, an .npz, .csv or .parquet file, or digits:test.",
            show_default=False,
        ),
    ],
    program: ProgramOption = None,
    best: BestOption = False,
    average: AverageOption = None,
    engine: EngineOption = "auto",
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            help="Column of a table to leave out; by default, of one column too many, label, y, target or the last.",
            rich_help_panel=DATA,
        ),
    ] = None,
    image_size: ImageSizeOption = None,
    batch_size: BatchSizeOption = 32,
    *,
    pixels: Pixels,
    outputs: Annotated[
        str | None,
        typer.Option("--outputs", metavar="NAME", help="Which output is shown, where there are several.", rich_help_panel=RESULT),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(
            "--activation",
            help="What makes probabilities of the output: softmax, sigmoid or none; by default what the model tells.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", min=1, help="How many classes are shown, the most probable first.", rich_help_panel=RESULT)
    ] = 1,
    path: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write all predictions: a table (.csv), or all outputs as they are (.npz).",
            rich_help_panel=RESULT,
        ),
    ] = None,
) -> None:
    """Print what a model says of data: classes and probabilities, or values."""
    if path is not None and path.suffix not in (".csv", ".npz"):
        raise typer.BadParameter(f"--output {path}: predictions are written as .csv or .npz")
    import numpy as np

    from burnish.data.unlabelled import open_samples
    from burnish.training.answers import read_answer, table
    from burnish.training.trained_model import open_model

    opened = open_model(model, program=program, best=best, average=average, engine=engine, to_evaluate=False)
    samples = open_samples(data, opened.to_predict, label=label, image_size=image_size, pixels=pixels.settings())
    console = output()
    console.print(f"{opened.name}; {data}: {counted(len(samples.dataset), 'sample')}", markup=False)
    if (line := pixels_of(opened, samples.preprocessing, pixels.first_named is not None)) is not None:
        console.print(line, markup=False)
    if samples.note is not None:
        console.print(samples.note, markup=False)
    answered = opened.predict(samples.dataset, batch_size)
    if path is not None and path.suffix == ".npz":
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(path, **answered)  # type: ignore[arg-type]  # the names of outputs are no options
        except OSError as error:
            raise cannot_write(path, error) from error
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in answered.items())
        console.print(f"{path}: the outputs as they are, {shapes}", markup=False)
        return
    answer = read_answer(opened, outputs, activation)
    columns, rows = table(answer, answer.numbers(answered[answer.output]), opened.described.classes, top)
    whole = [[name, *row] for name, row in zip(samples.names, rows, strict=True)]
    if path is not None:
        write_csv(path, [samples.kind, *columns], whole)
    console.print(answer.text(), markup=False)
    print_table(console, [samples.kind, *columns], whole[:SHOWN])
    if len(whole) > SHOWN:
        console.print(f"and {counted(len(whole) - SHOWN, 'sample')} more" + ("" if path else " (-o writes all)"), markup=False)
    if path is not None:
        console.print(f"{path}: {counted(len(whole), 'prediction')}", markup=False)

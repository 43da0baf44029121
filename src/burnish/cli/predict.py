"""``burnish predict`` and ``burnish evaluate``: predictions of a saved model, and its loss and metrics on labelled data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from burnish.cli.compilation_options import SampleAxisOption
from burnish.cli.console import cannot_write, counted, output, print_table, write_csv
from burnish.cli.data_options import Pixels, TextOptions, check_data_options
from burnish.cli.option_groups import COMMON, OptionGroup, takes_options, values_of
from burnish.cli.train_options import KernelsOption, chosen_engine
from burnish.compiler.options import CompileOptions
from burnish.files.file_writing import check_output, replacing

if TYPE_CHECKING:
    import numpy as np

    from burnish.data import Dataset, Text
    from burnish.data.unlabelled import Samples
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
    typer.Option(
        "--image-size",
        help="Height and width of images, for a model that takes any.",
        show_default="as the model says",
        rich_help_panel=DATA,
    ),
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
BatchSizeOption = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples of a batch.", rich_help_panel=DATA)]


@dataclass(frozen=True)
class SavedModel(OptionGroup):
    """The weights to read from a saved model, and the engine."""

    panel: ClassVar = MODEL
    program: Annotated[
        Path | None, typer.Option("--program", help="Saved program of a checkpoint that is not in the folder of its run.")
    ] = None
    best: Annotated[
        bool | None,
        typer.Option(
            "--best/--latest", help="Weights of a run: the best epoch, or the latest state.", show_default="the one it exported"
        ),
        COMMON,
    ] = None
    average: Annotated[
        bool | None,
        typer.Option(
            "--average/--no-average",
            help="Use the average of the weights that the optimizer keeps, or not.",
            show_default="as the run exported",
        ),
    ] = None
    sample_axis: SampleAxisOption = None
    engine: Annotated[str, typer.Option("--engine", help="Engine that computes: onnxruntime, torch or reference.")] = "auto"
    kernels: KernelsOption = None

    def open(self, model: Path, **objective: Any) -> TrainedModel:
        """Open a model for predictions and evaluation.

        Args:
            model: its path.
            objective: further arguments of ``open_model``.

        Raises:
            BurnishError: see ``open_model`` and ``chosen_engine``.
        """
        from burnish.training.trained_model import open_model

        chosen: dict[str, Any] = {"best": self.best, "average": self.average}
        chosen["engine"] = chosen_engine(self.engine, self.kernels)
        chosen |= values_of(CompileOptions, sample_axis=self.sample_axis)
        return open_model(model, program=self.program, **chosen, **objective)


def describe(console: Console, model: TrainedModel, data: str, samples: int, preprocessing: Any, asked: bool) -> None:
    """Print the model, the number of samples, and the preprocessing of pixels with its reason.

    Args:
        console: where to print.
        model: the model.
        data: where the samples are from.
        samples: how many there are.
        preprocessing: of pixels; None if the data have none.
        asked: True if the command line gave it.
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


SHOWN = 20
"""The number of rows on a terminal. Other outputs get all rows."""


@dataclass(frozen=True)
class Shown(OptionGroup):
    """Options for printing and writing predictions."""

    panel: ClassVar = RESULT
    outputs: Annotated[
        str | None,
        typer.Option("--outputs", metavar="NAME", help="Output to show, if there are several.", show_default="the first"),
    ] = None
    activation: Annotated[
        str | None,
        typer.Option(
            "--activation",
            help="Function that makes probabilities of the output: softmax, sigmoid or none.",
            show_default="as the model says",
        ),
    ] = None
    top: Annotated[int, typer.Option("--top", min=1, help="Number of classes to show, the most probable first."), COMMON] = 1
    score: Annotated[float, typer.Option("--score", min=0, max=1, help="Lowest score of a detector's boxes to show."), COMMON] = (
        0.25
    )
    path: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write all predictions: a table (.csv), or all outputs as they are (.npz)."),
        COMMON,
    ] = None


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
    *,
    saved: SavedModel,
    label: Annotated[
        str | None,
        typer.Option(
            "--label",
            help="Column of a table to leave out.",
            show_default="label, y, target or the last, of one column too many",
            rich_help_panel=DATA,
        ),
        COMMON,
    ] = None,
    image_size: ImageSizeOption = None,
    batch_size: BatchSizeOption = 32,
    pixels: Pixels,
    texts: TextOptions,
    shown: Shown,
) -> None:
    """Print the predictions of a model.

    They are classes with probabilities, values, boxes of objects, or the classes of pixels.
    """
    path = shown.path
    if path is not None and path.suffix not in (".csv", ".npz"):
        raise typer.BadParameter(f"--output {path}: predictions are written as .csv or .npz")
    if path is not None:
        check_output(path, "--output", read=[data])
    from burnish.data.unlabelled import open_samples
    from burnish.training.predictions import is_detector
    from burnish.training.run_data import within_the_opened

    opened = saved.open(model, to_evaluate=False)
    text = texts.settings_for(model, data, opened.described)
    read = partial(open_samples, data, opened.to_predict, label=label, image_size=image_size, pixels=pixels.settings())
    samples = read(text=text)
    dataset, cut = within_the_opened(opened, samples.dataset, text, lambda text: read(text=text).dataset)
    console = output()
    describe(console, opened, data, len(dataset), samples.preprocessing, pixels.first_named is not None)
    if (note := cut or samples.note) is not None:
        console.print(note)
    outputs = opened.predict(dataset, batch_size)
    if path is not None and path.suffix == ".npz":
        _write_outputs(console, path, outputs)
        return
    if is_detector(opened) and shown.outputs is None:
        line, header, rows = _boxes(saved.open(model), samples, shown.score, batch_size)
    else:
        line, header, rows = _answers(opened, samples, outputs, shown)
    if path is not None:
        write_csv(path, header, rows)
    console.print(line)
    shown_rows = rows[:SHOWN] if console.is_terminal else rows
    print_table(console, header, shown_rows)
    if left := len(rows) - len(shown_rows):
        unit = "sample" if len(rows) == len(samples.names) else "row"
        console.print(f"and {counted(left, unit)} more" + ("" if path else " (-o or a pipe writes all)"))
    if path is not None:
        console.print(f"{path}: {counted(len(rows), 'prediction')}")


def _answers(
    opened: TrainedModel, samples: Samples, outputs: Mapping[str, np.ndarray], shown: Shown
) -> tuple[str, list[str], list[list[Any]]]:
    """Return a line that explains the output, and the header and rows of a table."""
    from burnish.training.predictions import pixel_table, read_answer, table

    answer, classes = read_answer(opened, shown.outputs, shown.activation), opened.described.classes
    array = outputs[answer.output]
    if answer.is_of_pixels(array):
        columns, shares = pixel_table(answer, array, classes)
        rows = [[samples.names[place], *row] for place, row in shares]
        return f"{answer.text()}; the shares of pixels whose class is most probable", [samples.kind, *columns], rows
    columns, answers = table(answer, answer.numbers(array), classes, shown.top)
    return answer.text(), [samples.kind, *columns], [[name, *row] for name, row in zip(samples.names, answers, strict=True)]


def _boxes(opened: TrainedModel, samples: Samples, least: float, batch_size: int) -> tuple[str, list[str], list[list[Any]]]:
    """Return a line that explains the boxes, and the header and rows of a table."""
    from burnish.data.image_folder import ImageFiles
    from burnish.training.predictions import box_rows, found_in

    sizes = samples.dataset.sizes if isinstance(samples.dataset, ImageFiles) else None
    pictures = list(found_in(opened, samples.dataset, batch_size))
    rows = box_rows(samples.names, pictures, opened.described.classes, least, sizes, samples.preprocessing)
    without = len(pictures) - len({row[0] for row in rows})
    measure = "fractions of the model's picture" if sizes is None else "pixels of the picture"
    line = f"boxes of a score of {least:g} or more (--score), in {measure}"
    if without:
        line += f"; none in {counted(without, 'picture')} of {len(pictures):,}"
    return line, [samples.kind, "class", "score", "left", "top", "right", "bottom"], rows


def _write_outputs(console: Console, path: Path, outputs: Mapping[str, np.ndarray]) -> None:
    import numpy as np

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, **outputs)  # type: ignore[arg-type]  # the names of outputs are no options
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
    console.print(f"{path}: the outputs as they are, {shapes}")


OBJECTIVE = "What is measured of an ONNX file; a run has its own"


@takes_options()
def evaluate(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Labelled data: a folder of images, a table, arrays, texts, or digits:test.\n\n"
            "Folders are of images (one subfolder per class), COCO, PASCAL VOC, or images and masks.",
            show_default=False,
        ),
    ],
    *,
    saved: SavedModel,
    label: Annotated[
        str | None,
        typer.Option(
            "--label", help="Label column of a table.", show_default="label, y, target or the last", rich_help_panel=DATA
        ),
        COMMON,
    ] = None,
    image_size: ImageSizeOption = None,
    missing: MissingOption = None,
    batch_size: BatchSizeOption = 32,
    pixels: Pixels,
    texts: TextOptions,
    loss: Annotated[
        str | None,
        typer.Option(
            "--loss", help="Loss to measure, as train takes it.", show_default="as the file says", rich_help_panel=OBJECTIVE
        ),
        COMMON,
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            help="Metrics, such as accuracy,top_5.",
            show_default="those that fit the loss",
            rich_help_panel=OBJECTIVE,
        ),
        COMMON,
    ] = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            "--outputs",
            metavar="NAME",
            help="Output that the loss reads.",
            show_default="as the file says",
            rich_help_panel=OBJECTIVE,
        ),
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write loss and metrics to a .csv file.", rich_help_panel=RESULT), COMMON
    ] = None,
) -> None:
    """Print the loss and metrics of a model on labelled data."""
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
    """Open the data for a model; the second result is a note if texts are truncated."""
    from burnish.data import open_dataset
    from burnish.training.run_data import within_the_opened

    read = partial(open_dataset, data, opened.to_evaluate, **options)
    return within_the_opened(opened, read(text=text), text, lambda text: read(text=text))

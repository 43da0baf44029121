"""``burnish predict`` and ``burnish evaluate``: predictions of a saved model, and its loss and metrics on labelled data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from burnish.cli.console import counted, errors, make_folder_of, output, print_table, write_csv
from burnish.cli.data_options import Pixels, Sounds, TextOptions, check_data_options
from burnish.cli.option_groups import COMMON, OptionGroup, declared_option, takes_options, values_of
from burnish.cli.train_options import KernelsOption, chosen_engine
from burnish.compiler.options import CompileOptions
from burnish.files.file_writing import check_output, replacing
from burnish.finetuning.options import FinetuneOptions
from burnish.options import declarations
from burnish.training.predictor_options import AnswerOptions, SavedModelOptions

if TYPE_CHECKING:
    from burnish.data.given_samples import Given
    from burnish.data.sound.settings import Sound
    from burnish.training.predictions import Answer
    from burnish.training.predictor import Prediction, Predictor
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
MissingOption = Annotated[str, declared_option(FinetuneOptions, "missing", DATA)]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Samples of a batch.", rich_help_panel=DATA)]


@dataclass(frozen=True)
class SavedModel(OptionGroup, SavedModelOptions):
    """The weights to read from a saved model, and the engine."""

    panel: ClassVar = MODEL
    kernels: KernelsOption = None

    @property
    def opening(self) -> dict[str, Any]:
        """The options for ``open_model`` and ``Predictor``.

        Raises:
            BurnishError: see ``chosen_engine``.
        """
        chosen = {name: getattr(self, name) for name in declarations(SavedModelOptions)}
        assert isinstance(self.engine, str)
        return chosen | {"engine": chosen_engine(self.engine, self.kernels)}

    def open(self, model: Path, **objective: Any) -> TrainedModel:
        """Open a model for predictions and evaluation.

        Args:
            model: its path.
            objective: further arguments of ``open_model``.

        Raises:
            BurnishError: see ``open_model`` and ``chosen_engine``.
        """
        from burnish.training.trained_model import open_model

        return open_model(model, **self.opening, **objective)


def describe(
    console: Console, model: TrainedModel, data: str, samples: int, preprocessing: Any, asked: bool, sound: Sound | None = None
) -> None:
    """Print the model, the number of samples, and the preprocessing of pixels or sounds with its reason.

    Args:
        console: console to print to.
        model: the model.
        data: name of the data.
        samples: number of samples.
        preprocessing: preprocessing of pixels; None if the data have none.
        asked: True if the command line gave it.
        sound: preprocessing of sounds; None if the data have none.
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
    elif sound is not None:
        console.print(f"sound: {sound.text()}{'' if model.described.sound is None else ' (as recorded with the model)'}")
    elif recorded is not None:
        console.print(f"pixels: none, the numbers are taken as they are; those of images are {recorded.formula()}")


@dataclass(frozen=True)
class Shown(OptionGroup, AnswerOptions):
    """Options for printing and writing predictions."""

    panel: ClassVar = RESULT
    top: Annotated[
        int | None,
        typer.Option(
            "--top", min=1, help="Number of classes to show, the most probable first.", show_default="1, and all in JSON"
        ),
        COMMON,
    ] = None
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Format of predictions on the screen: table, csv, or jsonl for a JSON object a line.",
            show_default="table, and nothing with --output",
        ),
        COMMON,
    ] = None
    path: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write predictions: a table (.csv), JSON (.jsonl), or outputs as they are (.npz)."),
        COMMON,
    ] = None

    def check(self, data: Sequence[str]) -> None:
        """Reject an unknown format, and an output file that cannot be written or is one of the data."""
        from burnish.cli.prediction_lines import FORMATS

        if self.form is not None and self.form not in FORMATS:
            raise typer.BadParameter(
                f"--format {self.form}: predictions are printed as {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
            )
        if self.path is not None and self.path.suffix not in WRITTEN:
            raise typer.BadParameter(
                f"--output {self.path}: predictions are written as {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}"
            )
        if self.path is not None:
            check_output(self.path, "--output", read=list(data))


WRITTEN = (".csv", ".jsonl", ".npz")


@takes_options()
def predict(
    model: ModelArgument,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="Photos, .wav files, folders of them, .csv, .parquet or .npz files, files of texts, or a text in quotes.",
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
    sounds: Sounds,
    shown: Shown,
) -> None:
    """Print the predictions of a model.

    They are classes with probabilities, values, boxes of objects, or the classes of pixels.
    """
    shown.check(data)
    from burnish.training.predictor import Predictor

    reading: dict[str, Any] = {"label": label, "image_size": image_size, "pixels": pixels.settings(), "text": texts.settings()}
    reading["sound"] = sounds.sound
    answers = {name: getattr(shown, name) for name in declarations(AnswerOptions)}
    console = output() if shown.form in (None, "table") else errors()
    with Predictor(model, **saved.opening, **reading, **answers) as predictor:
        given = predictor.read([_as_given(text, predictor) for text in data])
        named = data[0] if len(data) == 1 else f"{data[0]} and {len(data) - 1:,} more"
        first, asked = given.parts[0], pixels.first_named is not None
        describe(console, predictor.model, named, len(given), first.preprocessing, asked, getattr(first.dataset, "sound", None))
        for note in given.notes:
            console.print(note)
        if shown.path is not None and shown.path.suffix == ".npz":
            _write_outputs(console, shown.path, predictor.predictions(given, batch_size))
        else:
            _write_lines(console, predictor, given, batch_size, shown)


def _as_given(text: str, predictor: Predictor) -> str | Path:
    """Return a path, or a text of several words for a model that reads texts."""
    is_text = any(map(str.isspace, text)) and predictor.text_of() is not None and not Path(text).exists()
    return text if is_text else Path(text)


def _write_lines(console: Console, predictor: Predictor, given: Given, batch_size: int, shown: Shown) -> None:
    from burnish.cli.prediction_lines import Rows, shown_lines, until_nobody_reads, written_lines
    from burnish.training.predictions import refuse_language

    path, form = shown.path, shown.form or ("table" if shown.path is None else None)
    answer = predictor.answer_or_none()
    if answer is not None:
        refuse_language(predictor.model, answer.output)
    if not predictor.gives_boxes and answer is None and (form in ("table", "csv") or (path and path.suffix == ".csv")):
        answer = predictor.answer()
    kinds = {part.kind for part in given.parts}
    labels = predictor.model.described.labels
    rows = Rows(kinds.pop() if len(kinds) == 1 else "sample", answer, shown.top, () if labels is None else labels.columns)
    count, without, kind = 0, 0, ""
    with ExitStack() as opened:
        sinks = [] if form is None else [shown_lines(form, rows, shown.top)]
        if path is not None:
            sinks.append(opened.enter_context(written_lines(path, rows, shown.top)))
        opened.enter_context(until_nobody_reads())
        for prediction in predictor.predictions(given, batch_size, with_outputs=not predictor.gives_boxes):
            count, kind = count + 1, prediction.kind
            without += kind == "boxes" and not prediction.found()
            for sink in sinks:
                sink.write(prediction)
        console.print(_explained(answer, kind, given, shown.score, count, without))
        for sink in sinks:
            sink.end()
    if path is not None:
        console.print(f"{path}: {counted(count, 'prediction')}")


def _explained(answer: Answer | None, kind: str, given: Given, least: float, count: int, without: int) -> str:
    if kind == "boxes":
        measure = "fractions of the model's picture" if given.parts[0].sizes is None else "pixels of the picture"
        line = f"boxes of a score of {least:g} or more (--score), in {measure}"
        return f"{line}; none in {counted(without, 'picture')} of {count:,}" if without else line
    if answer is None:
        return "outputs: as they are, as nothing says which one is the prediction (--outputs)"
    return f"{answer.text()}; the shares of pixels whose class is most probable" if kind == "mask" else answer.text()


def _write_outputs(console: Console, path: Path, predictions: Iterable[Prediction]) -> None:
    import numpy as np

    outputs: dict[str, list[np.ndarray]] = {}
    for prediction in predictions:
        for name, array in prediction.outputs.items():
            outputs.setdefault(name, []).append(array)
    arrays = {name: np.stack(each) for name, each in outputs.items()}
    make_folder_of(path)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # the names of outputs are no options
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    console.print(f"{path}: the outputs as they are, {shapes}")


def _trained_on(predictor: Predictor, data: str) -> list[str]:
    """Return a line if a run is evaluated on the data of its own training and held-out part."""
    from burnish.data.splitting import read_split
    from burnish.training.run_files import read_record

    folder = predictor.path
    kept = read_split(folder) if folder.is_dir() else None
    if kept is None or read_record(folder).get("data") != data:
        return []
    return [f"the run was trained on most of {data}, and {kept['held_out']}: without DATA, that part alone is evaluated"]


OBJECTIVE = "What is measured of an ONNX file; a run has its own"


@takes_options()
def evaluate(
    model: ModelArgument,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Labelled data: a folder of images, a table, arrays, texts, or digits:test.\n\n"
            "Folders are of images or .wav files (one subfolder per class), COCO, PASCAL VOC, or images and masks. "
            "Without DATA, a run is judged on its own: those of --eval-data, or the part held out by --eval-split.",
            show_default=False,
        ),
    ] = None,
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
    missing: MissingOption = "auto",
    batch_size: BatchSizeOption = 32,
    pixels: Pixels,
    texts: TextOptions,
    sounds: Sounds,
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
    from burnish.training.predictor import Predictor

    objective = values_of(CompileOptions, loss=loss, metrics=metrics, outputs=outputs)
    settings = pixels.settings()
    reading: dict[str, Any] = {"label": label, "image_size": image_size, "pixels": settings, "text": texts.settings()}
    reading["sound"] = sounds.sound
    console = output()
    with Predictor(model, **saved.opening, **objective, **reading, missing=missing) as predictor:
        if data is None:
            dataset, notes, data = predictor.read_evaluation()
        else:
            dataset, notes = predictor.read_labelled(data)
            notes += _trained_on(predictor, data)
        opened = predictor.evaluated
        preprocessing, sound = getattr(dataset, "preprocessing", None), getattr(dataset, "sound", None)
        describe(console, opened, data, len(dataset), preprocessing, settings is not None, sound)
        if opened.described.classes is None and (classes := getattr(dataset, "classes", None)):
            console.print(f"classes: {', '.join(classes)}; the model does not say how its own are called")
        for note in notes:
            console.print(note)
        figures = opened.evaluate(dataset, batch_size)
    print_table(console, ["figure", "value"], figures.items())
    if path is not None:
        write_csv(path, ["figure", "value"], figures.items())
        console.print(f"{path}: {counted(len(figures), 'figure')}")

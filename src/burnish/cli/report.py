"""``burnish report``: the report of a run in one HTML file, from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from burnish.cli.console import output
from burnish.cli.data_options import Pixels, TextOptions, check_data_options
from burnish.cli.option_groups import COMMON, takes_options
from burnish.cli.predict import DATA, RESULT, BatchSizeOption, ImageSizeOption, MissingOption, SavedModel
from burnish.cli.repetition import as_it_was
from burnish.cli.run_folders import CONFIGURATION
from burnish.files.file_writing import check_output
from burnish.untrusted_files import read_toml


@takes_options("program", "sample_axis")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)],
    *,
    saved: SavedModel,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Data that the model is judged on.",
            show_default="the run's evaluation data, else its training data",
            rich_help_panel=DATA,
        ),
        COMMON,
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--label", help="Label column of a table.", show_default="as the run", rich_help_panel=DATA),
        COMMON,
    ] = None,
    image_size: ImageSizeOption = None,
    missing: MissingOption = "auto",
    batch_size: BatchSizeOption = 32,
    pixels: Pixels,
    texts: TextOptions,
    path: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write.", show_default="report.html in the folder", rich_help_panel=RESULT),
        COMMON,
    ] = None,
) -> None:
    """Write the report of a run in one HTML file.

    It shows curves, confusion matrix, worst examples, what was trained, configuration, time and memory.
    """
    from burnish.data.splitting import SPLIT
    from burnish.errors import CheckpointError
    from burnish.training.html_report import Contents, write_report
    from burnish.training.html_report.samples import judge
    from burnish.training.predictor import Predictor
    from burnish.training.run_files import files_of, is_run, read_record

    if not is_run(run):
        raise CheckpointError(f"'{run}' is not the folder of a run: give the folder that burnish train or finetune wrote")
    check_output(path or run / "report.html", "--output", read=files_of(run))
    record, configuration = read_record(run), _configuration(run)
    options = _options(configuration)
    given = data or options.get("eval-data") or options.get("data") or record.get("data")
    if not given:
        raise CheckpointError(f"'{run}' does not say what it was trained on: name what to judge it on (--data)")
    given, label = as_it_was(str(given)), label or options.get("label")
    size = image_size or (tuple(options["image-size"]) if "image-size" in options else None)
    check_data_options(given, label=label, image_size=size, pixels=pixels.first_named)
    missing = str(options.get("missing", "auto")) if missing == "auto" else missing
    reading: dict[str, Any] = {"label": label, "image_size": size, "missing": missing}
    with Predictor(run, **saved.opening, **reading, pixels=pixels.settings(), text=texts.settings()) as predictor:
        if data is None and (run / SPLIT).is_file():
            dataset, notes, given = predictor.read_evaluation()
            given = f"{given}, {notes[0]}"
        else:
            dataset, _ = predictor.read_labelled(given)
        model = predictor.evaluated
        contents = Contents.of_folder(run, record, judge(model, dataset, batch_size), f"{given}, by {model.name}", configuration)
    written = write_report(path or run / "report.html", contents)
    output().print(f"{written}: the report of {model.name}, judged on {given}")


def _configuration(run: Path) -> str | None:
    try:
        return (run / CONFIGURATION).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _options(configuration: str | None) -> dict[str, Any]:
    try:
        content = read_toml(configuration or "")
    except ValueError:
        return {}
    return next((table for table in content.values() if isinstance(table, dict)), {})

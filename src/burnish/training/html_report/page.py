"""The page of a report, from its template: tiles, tables and pictures."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from burnish.errors import CheckpointError
from burnish.files.file_writing import replacing
from burnish.training.html_report.charts import Line, line_chart, template
from burnish.training.html_report.contents import Contents, Judgement
from burnish.training.html_report.pictures import missing_pillow, png
from burnish.training.progress import duration
from burnish.training.run_results import EVALUATION_PREFIX

MATRIX_CLASSES = 30
"""Most classes in the matrix; with more, the most confused pairs are listed."""
PAIRS = 25
LONGEST_NAME = 28
"""Most characters of a class name in the matrix; the tooltip has the whole name."""


def write_report(path: str | Path, contents: Contents) -> Path:
    """Write a report as one HTML file, atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be written: {error}. Choose a file you can write to") from error
    with replacing(path) as partial:
        partial.write_text(report_page(contents), encoding="utf-8", errors="backslashreplace")
    return path


def report_page(contents: Contents) -> str:
    """Return the page as HTML."""
    judgement, options = contents.judgement, contents.program.options
    trained, tensors = _trained(contents)
    without_pictures = missing_pillow()
    examples = () if judgement is None else judgement.worst
    return template("report.html.j2").render(
        contents=contents,
        tiles=_tiles(contents),
        charts=_charts(contents),
        confusion=None if judgement is None or judgement.confusion is None else _confusion(judgement, contents.data),
        missing="" if judgement is None else judgement.missing,
        examples_said=_examples_said(judgement, contents.data, without_pictures),
        examples=[
            (each, None if each.pixels is None or without_pictures else base64.b64encode(png(each.pixels)).decode("ascii"))
            for each in examples
        ],
        trained=trained,
        tensors=tensors,
        options={name: _plain(value) for name, value in options.items() if value not in (None, [], {}, "")},
    )


def _tiles(contents: Contents) -> list[tuple[str, str]]:
    reached = contents.reached
    tiles = [
        (f"{name.replace('_', ' ')}, {which} data, last epoch", f"{value:.4f}") for name, (which, value) in contents.final.items()
    ]
    if contents.best is not None:
        best = contents.best
        tiles.append((f"best {best['metric'].replace('_', ' ')}, epoch {best['epoch']}", f"{best['value']:.4f}"))
    tiles += [("epochs", f"{reached['epoch']:,.0f}"), ("steps", f"{reached['step']:,.0f}")]
    if reached["seconds"]:
        tiles.append(("time in training", duration(reached["seconds"])))
        tiles.append(("samples in a second", f"{reached['samples'] / reached['seconds']:,.0f}"))
    peak = contents.program.planned_peak(contents.batch_size).bytes
    tiles.append((f"planned peak of a step, batch {contents.batch_size}", _size(peak)))
    if contents.peak_bytes is not None:
        tiles.append(("peak memory of the process", _size(contents.peak_bytes)))
    return tiles


def _charts(contents: Contents) -> list[str]:
    charts = [
        line_chart(
            name.replace("_", " "),
            [Line("training", contents.points(name)), Line("evaluation", contents.points(EVALUATION_PREFIX + name))],
        )
        for name in contents.names
    ]
    charts.append(line_chart("learning rate", [Line("learning rate", contents.points("lr"))]))
    charts.append(line_chart("samples in a second", [Line("samples in a second", contents.throughput)]))
    return [chart for chart in charts if chart]


def _confusion(judgement: Judgement, data: str) -> dict[str, Any]:
    """The matrix with a caption, or the most confused pairs; and the figures of each class."""
    matrix, names = judgement.confusion, judgement.classes
    assert matrix is not None
    if judgement.of_boxes is not None:
        objects, spare = matrix[:-1].sum(), matrix[-1].sum()
        said = (
            f"Of {data}: rows are the objects, columns what the model says; {matrix.trace():,} of {objects:,} objects are "
            f"found as what they are, and {spare:,} box{'es stand' if spare != 1 else ' stands'} where none is. Boxes count from "
            f"a score of {judgement.of_boxes:.2g} on, at which the harmonic mean of precision and recall is largest, and stand "
            "for an object that they overlap by half."
        )
    else:
        what = "pixels right" if judgement.of_pixels else "right"
        right = f"{matrix.trace():,} of {matrix.sum():,} {what}, {matrix.trace() / max(matrix.sum(), 1):.2%}"
        said = f"Of {data}: rows are the right classes, columns what the model says; {right}."
    is_small = len(names) <= MATRIX_CLASSES
    return {
        "said": said,
        "matrix": _matrix(matrix, names) if is_small else None,
        "pairs": [] if is_small else _mixed_up(matrix, names),
        "classes": _figures_of_classes(matrix, names if judgement.of_boxes is None else names[:-1]),
    }


def _matrix(matrix: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    named = [(name, _shortened(name)) for name in names]
    rows = []
    for row, name in enumerate(names):
        cells = [
            {
                "kind": ("right" if row == column else "wrong") + (" strong" if shares[row, column] > 0.55 else ""),
                "percent": f"{100 * shares[row, column]:.0f}",
                "title": f"{name} taken for {names[column]}: {count:,} ({shares[row, column]:.1%})",
                "count": count,
            }
            for column, count in enumerate(matrix[row].tolist())
        ]
        rows.append((named[row], cells))
    return {"names": named, "rows": rows}


def _shortened(name: str) -> str:
    """A name shortened to its beginning and end, where most names differ."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half].rstrip()}…{name[-half:].lstrip()}"


def _mixed_up(matrix: np.ndarray, names: Sequence[str]) -> list[tuple[str, ...]]:
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = [(row, column) for row, column in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[row, column]]
    return [(names[row], names[column], f"{wrong[row, column]:,}") for row, column in pairs]


def _figures_of_classes(matrix: np.ndarray, names: Sequence[str]) -> list[tuple[str, ...]]:
    right = np.diag(matrix).astype(np.float64)
    truth, said = matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall = right / np.maximum(said, 1), right / np.maximum(truth, 1)
    f1 = 2 * right / np.maximum(truth + said, 1)
    return [
        (names[index], f"{precision[index]:.4f}", f"{recall[index]:.4f}", f"{f1[index]:.4f}", f"{truth[index]:,}")
        for index in np.argsort(f1[: len(names)], kind="stable")
    ]


def _examples_said(judgement: Judgement | None, data: str, without_pictures: str | None) -> str:
    if judgement is None:
        return ""
    if not judgement.worst:
        return "" if judgement.missing else f"None: the model is right about all of {data}."
    what = ""
    if judgement.of_pixels:
        what = ": picture, mask and what the model says. Classes are the pair of most wrong pixels, errors the share of these"
    if judgement.of_boxes is not None:
        what = ": the objects, and the boxes of the model. What is missed or wrong is thick, and errors are how many of both"
    said = f"Of {data}, {judgement.samples:,} samples; the worst first{what}."
    is_left_out = without_pictures is not None and any(example.pixels is not None for example in judgement.worst)
    return f"{said} None is shown: {without_pictures}." if is_left_out else said


def _trained(contents: Contents) -> tuple[list[str], list[tuple[str, ...]]]:
    """A summary of the numbers by role, and table rows of all tensors."""
    tensors = contents.tensors
    sizes: dict[str, list[int]] = {}
    for tensor in tensors:
        sizes.setdefault(tensor.role, []).append(tensor.size)
    said = [f"{role}: {sum(each):,} numbers in {len(each):,} tensor{'s' * (len(each) != 1)}" for role, each in sizes.items()]
    rows: list[tuple[str, ...]] = [
        (tensor.name, " × ".join(map(str, tensor.shape)) or "scalar", f"{tensor.size:,}", tensor.role) for tensor in tensors
    ]
    return said, rows


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"

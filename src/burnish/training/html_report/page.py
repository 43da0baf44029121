"""The page of a report: HTML with its style sheet, charts and pictures in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from burnish.errors import CheckpointError, escaped
from burnish.files.file_writing import replacing
from burnish.training.html_report.charts import Line, line_chart
from burnish.training.html_report.contents import Contents
from burnish.training.html_report.judgement import Example, Judgement
from burnish.training.html_report.pictures import data_address, png
from burnish.training.html_report.style import STYLE
from burnish.training.progress import duration
from burnish.training.reports import EVALUATION_PREFIX

MATRIX_CLASSES = 30
"""Beyond so many classes the pairs that are mixed up most stand in place of the matrix."""
PAIRS = 25
LONGEST_NAME = 28
"""Characters of a class beside the matrix; the whole name is its tooltip."""
# Nothing of the page is fetched and no script runs, whatever names stand in it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(path: str | Path, contents: Contents) -> Path:
    """Write a report as one HTML file, whole or not at all.

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
    """Return the page."""
    sections = [
        ("Figures", _tiles(contents)),
        ("Curves", _curves(contents)),
        ("Confusion matrix", _confusion(contents.judgement, contents.data)),
        ("Worst examples", _worst(contents.judgement, contents.data)),
        ("What was trained", _trained(contents)),
        ("Configuration", _configuration(contents)),
        ("Environment", _pairs(contents.environment)),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(contents.title)}</title><style>{STYLE}</style></head>"
        f"<body><header><h1>{_text(contents.title)}</h1></header><main>{body}</main></body></html>\n"
    )


def _text(value: object) -> str:
    """A text as it is to be read: what steers a reader's terminal or browser is written out."""
    return escape(escaped(str(value)))


def _table(header: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """A table of texts; ``numbers`` are the columns that are aligned at their ends."""
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    lines = []
    for row in rows:
        cells = (f'<td class="number">{_text(c)}</td>' if i in numbers else f"<td>{_text(c)}</td>" for i, c in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _pairs(values: Mapping[str, object]) -> str:
    items = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in values.items())
    return f"<dl>{items}</dl>" if items else ""


def _tiles(contents: Contents) -> str:
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
    tiles.append(
        (f"planned peak of a step, batch {contents.batch_size}", _size(contents.program.planned_peak(contents.batch_size).bytes))
    )
    if contents.peak_bytes is not None:
        tiles.append(("peak memory of the process", _size(contents.peak_bytes)))
    shown = "".join(f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for name, value in tiles)
    note = "" if contents.stopped is None else f"<p>Stopped before its last epoch: {_text(contents.stopped)}</p>"
    return f'<div class="tiles">{shown}</div>{note}'


def _curves(contents: Contents) -> str:
    charts = []
    for name in contents.names:
        lines = [Line("training", contents.points(name)), Line("evaluation", contents.points(EVALUATION_PREFIX + name))]
        charts.append(line_chart(escaped(name.replace("_", " ")), lines))
    charts.append(line_chart("learning rate", [Line("learning rate", contents.points("lr"))]))
    charts.append(line_chart("samples in a second", [Line("samples in a second", contents.throughput)]))
    return f'<div class="charts">{"".join(f"<figure>{chart}</figure>" for chart in charts if chart)}</div>' if any(charts) else ""


def _confusion(judgement: Judgement | None, data: str) -> str:
    if judgement is None or judgement.confusion is None:
        return "" if judgement is None or not judgement.missing else f"<p>{_text(judgement.missing)}</p>"
    matrix, names = judgement.confusion, judgement.classes
    accuracy = np.trace(matrix) / max(matrix.sum(), 1)
    shown = _matrix(matrix, names) if len(names) <= MATRIX_CLASSES else _mixed_up(matrix, names)
    if judgement.of_boxes is not None:
        objects, spare = matrix[:-1].sum(), matrix[-1].sum()
        said = (
            f"Of {data}: rows are the objects, columns what the model says; {matrix.trace():,} of {objects:,} objects are "
            f"found as what they are, and {spare:,} box{'es stand' if spare != 1 else ' stands'} where none is. Boxes count from "
            f"a score of {judgement.of_boxes:.2g} on, at which the harmonic mean of precision and recall is largest, and stand "
            "for an object that they overlap by half."
        )
        return f"<p>{_text(said)}</p>{shown}{_classes(matrix, names[:-1])}"
    what = "pixels right" if judgement.of_pixels else "right"
    right = f"{matrix.trace():,} of {matrix.sum():,} {what}, {accuracy:.2%}"
    said = f"<p>Of {_text(data)}: rows are the right classes, columns what the model says; {right}.</p>"
    return said + shown + _classes(matrix, names)


def _matrix(matrix: np.ndarray, names: Sequence[str]) -> str:
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    head = "".join(f'<th title="{_text(name)}"><span>{_text(_shortened(name))}</span></th>' for name in names)
    rows = []
    for row, name in enumerate(names):
        cells = []
        for column, count in enumerate(matrix[row].tolist()):
            kind = "right" if row == column else "wrong"
            title = f"{name} taken for {names[column]}: {count:,} ({shares[row, column]:.1%})"
            strong = " strong" if shares[row, column] > 0.55 else ""
            style = f"--share:{100 * shares[row, column]:.0f}%"
            cells.append(f'<td class="{kind}{strong}" style="{style}" title="{_text(title)}">{count or ""}</td>')
        rows.append(f'<tr><th title="{_text(name)}">{_text(_shortened(name))}</th>{"".join(cells)}</tr>')
    table = f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table class="matrix">{table}</table></div>'


def _shortened(name: str) -> str:
    """A name that fits beside a matrix: of a long one the beginning and the end, by which most differ."""
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half].rstrip()}…{name[-half:].lstrip()}"


def _mixed_up(matrix: np.ndarray, names: Sequence[str]) -> str:
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
    pairs = [(row, column) for row, column in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[row, column]]
    rows = [(names[row], names[column], f"{wrong[row, column]:,}") for row, column in pairs]
    return f"<p>The pairs that are mixed up most:</p>{_table(('right', 'said', 'samples'), rows, (2,))}"


def _classes(matrix: np.ndarray, names: Sequence[str]) -> str:
    """Precision, recall and F1 of each class, the worst first."""
    right = np.diag(matrix).astype(np.float64)
    truth, said = matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall = right / np.maximum(said, 1), right / np.maximum(truth, 1)
    f1 = 2 * right / np.maximum(truth + said, 1)
    order = np.argsort(f1[: len(names)], kind="stable")
    rows = [
        (names[index], f"{precision[index]:.4f}", f"{recall[index]:.4f}", f"{f1[index]:.4f}", f"{truth[index]:,}")
        for index in order
    ]
    table = _table(("class", "precision", "recall", "F1", "samples"), rows, (1, 2, 3, 4))
    return f"<details><summary>Precision and recall of each class, the worst first</summary>{table}</details>"


def _worst(judgement: Judgement | None, data: str) -> str:
    if judgement is None:
        return ""
    if not judgement.worst:
        return "" if judgement.missing else f"<p>None: the model is right about all of {_text(data)}.</p>"
    shown = "".join(map(_example, judgement.worst))
    what = ""
    if judgement.of_pixels:
        what = ": picture, mask and what the model says. Classes are the pair of most wrong pixels, errors the share of these"
    if judgement.of_boxes is not None:
        what = ": the objects, and the boxes of the model. What is missed or wrong is thick, and errors are how many of both"
    said = f"Of {_text(data)}, {judgement.samples:,} samples; the worst first{what}."
    return f'<p>{said}</p><div class="examples">{shown}</div>'


def _example(example: Example) -> str:
    if example.pixels is None:
        sample = f'<p class="values">{_text(example.values)}</p>'
    else:
        sample = f'<img alt="sample {example.index}" src="{data_address(png(example.pixels))}">'
    probability = "" if example.probability is None else f", which it gives {example.probability:.1%}"
    return (
        f"<figure>{sample}<figcaption>said <b>{_text(example.said)}</b>, is <b>{_text(example.truth)}</b>{probability}"
        f"<br><small>{_text(example.place)}, error {example.error:.4g}</small></figcaption></figure>"
    )


def _trained(contents: Contents) -> str:
    tensors = contents.tensors
    counts: dict[str, list[int]] = {}
    for tensor in tensors:
        counts.setdefault(tensor.role, []).append(tensor.size)
    said = [f"{role}: {sum(sizes):,} numbers in {len(sizes):,} tensor{'s' * (len(sizes) != 1)}" for role, sizes in counts.items()]
    rows = [(tensor.name, " × ".join(map(str, tensor.shape)) or "scalar", f"{tensor.size:,}", tensor.role) for tensor in tensors]
    table = _table(("tensor", "shape", "numbers", ""), rows, (2,))
    lines = "".join(f"<li>{_text(line)}</li>" for line in said)
    return f"<ul>{lines}</ul><details><summary>Every tensor</summary>{table}</details>"


def _configuration(contents: Contents) -> str:
    options = {name: _plain(value) for name, value in contents.program.options.items() if value not in (None, [], {}, "")}
    parts = []
    if contents.command is not None:
        parts.append(f'<pre class="command">{_text(contents.command)}</pre>')
    if contents.configuration is not None:
        lines = "\n".join(map(_text, contents.configuration.splitlines()))
        parts.append(f"<details open><summary>The file that repeats the run</summary><pre>{lines}</pre></details>")
    parts.append(f"<details><summary>What the program was compiled with</summary>{_pairs(options)}</details>")
    return "".join(parts)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"

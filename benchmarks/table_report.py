"""What ``table.py`` measured: as a file, as tables, and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contender_kinds import PAGES
from installation import NOT_INSTALLED, level
from table_plan import Place, places

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
DOCUMENT = RESULTS / "performance.md"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
PICTURE = PAGE.with_name("step-times.svg")
BEGIN = "<!-- steps: written by benchmarks/table.py --table -->"
END = "<!-- end of the steps -->"
SUMMARY = "<!-- summary: written by benchmarks/table.py --table -->"
SUMMARY_END = "<!-- end of the summary -->"
TITLES = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "bert-base": "BERT-base, 128 tokens",
    "lstm": "LSTM, 64 tokens",
    "dlrm": "DLRM, 26 tables",
}
# Columns of one process, and of two; what a contender's name begins with is `_column`.
PYTORCH = {
    "eager": "PyTorch eager",
    "tuned": "tuned",
    "tuned" + PAGES: "tuned, pages kept",
    "compile": "torch.compile",
}
OTHERS = {"onnxruntime-training": "onnxruntime-training"}
OURS = {
    "burnish-standard": "ONNX Runtime, standard operators",
    "burnish-kernels": "ONNX Runtime, our kernels",
    "burnish-torch": "torch engine",
}
DDP = {"ddp": "DDP", "ddp" + PAGES: "DDP, pages kept"}
NONE = "–"
LONGEST_REASON = 300


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a result; none where there is no such file."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return rows


def save(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write a result whole, so that a run that is cut off leaves the rows that it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def latest(folder: Path = RESULTS) -> Path | None:
    """The result of the last day; None where there is none."""
    return max(folder.glob("*-table.json"), default=None)


def place_of(row: Mapping[str, Any]) -> Place:
    return Place(row["model"], row["workers"], row["batch"])


def second_least(row: Mapping[str, Any], column: str) -> float | None:
    """The second-least step of a contender in seconds; None where it has no time that counts."""
    contender = _contender(row, column)
    return None if contender is None else float(contender["second_least_seconds"])


def best_of(row: Mapping[str, Any], columns: Iterable[str]) -> float | None:
    """The least of these contenders' second-least steps."""
    return min((seconds for column in columns if (seconds := second_least(row, column)) is not None), default=None)


def _contender(row: Mapping[str, Any], column: str) -> dict[str, Any] | None:
    found = next((each for each in row["contenders"] if _column(each["name"]) == column), None)
    return None if found is None or "refused" in found else found


def _column(name: str) -> str:
    name, pages, _ = name.partition(PAGES)
    name = name.removesuffix("-sparse")
    return ("tuned" if name in ("channels_last", "fused", "sparse") else name) + pages


def _title(model: str) -> str:
    return TITLES.get(model, model)


def _ratio(theirs: float | None, ours: float | None) -> str:
    return NONE if theirs is None or ours is None else f"{theirs / ours:.2f}"


def _time(row: Mapping[str, Any], column: str) -> str:
    seconds = second_least(row, column)
    return NONE if seconds is None else _milliseconds(seconds)


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]


def _present(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns in which any row has a time."""
    return {name: title for name, title in columns.items() if any(_contender(row, name) for row in rows)}


def _times(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of one process: milliseconds, and the best-tuned PyTorch's over each of burnish's."""
    theirs, ours = _present(rows, PYTORCH | OTHERS), _present(rows, OURS)
    header = ["model", "batch", *theirs.values(), *ours.values(), *(f"best PyTorch / {title}" for title in ours.values())]
    lines = []
    for row in rows:
        best = best_of(row, PYTORCH)
        cells = [_time(row, column) for column in (*theirs, *ours)]
        lines.append([_title(row["model"]), str(row["batch"]), *cells, *(_ratio(best, second_least(row, name)) for name in ours)])
    return _markdown(header, lines)


def _memory(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of one process: peak memory, and the time from the file to the first loss."""
    columns = _present(rows, PYTORCH | OTHERS | OURS)

    def cell(row: Mapping[str, Any], column: str) -> str:
        found = _contender(row, column)
        return NONE if found is None else f"{found['peak_bytes'] / 1e9:.2f} GB, {found['first_step_seconds']:.1f} s"

    lines = [[_title(row["model"]), str(row["batch"]), *(cell(row, column) for column in columns)] for row in rows]
    return _markdown(["model", "batch", *columns.values()], lines)


def _workers(rows: Sequence[Mapping[str, Any]], alone: Mapping[Place, Mapping[str, Any]]) -> list[str]:
    """Of several workers: milliseconds, DDP's over burnish's, and what they gain over one process of the same engine."""
    theirs, ours = _present(rows, DDP), _present(rows, OURS)
    header = ["model", "batch of each", *theirs.values(), *ours.values(), *(f"best DDP / {title}" for title in ours.values())]
    header += [f"{title}: same total, same local" for title in ours.values()]
    lines = []
    for row in rows:
        best = best_of(row, DDP)
        cells = [_time(row, column) for column in (*theirs, *ours)]
        cells += [_ratio(best, second_least(row, name)) for name in ours]
        cells += [_gain(row, name, alone) for name in ours]
        lines.append([_title(row["model"]), f"{row['workers']} x {row['batch']}", *cells])
    return _markdown(header, lines)


def _gain(row: Mapping[str, Any], column: str, alone: Mapping[Place, Mapping[str, Any]]) -> str:
    """Samples a second over those of one process on the same machine, with the batch of all workers and with that of one."""
    together = second_least(row, column)
    gains = []
    for batch in (row["total"], row["batch"]):
        one = alone.get(Place(row["model"], 1, batch))
        seconds = None if one is None or one["machine"] != row["machine"] else second_least(one, column)
        gains.append(_ratio(None if seconds is None else row["total"] * seconds, None if together is None else together * batch))
    return ", ".join(gains)


def _refusals(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Who has no time and why, those of the same reason in one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for contender in row["contenders"]:
            if "refused" in contender:
                reason = contender["refused"][:LONGEST_REASON].replace("<", "&lt;").replace("|", "&#124;")
                batch = str(row["batch"]) if row["workers"] == 1 else f"{row['workers']} x {row['batch']}"
                reasons.setdefault((contender["title"], reason), []).append(f"{_title(row['model'])} {batch}")
    return [f"- No time for {title} ({'; '.join(where)}): {reason}" for (title, reason), where in reasons.items()]


def _machines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each processor and level that rows were measured on, and for those that come from no installation."""
    kinds: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["machine"]["processor"], level(row), "doctor" in row), []).append(row)
    if len(kinds) == 1:
        return [f"{_machine(rows)}:", *([] if "doctor" in rows[0] else ["", NOT_INSTALLED])]
    lines = []
    for alike in kinds.values():
        named = "; ".join(f"{_title(row['model'])} {row['workers']} x {row['batch']}" for row in alike)
        lines.append(f"- {_machine(alike)}: {named}.{'' if 'doctor' in alike[0] else f' {NOT_INSTALLED}'}")
    return lines


def _machine(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where, when and with what rows of one processor were measured."""
    versions: dict[str, str] = {}
    for row in rows:
        versions |= {name: engine["version"] for name, engine in row.get("doctor", {}).get("engines", {}).items()}
        for contender in row["contenders"]:
            versions |= contender.get("versions", {})
    told = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()) if name not in ("burnish", "reference"))
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    counts = sorted({row["rounds"] for row in rows})
    rounds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{when}, {rows[0]['machine']['processor']}{level(rows[0])}, {rows[0]['threads']} threads, {told}, {rounds} rounds"


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows by model, in the order of ``TITLES`` and then of their names, then by workers and by falling batch."""
    order = list(TITLES)
    return sorted(
        rows,
        key=lambda row: (
            order.index(row["model"]) if row["model"] in order else len(order),
            row["model"],
            row["workers"],
            -row["batch"],
        ),
    )


def tables(rows: Sequence[Mapping[str, Any]], older: bool = False) -> str:
    """A result for the page of all tables; an older one has no picture, and its gaps are left to newer ones."""
    if not rows:
        return "No result is saved yet."
    ordered = in_order(rows)
    single = [row for row in ordered if row["workers"] == 1]
    several = [row for row in ordered if row["workers"] > 1]
    parts = _machines(ordered)
    if single:
        if not older:
            parts += ["", f"![Steps a second of each contender beside PyTorch eager's, by batch](../../docs/{PICTURE.name})"]
        parts += ["", "Milliseconds of a step in one process:", "", *_times(single)]
        parts += ["", "Peak memory of the process, and the time from the file to the first loss:", "", *_memory(single)]
    if several:
        alone = {place_of(row): row for row in single}
        parts += ["", "Milliseconds of a step of several workers, which share the threads:", "", *_workers(several, alone)]
    if refused := _refusals(ordered):
        parts += ["", *refused]
    missing = [place for place in places(list(TITLES), (16, 8, 4, 2, 1)) if place not in {place_of(row) for row in rows}]
    if missing and not older:
        told = "; ".join(f"{_title(place.model)} {place.workers} x {place.batch}" for place in missing)
        parts += ["", f"Not measured (workers x batch of each): {told}. `--resume` measures them."]
    return "\n".join(parts)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The steps of one process, for the page on performance: milliseconds, and how many times as fast as the best of PyTorch."""
    single = [row for row in in_order(rows) if row["workers"] == 1]
    ours = _present(single, OURS)
    titles = [title.removeprefix("ONNX Runtime, ").capitalize() for title in ours.values()]
    lines = []
    for row in single:
        best = best_of(row, PYTORCH)
        cells = [_time(row, "eager"), NONE if best is None else _milliseconds(best)]
        for column in ours:
            seconds = second_least(row, column)
            cells.append(_time(row, column) + ("" if best is None or seconds is None else f" ({best / seconds:.2f})"))
        lines.append([_title(row["model"]), str(row["batch"]), *cells])
    return "\n".join(_markdown(["Model", "Batch", "PyTorch eager", "PyTorch, best", *titles], lines))


def published(path: Path | None) -> str:
    """A result for the page of all tables, and after it the last ones of other processors."""
    if path is None:
        return tables([])
    rows = load(path)
    parts, seen = [tables(rows)], _processors(rows)
    for other in sorted(path.parent.glob("*-table.json"), reverse=True):
        older = load(other)
        if other != path and not _processors(older) & seen:
            parts.append(f"### Before that, on {' and '.join(sorted(_processors(older)))}\n\n{tables(older, older=True)}")
            seen |= _processors(older)
    return "\n\n".join(parts)


def _processors(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    return {row["machine"]["processor"] for row in rows}


def picture(rows: Sequence[Mapping[str, Any]], path: Path = PICTURE) -> None:
    """Draw, for each model, how many times as fast as PyTorch eager a step in one process is, by batch.

    The same rows give the same file. Needs matplotlib, which ``burnish[demo]`` has.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    single = [row for row in in_order(rows) if row["workers"] == 1 and second_least(row, "eager") is not None]
    models = list(dict.fromkeys(row["model"] for row in single))
    with mpl.rc_context({"svg.hashsalt": "burnish", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3.1 * max(1, len(models)), 3.6), layout="constrained")
        axes = figure.subplots(1, max(1, len(models)), squeeze=False)[0]
        for place, model in zip(axes, models, strict=False):
            _draw(place, [row for row in single if row["model"] == model])
        axes[0].set_ylabel("steps a second beside PyTorch eager's")
        handles = {label: handle for place in axes for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


LINES = {
    "eager": ("PyTorch eager", "#888888", "-"),
    "tuned": ("PyTorch, tuned", "#555555", "--"),
    "compile": ("torch.compile", "#bbbbbb", "--"),
    "onnxruntime-training": ("onnxruntime-training", "#c9a227", "--"),
    "burnish-standard": ("burnish, ONNX Runtime, standard operators", "#1f77b4", "-"),
    "burnish-kernels": ("burnish, ONNX Runtime, our kernels", "#2ca02c", "-"),
    "burnish-torch": ("burnish, torch engine", "#d62728", "-"),
}


def _draw(place: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A panel: a line for each contender, over the batch."""
    for name, (label, color, style) in LINES.items():
        columns = (name, name + PAGES) if name == "tuned" else (name,)
        points = []
        for row in sorted(rows, key=lambda row: row["batch"]):
            eager, seconds = second_least(row, "eager"), best_of(row, columns)
            if eager is not None and seconds is not None:
                points.append((row["batch"], eager / seconds))
        if points:
            place.plot(*zip(*points, strict=True), style, color=color, label=label, marker="o", markersize=3, linewidth=1.2)
    batches = sorted({row["batch"] for row in rows})
    place.set_title(_title(rows[0]["model"]), fontsize=9)
    place.set_xscale("log", base=2)
    place.set_xticks(batches, [str(batch) for batch in batches])
    place.minorticks_off()
    place.set_xlabel("batch")
    place.set_ylim(bottom=0)
    place.grid(color="#eeeeee")


def write(path: Path | None = None, document: Path = DOCUMENT, page: Path = PAGE, drawing: Path = PICTURE) -> None:
    """Put a result, by default the latest, into the page of all tables and its summary into the docs, and draw its picture."""
    path = path or latest()
    rows = [] if path is None else load(path)
    _replace(document, BEGIN, END, published(path))
    if rows:
        _replace(page, SUMMARY, SUMMARY_END, summary(rows))
        picture(rows, drawing)


def _replace(document: Path, begin: str, end: str, text: str) -> None:
    """Put a text between two marks of a file."""
    before, rest = document.read_text(encoding="utf-8").split(begin)
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")

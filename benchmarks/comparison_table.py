"""What ``compare.py`` measured, as files and as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from installation import NOT_INSTALLED, level

RESULTS = Path(__file__).parent / "results"
DOCUMENT = RESULTS / "comparison.md"
BEGIN = "<!-- tables: written by benchmarks/compare.py --table -->"
END = "<!-- end of the tables -->"
HEADER = ("contender", "step", "lowest to highest", "samples/s", "first step", "peak memory", "time beside burnish's")
# What makes two comparisons the same one, measured again, on such a processor.
IDENTITY = ("batch", "size", "precision", "threads", "warm_caches")


def identity(case: dict[str, Any]) -> tuple[Any, ...]:
    """What another comparison has in common that takes this one's place."""
    return (*(case[name] for name in IDENTITY), case["machine"]["processor"])


def save(case: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Put a comparison into the results file of its day and model, in place of one of the same kind."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{case['date']}-{case['model']}.json"
    cases = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = [other for other in cases if identity(other) != identity(case)]
    path.write_text(json.dumps({"model": case["model"], "cases": [*cases, case]}, indent=1) + "\n")
    return path


def best(case: dict[str, Any], prefix: str | tuple[str, ...]) -> dict[str, Any] | None:
    """The contender with the least median among those whose names begin so; None where none of them counts."""
    rows = [row for row in case["contenders"] if row["name"].startswith(prefix) and "refused" not in row]
    return min(rows, key=lambda row: row["median_seconds"], default=None)


def duration(seconds: float) -> str:
    """A time with three digits, in ms below a second."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def heading(case: dict[str, Any]) -> str:
    return (
        f"{case['model']}, batch {case['batch']}, size {case['size']}, {case['precision']}, {case['threads']} threads, "
        f"{case['rounds']} rounds, {case['date']}, {case['machine']['processor']}{level(case)}"
    )


def rows_of(case: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the contenders, the fastest first, those that were refused behind them."""
    ours = best(case, "burnish")
    counted = sorted((row for row in case["contenders"] if "refused" not in row), key=lambda row: row["median_seconds"])
    rows = []
    for row in counted:
        beside = f"{row['median_seconds'] / ours['median_seconds']:.2f}" if ours is not None else ""
        rows.append(
            (
                row["title"],
                duration(row["median_seconds"]),
                f"{duration(row['minimum_seconds'])} to {duration(row['maximum_seconds'])}",
                f"{row['samples_per_second']:.3g}" if row["samples_per_second"] < 1000 else f"{row['samples_per_second']:.0f}",
                duration(row["first_step_seconds"]),
                f"{row['peak_bytes'] / 1e9:.2f} GB",
                beside,
            )
        )
    return rows


def refusals(case: dict[str, Any]) -> list[str]:
    return [f"{row['title']}: {row['refused']}" for row in case["contenders"] if "refused" in row]


def summary(case: dict[str, Any]) -> str:
    """How burnish stands beside PyTorch: the best configuration there is, and what an imported model gets."""
    ours, theirs = best(case, "burnish"), best(case, ("eager", "fused", "channels_last", "compile"))
    if ours is None or theirs is None:
        return ""
    default = next(row for row in case["contenders"] if row["name"] == "eager")
    installed = case.get("installed_kernels", False) and ours["title"].endswith("torch")
    kernels = ", with kernels that the installation had built" if installed else ""
    return (
        f"{ours['title']}: {theirs['median_seconds'] / ours['median_seconds']:.2f} times as fast as the best of PyTorch "
        f"({theirs['title']}), {default['median_seconds'] / ours['median_seconds']:.2f} times as fast as its default; "
        f"first step after {duration(ours['first_step_seconds'])}{kernels}; "
        f"peak memory {ours['peak_bytes'] / default['peak_bytes']:.2f} of PyTorch eager's."
    )


def case_text(case: dict[str, Any]) -> str:
    """A comparison for a terminal."""
    rows = [HEADER, *rows_of(case)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([heading(case), *lines, *(f"no time: {line}" for line in refusals(case)), summary(case)])


def case_markdown(case: dict[str, Any]) -> str:
    """A comparison for the page of all comparisons."""
    table = [HEADER, ("---",) * len(HEADER), *rows_of(case)]
    mark = [] if "doctor" in case else [NOT_INSTALLED, ""]
    lines = [f"### {heading(case)}", "", *mark, *("| " + " | ".join(row) + " |" for row in table), ""]
    if told := summary(case):
        lines += [told, ""]
    lines += [f"- No time for {line[:400].replace('<', '&lt;').replace('|', '&#124;')}" for line in refusals(case)]
    return "\n".join(lines).rstrip() + "\n"


def latest_cases(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Of each comparison the one that was saved last, by model and then in the order in which they were saved."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        saved = json.loads(path.read_text())
        for case in saved.get("cases", []) if isinstance(saved, dict) else []:
            found[case["model"], *identity(case)] = case
    return sorted(found.values(), key=lambda case: case["model"])


def tables(folder: Path = RESULTS) -> str:
    """The part of the page between the marks."""
    return "\n".join(case_markdown(case) for case in latest_cases(folder))


def write(document: Path = DOCUMENT) -> None:
    """Put the tables into the page."""
    text = document.read_text()
    before, rest = text.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}")

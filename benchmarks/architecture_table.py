"""What ``compare_architectures.py`` measured, as a file and as a table."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from comparison_table import duration
from installation import NOT_INSTALLED, level
from workloads import ARCHITECTURE

RESULTS = Path(__file__).parent / "results"
DOCUMENT = RESULTS / "performance.md"
BEGIN = "<!-- table: written by benchmarks/compare_architectures.py --table -->"
END = "<!-- end of the table -->"
# The time of each round.
CLOCKS = {"wall": "seconds", "cpu": "processor_turns"}
ENGINES = ("burnish-torch", "burnish-onnxruntime")


def save(cases: list[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write the comparisons of one run, in the place of those of the same day and architecture."""
    path = folder / f"{cases[0]['date']}-architectures.json"
    saved = json.loads(path.read_text())["architectures"] if path.exists() else []
    again = {(case["model"], case["threads"]) for case in cases}
    kept = [case for case in saved if (case["model"], case["threads"]) not in again]
    path.write_text(json.dumps({"architectures": [*kept, *cases]}, indent=1) + "\n")
    return path


def latest(folder: Path = RESULTS) -> Path | None:
    """The result of the last day; None where there is none."""
    return max(folder.glob("*-architectures.json"), default=None)


def row_of(case: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in case["contenders"] if row["name"] == name)


def ratio(case: dict[str, Any], name: str, clock: str = "wall") -> float | None:
    """The time beside PyTorch eager's, the median of the rounds' ratios; None where one of the two has no time that counts."""
    ours, eager = row_of(case, name), row_of(case, "eager")
    if "refused" in ours or "refused" in eager:
        return None
    pairs = zip(ours[CLOCKS[clock]], eager[CLOCKS[clock]], strict=True)
    return statistics.median(mine / its for mine, its in pairs)


def refusals(case: dict[str, Any]) -> list[str]:
    """Whose times do not count, and why."""
    where = f"{case['model'].removeprefix(ARCHITECTURE)} on {case['threads']}"
    return [f"{where}: {row['title']}: {row['refused']}" for row in case["contenders"] if "refused" in row]


def line(case: dict[str, Any], clock: str = "wall") -> str:
    """A comparison for a terminal."""
    cells = [f"{case['model'].removeprefix(ARCHITECTURE):12} {case['threads']} threads"]
    for row in case["contenders"]:
        if "refused" in row:
            cells.append(f"{row['name']}: no time")
            continue
        beside = ratio(case, row["name"], clock)
        step = duration(statistics.median(row[CLOCKS[clock]]))
        cells.append(f"{row['name']} {step} ({beside:.2f}), first {duration(row['first_step_seconds'])}")
    return "  ".join(cells)


def _cells(cases: dict[int, dict[str, Any]]) -> list[str]:
    """The cells of an architecture's row, from its cases by number of threads."""
    cells = []
    for case in cases.values():
        eager = row_of(case, "eager")
        cells.append("" if "refused" in eager else duration(eager["median_seconds"]))
        for name in ENGINES:
            beside = ratio(case, name)
            cells.append("no time" if beside is None else f"{beside:.2f}")
    firsts = [row_of(cases[max(cases)], name) for name in ("eager", *ENGINES)]
    return [*cells, *("" if "refused" in row else duration(row["first_step_seconds"]) for row in firsts)]


def table(path: Path | None) -> str:
    """A result for the page of all tables."""
    if path is None:
        return "No result is saved yet."
    cases = json.loads(path.read_text())["architectures"]
    by_model: dict[str, dict[int, dict[str, Any]]] = {}
    for case in cases:
        by_model.setdefault(case["model"].removeprefix(ARCHITECTURE), {})[case["threads"]] = case
    threads = sorted({case["threads"] for case in cases})
    header = ["architecture", "batch"]
    for count in threads:
        header += [f"eager, {count} thread{'s' * (count > 1)}", "torch engine", "onnxruntime"]
    header += ["first step: eager", "torch engine", "onnxruntime"]
    lines = [header, ["---"] * len(header)]
    for name, found in by_model.items():
        ordered = {count: found[count] for count in threads if count in found}
        if len(ordered) == len(threads):
            lines.append([name, str(ordered[threads[0]]["batch"]), *_cells(ordered)])
    versions = " and ".join(
        f"{library} {version}"
        for library, version in row_of(cases[0], "burnish-onnxruntime").get("versions", {}).items()
        if library != "burnish"
    )
    torch = row_of(cases[0], "eager").get("versions", {}).get("torch", "")
    slower = sorted({name for name, found in by_model.items() for case in found.values() if _is_slower(case)})
    verdict = f"Slower than eager on the torch engine: {', '.join(slower)}." if slower else "None is slower on the torch engine."
    machine = f"{cases[0]['date']}, {cases[0]['machine']['processor']}{level(cases[0])}"
    return "\n".join(
        [
            f"{machine}, torch {torch}, {versions}, {cases[0]['rounds']} rounds:",
            "",
            *([] if all("doctor" in case for case in cases) else [NOT_INSTALLED, ""]),
            *("| " + " | ".join(cells) + " |" for cells in lines),
            "",
            verdict,
        ]
    )


def _is_slower(case: dict[str, Any]) -> bool:
    beside = ratio(case, "burnish-torch")
    return beside is None or beside > 1.0


def write(document: Path = DOCUMENT) -> None:
    """Put the table into the page."""
    text = document.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n\n{table(latest())}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")

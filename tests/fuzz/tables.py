"""Counts of outcomes, and how they are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from fuzz.outcomes import Kind, Outcome

LOADING, FAR = "loaded only", "as far as it goes"


class Tally:
    """How many cases of each seed came to which outcome."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()  # seed, how far it was to go, kind
        self.seconds = 0.0

    @property
    def total(self) -> int:
        return self.counts.total()

    @property
    def kinds(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for (_, _, kind), count in self.counts.items():
            kinds[kind] += count
        return kinds

    def add(self, outcome: Outcome, far: bool) -> None:
        self.counts[outcome.seed, FAR if far else LOADING, outcome.kind.value] += 1

    def write(self, path: Path, seconds: float) -> None:
        rows = [[*key, count] for key, count in sorted(self.counts.items())]
        path.write_text(json.dumps({"cases": self.total, "seconds": round(seconds), "counts": rows}))

    def read(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.seconds += content["seconds"]
        for seed, far, kind, count in content["counts"]:
            self.counts[seed, far, kind] += count


def outcomes_table(counts: Tally) -> Table:
    """A row for each seed and how far its cases went, a column for each kind of outcome."""
    table = Table(title=f"{counts.total:,} cases")
    for heading in ("seed", "how far"):
        table.add_column(heading)
    for kind in Kind:
        table.add_column(kind.value, justify="right")
    rows = sorted({(seed, far) for seed, far, _ in counts.counts})
    for seed, far in rows:
        table.add_row(seed, far, *(f"{counts.counts[seed, far, kind.value]:,}" for kind in Kind))
    table.add_section()
    table.add_row("all", "", *(f"{counts.kinds[kind.value]:,}" for kind in Kind))
    return table


def defects_text(defects: Mapping[tuple[str, ...], Sequence[Outcome]]) -> str:
    """A paragraph for each cause, the most frequent first."""
    paragraphs = []
    for group, outcomes in sorted(defects.items(), key=lambda item: -len(item[1])):
        numbers = ", ".join(str(outcome.number) for outcome in outcomes[:5])
        heading = " | ".join(part for part in group if part)
        paragraphs.append(f"{len(outcomes)} ({numbers}): {heading}\n    {outcomes[0].message[:300]}")
    return "\n".join(paragraphs)

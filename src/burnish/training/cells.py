"""Notebook cells: HTML of objects, and detection of the shell."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Curve = Sequence[tuple[float, float]]


def shell() -> Any:
    """Return the IPython shell that runs this code, or None. Nothing is imported."""
    running = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if running is None else running()


def in_notebook() -> bool:
    """Return True if a Jupyter kernel runs this code, so that cells show HTML."""
    return getattr(shell(), "kernel", None) is not None


def cell(
    title: str,
    rows: Iterable[tuple[str, Any]],
    curves: Mapping[str, Mapping[str, Curve]] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the HTML of a cell: a small table, charts, and lines. All names and values are escaped.

    Args:
        title: title of the object.
        rows: names and values of the table.
        curves: by title of a chart, the points (x, y) of its lines by name.
        notes: one line each.
    """
    from burnish.training.html_report.charts import Line, line_chart, template

    charts = []
    for name, lines in (curves or {}).items():
        finite = {label: [point for point in points if all(map(math.isfinite, point))] for label, points in lines.items()}
        charts.append(line_chart(name, [Line(label, points) for label, points in finite.items() if points]))
    shown = {"title": title, "rows": list(rows), "charts": list(filter(None, charts)), "notes": list(notes)}
    return template("notebook.html.j2").render(**shown)


def text_of(value: Any) -> str:
    """Return an option in words; only its name if it has settings."""
    if isinstance(value, Mapping):
        return str(value.get("name", ", ".join(map(str, value))))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(text_of, value))
    return str(value)

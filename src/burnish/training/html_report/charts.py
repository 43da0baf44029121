"""Line charts as SVG, in colours that the page's style sheet sets for light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 30, 38
TICKS = 5
CHARACTER = 7.0
"""The width of a character of a label at most, in the units of the chart: digits in 12 pixels are narrower."""
MOST_POINTS = 600
"""A line has no more points; what lies between is left out."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: in the legend.
        points: (x, y); those that are not finite are left out.
    """

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(title: str, lines: Sequence[Line], x_label: str = "step") -> str:
    """Return a chart of lines as an SVG element; empty where there is no point."""
    drawn = [Line(line.name, _thinned([point for point in line.points if all(map(math.isfinite, point))])) for line in lines]
    points = [point for line in drawn for point in line.points]
    if not points:
        return ""
    across, up = ([*values] for values in zip(*points, strict=True))
    x_ticks, y_ticks = _ticks(min(across), max(across), whole=True), _ticks(min(up), max(up))
    x_low, x_high = min(x_ticks[0], *(x for x, _ in points)), max(x_ticks[-1], *(x for x, _ in points))
    y_low, y_high = min(y_ticks[0], *(y for _, y in points)), max(y_ticks[-1], *(y for _, y in points))

    def place(x: float, y: float) -> tuple[float, float]:
        right, down = (x - x_low) / (x_high - x_low), (y_high - y) / (y_high - y_low)
        return LEFT + right * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts.append(f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>')
    for tick, label in zip(y_ticks, _labels(y_ticks), strict=True):
        _, y = place(x_low, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, label in zip(x_ticks, _labels(x_ticks), strict=True):
        # The last one would stand over the edge, where it is long: it moves inwards.
        x = min(place(tick, y_low)[0], WIDTH - len(label) * CHARACTER / 2)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    for number, line in enumerate(drawn):
        if not line.points:
            continue
        places = [place(*point) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line line-{number}" points="{path}"/>')
        if len(places) <= 40:
            shown = zip(places, line.points, strict=True)
            for (x, y), (step, value) in shown:
                told = f"<title>{_number(step)}: {value:.6g}</title>"
                parts.append(f'<circle class="dot dot-{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">{told}</circle>')
        if len(lines) > 1:
            x = WIDTH - RIGHT - 110 * (len(drawn) - number) + 24
            parts.append(f'<rect class="dot-{number}" x="{x}" y="10" width="12" height="4"/>')
            parts.append(f'<text class="tick" x="{x + 17}" y="16">{escape(line.name)}</text>')
    return "".join([*parts, "</svg>"])


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = math.ceil(len(points) / MOST_POINTS)
    return [*points[: -1 if points else None : every], *points[-1:]] if every > 1 else list(points)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers that cover a range; whole ones where they count."""
    if high - low <= 1e-9 * abs(high):
        margin = max(abs(low) * 0.1, 1.0 if whole else 0.0) or 1.0
        low, high = low - margin, high + margin
    rough = max((high - low) / TICKS, 1.0 if whole else 0.0)
    unit = 10.0 ** math.floor(math.log10(rough))
    width = next(unit * factor for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [count * width for count in range(first, last + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Numbers as short as they can be told apart."""
    for digits in (4, 6, 8, 10):
        labels = [_number(tick, digits) for tick in ticks]
        if len({*labels}) == len(labels):
            break
    return labels


def _number(value: float, digits: int = 4) -> str:
    """A number as short as it can be read, of so many digits at most where it is not whole."""
    return f"{value:,.0f}" if value == int(value) and 1000 <= abs(value) < 1e7 else f"{value:.{digits}g}"

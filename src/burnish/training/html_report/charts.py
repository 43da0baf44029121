"""Line charts as SVG, coloured by the page's style sheet for light and dark; values show on hover."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from burnish.errors import escaped

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def template(name: str) -> Template:
    """Return a template of this folder."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        # Markup is escaped after this; control characters for terminals and browsers are spelled out here.
        finalize=lambda value: value if hasattr(value, "__html__") else escaped(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 30, 38
TICKS = 5
CHARACTER = 7.0
"""Upper bound of a character's width in chart units; digits in 12 pixels are narrower."""
MOST_POINTS, MOST_DOTS = 600, 40
"""Most points of a line, thinned out beyond; most points of a line with dots."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: name in the legend.
        points: (x, y); non-finite ones are left out.
    """

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Tick:
    at: float
    label: str


def line_chart(title: str, lines: Sequence[Line], x_label: str = "step") -> str:
    """Return a line chart as an SVG element; empty if there are no points."""
    drawn = [_thinned([point for point in line.points if all(map(math.isfinite, point))]) for line in lines]
    points = [point for line in drawn for point in line]
    if not points:
        return ""
    xs, ys = ([*values] for values in zip(*points, strict=True))
    x_ticks, y_ticks = _ticks(min(xs), max(xs), whole=True), _ticks(min(ys), max(ys))
    x_low, x_high = min(x_ticks[0], *xs), max(x_ticks[-1], *xs)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def across(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    x_labels = _labels(x_ticks)
    return template("chart.svg.j2").render(
        title=title,
        x_label=x_label,
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
        # A long last label would cross the edge, so it moves inwards.
        x_ticks=[
            _Tick(min(across(tick), WIDTH - len(label) * CHARACTER / 2), label)
            for tick, label in zip(x_ticks, x_labels, strict=True)
        ],
        y_ticks=[_Tick(down(tick), label) for tick, label in zip(y_ticks, _labels(y_ticks), strict=True)],
        lines=[
            {
                "number": number,
                "name": line.name,
                "points": [(across(x), down(y), f"{_number(x)}: {y:.6g}") for x, y in kept],
                "has_dots": len(kept) <= MOST_DOTS,
                "legend": WIDTH - RIGHT - 110 * (len(lines) - number) + 24,
            }
            for number, (line, kept) in enumerate(zip(lines, drawn, strict=True))
            if kept
        ],
        has_legend=len(lines) > 1,
    )


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = math.ceil(len(points) / MOST_POINTS)
    return [*points[: -1 if points else None : every], *points[-1:]] if every > 1 else list(points)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers that cover a range; integers for counts."""
    if high - low <= 1e-9 * abs(high):
        margin = max(abs(low) * 0.1, 1.0 if whole else 0.0) or 1.0
        low, high = low - margin, high + margin
    rough = max((high - low) / TICKS, 1.0 if whole else 0.0)
    unit = 10.0 ** math.floor(math.log10(rough))
    width = next(unit * factor for factor in ((1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [count * width for count in range(first, last + 1)]


def _labels(ticks: Sequence[float]) -> list[str]:
    """Numbers in the fewest digits that tell them apart."""
    for digits in (4, 6, 8, 10):
        labels = [_number(tick, digits) for tick in ticks]
        if len({*labels}) == len(labels):
            break
    return labels


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.0f}" if value == int(value) and 1000 <= abs(value) < 1e7 else f"{value:.{digits}g}"

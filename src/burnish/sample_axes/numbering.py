"""What the rows and columns of numbers number that are drawn for a value (``burnish.random.draws``)."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from burnish.operators.extents import Axis, Factor, Kind, Number, normal, sides
from burnish.random import Numbered, Places
from burnish.sample_axes.analysis import Analysis


def numbered(analysis: Analysis, value: ir.Value) -> Numbered:
    """Return what rows and columns number of what is drawn for a value of the graph that was analysed."""
    layout = analysis.layout(value)
    if layout.axes is None:
        return Numbered(*[Places(problem=layout.reason)] * 2)
    whole = normal(factor for axis in layout.axes for factor in axis)
    problem = _problem(whole)
    if problem:
        return Numbered(*[Places(problem=problem)] * 2)
    half = (len(layout.axes) + 1) // 2
    rows, columns = (normal(factor for axis in part for factor in axis) for part in (layout.axes[:half], layout.axes[half:]))
    return Numbered(_places(rows, analysis.counted), _places(columns, analysis.counted))


def _problem(factors: Axis) -> str:
    """Why workers cannot tell their samples apart; empty where they can."""
    lost = next((factor for factor in factors if isinstance(factor, Factor) and factor.kind is Kind.LOST), None)
    if lost is not None:
        return lost.reason
    return "samples stand along more than one of its axes" if len(sides(factors)) > 1 else ""


def _places(factors: Axis, counted: Mapping[str, str]) -> Places:
    times = sides(factors)
    if not times:
        return Places()
    slower, faster = (None if number.factors else number.coefficient for number in map(Number.of, times[0]))
    if slower is None and faster is None:
        return Places(problem="samples stand between axes whose extents are both symbolic")
    samples = next(factor for factor in factors if isinstance(factor, Factor) and factor.kind is Kind.SAMPLES)
    return Places(counted[samples.key], slower, faster)

"""The cheapest assignment of rows to columns, for example of objects to predictions.

``LinearAssignment(cost, counts) -> row`` is a semantic operator without gradient:

- cost ``[N, M, Q]``, floating-point: cost of row m and column q in each sample;
- counts ``[N, M]``, bool: the rows to assign;
- row ``[N, Q]``, int64: the row of each column, -1 for none. The sum of the costs is minimal over all assignments with at most
  one row per column. If there are more rows to assign than columns, the rows left out are chosen to minimize it.

The Hungarian method with potentials (Kuhn 1955, Munkres 1957), as shortest augmenting paths (Jonker and Volgenant 1987). All
samples take a step together; a loop ends when the last sample has found its path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators.registry import Operation
from burnish.operators.semantic import Operands, OutputType, SemanticOperator
from burnish.operators.time_loop import Tensors, repeat_while, scan

NEVER = 1e30
LEFT_OUT = 1e4
"""The cost of leaving a row out, above any cost between predictions and objects. It enters no other row's sums."""


def _rows_of_columns(operands: Operands) -> list[OutputType]:
    cost = operands["cost"]
    shape = None if cost.shape is None else ir.Shape([cost.shape.dims[0], cost.shape.dims[2]])
    return [OutputType(ir.DataType.INT64, shape)]


class _Search(NamedTuple):
    """A search for the shortest path from one row to a free column, for all samples.

    Column 0 stands for the row at the start of the search; then come Q columns, and one for each row left out.

    Attributes:
        column: current column of each search, ``[N, 1]``.
        active: True if the search goes on, bool ``[N, 1]``.
        distance: the shortest path to each unvisited column, ``[N, K]``.
        before: the previous column on that path, int64 ``[N, K]``.
        visited: bool ``[N, K]``.
        row_potential: ``[N, 1 + M]``, 0 for no row.
        column_potential: ``[N, K]``.
    """

    column: Tensor
    active: Tensor
    distance: Tensor
    before: Tensor
    visited: Tensor
    row_potential: Tensor
    column_potential: Tensor


def lower_linear_assignment(op: Operation) -> Tensor:
    cost, counts = op.required(0), op.required(1)
    builder, name = op.builder, op.output.name
    padded = _with_places_to_be_left_out(cost)
    columns = builder.op("Squeeze", builder.op("Slice", padded, *map(builder.integers, ([0], [1], [1]))), builder.integers([1]))
    zeros = columns * 0.0
    none = builder.cast(zeros, ir.DataType.INT64)
    rows = builder.op("Pad", builder.cast(counts, cost.dtype) * 0.0, builder.integers([0, 1, 0, 0]))
    places = _places(builder, columns)
    limit = builder.op("Squeeze", builder.op("Shape", columns, start=1, end=2), builder.integers([0]), shape=())

    def assign_row(inner: Builder, states: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        (row_of, row_potential, column_potential, number), (counts_here,) = states, frames
        active = inner.op("Unsqueeze", counts_here, inner.integers([1]))
        is_start = inner.op("Equal", places, inner.scalar(0, places))
        row_of = inner.op("Where", is_start, number, row_of, like=row_of)
        start = _Search(
            inner.cast(active, ir.DataType.INT64) * 0,
            active,
            zeros + NEVER,
            none,
            inner.op("And", is_start, inner.op("Not", is_start)),
            row_potential,
            column_potential,
        )
        expanded = inner.op("Expand", start.visited, inner.op("Shape", columns), like=None)
        found = _Search(*_search(inner, start._replace(visited=expanded), row_of, padded, places, limit, name))
        assigned = _turned(inner, row_of, found, active, places, limit, name)
        return [assigned, found.row_potential, found.column_potential, number + 1], []

    first = builder.constant(np.ones((1, 1), np.int64))
    by_row = builder.op("Transpose", counts, perm=[1, 0])
    (row_of, *_), _ = scan(builder, assign_row, [none, rows, zeros, first], [by_row], name=name)
    ends = builder.op("Shape", cost, start=2, end=3) + builder.integers([1])
    result = builder.op("Slice", row_of, builder.integers([1]), ends, builder.integers([1]))
    return result - 1


def _with_places_to_be_left_out(cost: Tensor) -> Tensor:
    """Emit ``[N, 1 + M, 1 + Q + M]``: with a first row and column for none, and a column for each row to leave out."""
    builder = cost.builder
    rows = builder.op("Shape", cost, start=1, end=2)
    start = builder.integers([0, 1, 1, 0, 0])
    pads = builder.op("Concat", start, rows, axis=0)
    return builder.op("Pad", cost, pads, builder.scalar(LEFT_OUT, cost), shape=[None, None, None])


def _places(builder: Builder, columns: Tensor) -> Tensor:
    extent = builder.op("Squeeze", builder.op("Shape", columns, start=1, end=2), builder.integers([0]), shape=())
    zero, one = (builder.scalar(number, ir.DataType.INT64) for number in (0, 1))
    return builder.op("Range", zero, extent, one, shape=[None])


def _at(builder: Builder, tensor: Tensor, place: Tensor) -> Tensor:
    return builder.op("GatherElements", tensor, place, axis=1)


def _search(
    inner: Builder, start: _Search, row_of: Tensor, cost: Tensor, places: Tensor, limit: Tensor, name: str
) -> tuple[Tensor, ...]:
    """Emit steps of Dijkstra's search until each sample is at a column without a row."""

    def step(body: Builder, states: Tensors) -> tuple[Tensors, Tensor]:
        at = _Search(*states)
        never = body.scalar(NEVER, cost)
        is_here = body.op("And", body.op("Equal", places, at.column), at.active)
        visited = body.op("Or", at.visited, is_here)
        row = _at(body, row_of, at.column)
        reduced = body.op("GatherND", cost, row, batch_dims=1) - _at(body, at.row_potential, row) - at.column_potential
        is_free = body.op("And", body.op("Not", visited), at.active)
        is_shorter = body.op("And", is_free, body.op("Less", reduced, at.distance))
        distance = body.op("Where", is_shorter, reduced, at.distance, like=at.distance)
        before = body.op("Where", is_shorter, at.column, at.before, like=at.before)
        open_distance = body.op("Where", visited, never, distance, like=distance)
        nearest = body.op("ReduceMin", open_distance, body.integers([1]), keepdims=1)
        following = body.op("ArgMin", open_distance, axis=1, keepdims=1)
        zero = body.scalar(0.0, cost)
        moved = body.op("Where", body.op("And", visited, at.active), nearest, zero, like=distance)
        row_potential = body.op(
            "ScatterElements", at.row_potential, row_of, moved, axis=1, reduction="add", like=at.row_potential
        )
        distance = distance - body.op("Where", is_free, nearest, zero, like=distance)
        column = body.op("Where", at.active, following, at.column, like=at.column)
        has_row = body.op("Greater", _at(body, row_of, column), 0)
        active = body.op("And", at.active, has_row)
        return [column, active, distance, before, visited, row_potential, at.column_potential - moved], _any(body, active)

    return repeat_while(inner, step, list(start), _any(inner, start.active), limit, name=f"{name}/search")


def _turned(inner: Builder, row_of: Tensor, found: _Search, active: Tensor, places: Tensor, limit: Tensor, name: str) -> Tensor:
    def step(body: Builder, states: Tensors) -> tuple[Tensors, Tensor]:
        rows, column, goes_on = states
        before = _at(body, found.before, column)
        is_here = body.op("And", body.op("Equal", places, column), goes_on)
        rows = body.op("Where", is_here, _at(body, rows, before), rows, like=rows)
        column = body.op("Where", goes_on, before, column, like=column)
        goes_on = body.op("And", goes_on, body.op("Greater", column, 0))
        return [rows, column, goes_on], _any(body, goes_on)

    return repeat_while(inner, step, [row_of, found.column, active], _any(inner, active), limit, name=f"{name}/turn")[0]


def _any(builder: Builder, condition: Tensor) -> Tensor:
    number = builder.op("ReduceMax", builder.cast(condition, ir.DataType.INT32), keepdims=0)
    return builder.op("Greater", number, 0)


LINEAR_ASSIGNMENT = SemanticOperator(
    "LinearAssignment", ("cost", "counts"), ("row",), _rows_of_columns, constants=("row",), lowering=lower_linear_assignment
)

OPERATORS = [LINEAR_ASSIGNMENT]

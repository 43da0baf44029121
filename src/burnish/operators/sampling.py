"""Sampling of images at the points of a grid (GridSample), and grids of affine maps (AffineGrid).

``GridSampleGrad(dy, x, grid) -> dx, dgrid`` is a semantic operator. Its lowering follows ONNX Runtime and PyTorch, in any number
of spatial dimensions. ``onnx.reference`` differs for cubic interpolation with border padding: it moves a point outside to the
border, but the standard repeats the border's elements.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import SIXTEEN_BIT, Tensor, zeros_like
from burnish.graph.uses import is_used
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.interpolation import (
    CUBIC,
    LINEAR,
    NEAREST,
    Interpolation,
    Reading,
    Taps,
    images_of,
    of_extent,
    range_of,
    rows_of,
    size_of,
    taps_around,
    unchanged,
)
from burnish.operators.positions import count, extent, joined, known_rank, reshape_as
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import SemanticOperator, like

INTERPOLATIONS = {
    "bilinear": LINEAR,
    "linear": LINEAR,
    "nearest": NEAREST,
    "bicubic": CUBIC,
    "cubic": CUBIC,
}
"""The interpolation by mode, including the mode names before opset 20."""


def grid_sample(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """y = sum of w(grid) x over taps: dx adds w dy at the taps, dgrid sums dy x times the slopes of w.

    If a coordinate changes nothing (mode nearest, or clipped by border padding), its gradient is zero.
    """
    x, grid = op.required(0), op.required(1)
    known_rank(op, x)
    attributes = {name: op.attribute(name) for name in ("mode", "padding_mode", "align_corners")}
    dx, dgrid = GRID_SAMPLE_GRAD.emit(dy, x, grid, **attributes)
    return dx, dgrid


def lower_grid_sample_grad(op: Operation) -> tuple[Tensor | None, ...]:
    dy, x, grid = (op.required(index) for index in range(3))
    builder, axes = op.builder, known_rank(op, x) - 2
    interpolation = INTERPOLATIONS[op.attribute("mode", "linear")]
    precision = ir.DataType.FLOAT if x.dtype in SIXTEEN_BIT else x.dtype
    dy, images, points = (builder.cast(tensor, precision) for tensor in (dy, x, grid))
    coordinates = [_Coordinate(op, images, points, axis) for axis in range(axes)]
    extents = [size_of(images, axis + 2) for axis in range(axes)]
    reading = Reading.of([coordinate.taps(interpolation) for coordinate in coordinates], extents, _first_rows(images, points))
    rows, received = rows_of(images), builder.op("Unsqueeze", rows_of(dy), builder.integers([1]))
    dx = dgrid = None
    if is_used(op.node.outputs[0]):
        weights = builder.op("Unsqueeze", reading.weights, builder.integers([2]))
        given = reading.given_back(received * weights, rows)
        dx = builder.cast(images_of(given, images), x.dtype)
    if is_used(op.node.outputs[1]):
        if interpolation.is_nearest:
            return dx, zeros_like(grid)
        by_tap = builder.op("ReduceSum", reading.values(rows) * received, builder.integers([2]), keepdims=0)
        # The last coordinate of a point belongs to the first axis.
        columns = [
            builder.op("Unsqueeze", reading.moved(by_tap, axis) * coordinates[axis].slope, builder.integers([1]))
            for axis in reversed(range(axes))
        ]
        dgrid = builder.cast(reshape_as(builder.op("Concat", *columns, axis=1), points), grid.dtype)
    return dx, dgrid


def _first_rows(images: Tensor, grid: Tensor) -> Tensor:
    """Return the first row of the image of each point, int64 ``[M, 1]``."""
    builder, spatial = images.builder, count(images, 2)
    starts = builder.op("Unsqueeze", range_of(size_of(images, 0), builder) * spatial, builder.integers([1]))
    if grid.shape is not None:
        points = count(grid, 1, (grid.rank or 0) - 1)
    else:
        points = builder.op("Div", count(grid, 1), builder.scalar((images.rank or 0) - 2, ir.DataType.INT64))
    each = joined(builder, [extent(images, 0), builder.op("Reshape", points, builder.integers([1]))])
    return builder.op("Reshape", builder.op("Expand", starts, each), builder.integers([-1, 1]))


class _Coordinate:
    """The coordinates of a grid's points along one axis of the images: elements are at 0, 1, ..., last.

    Attributes:
        position: ``[M]``.
        slope: its derivative for the grid's number, ``[M]`` or a scalar.
    """

    def __init__(self, op: Operation, images: Tensor, grid: Tensor, axis: int):
        builder, dtype = images.builder, images.dtype
        self._aligned = bool(op.attribute("align_corners", 0))
        self._padding = op.attribute("padding_mode", "zeros")
        aligned, place = self._aligned, axis + 2
        self._last = of_extent(images, place, lambda size: size - 1, dtype)
        # The start of a reflection, and the distance to the next: half an element outside, or at the outermost elements.
        self._begin = 0.0 if aligned else -0.5
        span = of_extent(images, place, lambda size: size - 1 if aligned else size, dtype)
        # For a single element with aligned corners the span is zero, and so is every position.
        self._span = builder.op("Max", span, builder.scalar(1, dtype))
        scale = of_extent(images, place, lambda size: (size - 1) / 2 if aligned else size / 2, dtype)
        column = builder.scalar((images.rank or 0) - 3 - axis, ir.DataType.INT64)
        numbers = builder.op("Reshape", builder.op("Gather", grid, column, axis=-1), builder.integers([-1]))
        self.position, self.slope = (numbers + 1) * scale + self._begin, scale

    def taps(self, interpolation: Interpolation) -> Taps:
        """Return the taps around the points; padding moves the points, or for cubic interpolation the taps."""
        if self._padding == "zeros":
            return taps_around(self.position, interpolation, self._last, None)
        reflects = self._padding == "reflection"
        if interpolation is CUBIC:
            return taps_around(self.position, interpolation, self._last, self._reflected if reflects else unchanged)
        builder = self.position.builder
        if reflects:
            self.slope = self.slope * builder.op("Sign", self._from_the_turn(self.position))
            self.position = self._reflected(self.position)
        inside = builder.op("And", builder.op("Greater", self.position, 0), builder.op("Less", self.position, self._last))
        self.slope = self.slope * builder.cast(inside, self.position.dtype)
        self.position = builder.op("Clip", self.position, builder.scalar(0, self.position), self._last)
        return taps_around(self.position, interpolation, self._last, unchanged)

    def _reflected(self, positions: Tensor) -> Tensor:
        return self._span - positions.builder.op("Abs", self._from_the_turn(positions)) + self._begin

    def _from_the_turn(self, positions: Tensor) -> Tensor:
        """Return the distance, within a period of two spans, to the end where it turns back; negative after it."""
        builder = positions.builder
        behind = positions - self._begin
        periods = builder.op("Floor", behind / (self._span * 2))
        return self._span - (behind - periods * (self._span * 2))


def affine_grid(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """grid = theta (x, y, 1) at every place: dtheta is the sum of dgrid (x, y, 1)^T over places.

    (x, y) is the grid of the identity.
    """
    theta, size, builder = op.required(0), op.required(1), op.builder
    axes = _spatial_axes(op)
    identity = builder.constant(np.eye(axes, axes + 1, dtype=theta.dtype.numpy())[np.newaxis])
    sizes = size.array
    if sizes is not None:
        spatial, number = builder.integers(sizes[2:].tolist()), builder.integers([math.prod(sizes[2:].tolist())])
    else:
        spatial = builder.op("Slice", size, builder.integers([2]), builder.integers([axes + 2]), builder.integers([0]))
        number = builder.op("ReduceProd", spatial, keepdims=1)
    single = joined(builder, [builder.integers([1, 1]), spatial])
    places = builder.op("AffineGrid", identity, single, align_corners=op.attribute("align_corners"), dtype=theta.dtype)
    places = builder.op("Reshape", places, builder.integers([-1, axes]))
    homogeneous = builder.op("Pad", places, builder.integers([0, 0, 0, 1]), builder.scalar(1, theta))
    by_map = builder.op("Transpose", dy, perm=[0, axes + 1, *range(1, axes + 1)])
    by_map = builder.op("Reshape", by_map, joined(builder, [builder.integers([-1]), number]))
    return reshape_as(builder.op("MatMul", by_map, homogeneous), theta), None


def _spatial_axes(op: Operation) -> int:
    theta, size = op.required(0), op.required(1)
    length = size.dimension(0)
    axes = length - 2 if length is not None else theta.dimension(1) if theta.rank == 3 else None
    if axes is None:
        raise GradientError(
            f"{op}: the shapes of its inputs '{theta.name}' and '{size.name}' do not tell how many spatial axes the grid has; "
            "make the size a constant, or declare the shapes of the model's inputs"
        )
    return axes


GRID_SAMPLE_GRAD = SemanticOperator(
    "GridSampleGrad", ("dy", "x", "grid"), ("dx", "dgrid"), like("x", "grid"), lowering=lower_grid_sample_grad
)

OPERATORS = [
    Operator(
        "GridSample", gradient=grid_sample, axes=axis_rules.moved_image, reopen=partial(reopen_rules.images, sampled=(0, 1))
    ),
    Operator("AffineGrid", gradient=affine_grid, axes=axis_rules.of_another_rank, reopen=reopen_rules.affine_grid),
    GRID_SAMPLE_GRAD,
]

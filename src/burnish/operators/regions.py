"""Pooling over regions of interest: RoiAlign and MaxRoiPool.

``RoiAlignGrad(dy, x, rois, batch_indices) -> dx, drois`` and ``MaxRoiPoolGrad(dy, x, rois) -> dx`` are semantic operators.
RoiAlign agrees with ONNX Runtime and ``onnx.reference``: the mode ``max`` takes the largest product of a tap and its weight, not
the largest interpolated value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import SIXTEEN_BIT, Tensor
from burnish.graph.uses import is_used
from burnish.operators import axis_rules
from burnish.operators.indexing import GATHER_GRAD
from burnish.operators.interpolation import (
    LINEAR,
    images_of,
    of_extent,
    range_of,
    rows_of,
    shaped,
    size_of,
    taps_around,
    unchanged,
)
from burnish.operators.positions import add_at_positions, count, known_rank, reshape_as
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import SemanticOperator, like

ALIGNMENT = ("coordinate_transformation_mode", "mode", "output_height", "output_width", "sampling_ratio", "spatial_scale")


def roi_align(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients for the data and for the corners of the regions, which move the sampling points.

    The number of points in a bin counts as a constant, even if computed from the region's size.
    """
    known_rank(op, op.required(0))
    attributes = {name: op.attribute(name) for name in ALIGNMENT}
    dx, drois = ROI_ALIGN_GRAD.emit(dy, *(op.required(index) for index in range(3)), **attributes)
    return dx, drois, None


def lower_roi_align_grad(op: Operation) -> tuple[Tensor | None, ...]:
    """A bin is a sum, or with the mode max the largest, of products of taps and weights over all its points.

    Places and weights are ``[R, bins, bins, points, points, taps, taps]``, vertical before horizontal, and then
    ``[R * bins, K]``.
    """
    dy, x, rois, batch_indices = (op.required(index) for index in range(4))
    builder = op.builder
    precision = ir.DataType.FLOAT if x.dtype in SIXTEEN_BIT else x.dtype
    dy, images, corners = (builder.cast(tensor, precision) for tensor in (dy, x, rois))
    sides = [_Side(op, images, corners, axis) for axis in range(2)]
    vertical, horizontal = sides
    starts = builder.cast(batch_indices, ir.DataType.INT64) * count(images, 2)
    starts = builder.op("Reshape", starts, builder.integers([-1, *[1] * 6]))
    places = _by_bin(vertical.places * size_of(images, 3) + horizontal.places + starts, sides)
    weights = vertical.weights * horizontal.weights
    rows, received = rows_of(images), builder.op("Unsqueeze", rows_of(dy), builder.integers([1]))
    values = builder.op("Gather", rows, places, axis=0)
    factors = builder.op("Unsqueeze", _by_bin(weights, sides), builder.integers([2]))
    if op.attribute("mode", "avg") == "max":
        received = received * _is_largest(values * factors, weights, sides)
    dx = drois = None
    if is_used(op.node.outputs[0]):
        given = GATHER_GRAD(received * factors, places, rows, axis=0)
        dx = builder.cast(images_of(given, images), x.dtype)
    if is_used(op.node.outputs[1]):
        by_tap = builder.op("ReduceSum", values * received, builder.integers([2]), keepdims=0)
        by_tap = reshape_as(by_tap, weights)
        tops, bottoms = vertical.moved(by_tap, horizontal.weights)
        lefts, rights = horizontal.moved(by_tap, vertical.weights)
        columns = [builder.op("Unsqueeze", column, builder.integers([1])) for column in (lefts, tops, rights, bottoms)]
        drois = builder.cast(builder.op("Concat", *columns, axis=1, like=corners), rois.dtype)
    return dx, drois


def _by_bin(tensor: Tensor, sides: Sequence[_Side]) -> Tensor:
    """Reshape ``[R, bins, bins, points, points, taps, taps]`` to ``[R * bins, K]``."""
    builder = tensor.builder
    points = [side.points for side in sides]
    terms: int | Tensor = LINEAR.taps**2
    for number in points:
        terms = number * terms
    if isinstance(terms, int):
        return builder.op("Reshape", tensor, builder.integers([-1, terms]))
    shape = builder.op("Concat", builder.integers([-1]), builder.op("Reshape", terms, builder.integers([1])), axis=0)
    return builder.op("Reshape", tensor, shape)


def _is_largest(products: Tensor, weights: Tensor, sides: Sequence[_Side]) -> Tensor:
    """Return 1 for the product ``[R * bins, K, C]`` that is the first largest of its bin, otherwise 0."""
    builder, axis = products.builder, 1
    masks = [side.mask for side in sides if side.mask is not None]
    if masks:
        counted = builder.op("Expand", masks[0] * masks[1], builder.op("Shape", weights))
        counted = builder.op("Unsqueeze", builder.cast(_by_bin(counted, sides), ir.DataType.BOOL), builder.integers([2]))
        lowest = builder.scalar(np.finfo(products.dtype.numpy()).min, products)
        products = builder.op("Where", counted, products, lowest, like=products)
    chosen = builder.op("ArgMax", products, axis=axis, keepdims=1)
    places = range_of(size_of(products, axis), builder)
    places = builder.op("Unsqueeze", places, builder.integers([1]))
    return builder.cast(builder.op("Equal", chosen, places), products.dtype)


class _Side:
    """The points of all regions' bins along one axis, and their taps.

    Attributes:
        points: points per bin; the maximum over all regions.
        places: int64, along the axis; broadcasts with ``[R, bins, bins, points, points, taps, taps]``.
        weights: likewise. Zero for points outside, or that a region does not have; for averages, divided by the number of points.
        mask: likewise, 1 for points that a region has; None if all have the same number.
    """

    def __init__(self, op: Operation, images: Tensor, corners: Tensor, axis: int):
        builder, dtype = images.builder, images.dtype
        self._axis, self._regions = axis, size_of(corners, 0)
        self._bins = int(op.attribute(("output_height", "output_width")[axis], 1))
        self._scale = float(op.attribute("spatial_scale", 1.0))
        half_pixel = op.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
        start, end = (self._corner(corners, 1 - axis + shift, 0.5 if half_pixel else 0.0) for shift in (0, 2))
        length, self._follows = end - start, None
        if not half_pixel:
            self._follows = builder.cast(builder.op("Greater", length, 1), dtype)
            length = builder.op("Max", length, builder.scalar(1, dtype))
        bin_length = length / float(self._bins)
        mask, share, middles = self._subdivided(int(op.attribute("sampling_ratio", 0)), bin_length)
        bins = builder.constant(np.arange(self._bins, dtype=dtype.numpy()).reshape(1, -1, 1))
        self._fraction = (bins + middles * share) / float(self._bins)
        position = start + bins * bin_length + middles * bin_length * share
        last = of_extent(images, axis + 2, lambda size: size - 1, dtype)
        outside = builder.op("Or", builder.op("Less", position, -1), builder.op("Greater", position, last + 1))
        factor = builder.cast(builder.op("Not", outside), dtype)
        factor = factor if mask is None else factor * mask
        factor = factor * share if op.attribute("mode", "avg") != "max" else factor
        inside = builder.op("And", builder.op("Greater", position, 0), builder.op("Less", position, last))
        self._moves = builder.cast(inside, dtype)
        at = builder.op("Clip", position, builder.scalar(0, dtype), last)
        taps = taps_around(builder.op("Reshape", at, builder.integers([-1])), LINEAR, last, unchanged)
        taps = taps.masked(builder.op("Reshape", factor, builder.integers([-1, 1])))
        assert taps.slopes is not None
        self.places, self.weights, self._slopes = (self._arranged(part) for part in (taps.places, taps.weights, taps.slopes))
        self.mask = None if mask is None else self._arranged(mask, bins=1, taps=1)

    def moved(self, by_tap: Tensor, other_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the start and end of regions, ``[R]``, from those of the weights of all taps."""
        builder, others = by_tap.builder, [2 - self._axis, 4 - self._axis, 5, 6]
        by_point = builder.op("ReduceSum", by_tap * (self._slopes * other_weights), builder.integers(others), keepdims=0)
        by_point = by_point * self._moves
        all_points = builder.integers([1, 2])
        shifted = builder.op("ReduceSum", by_point, all_points, keepdims=0)
        stretched = builder.op("ReduceSum", by_point * self._fraction, all_points, keepdims=0)
        if self._follows is not None:
            stretched = stretched * builder.op("Reshape", self._follows, builder.integers([-1]))
        return (shifted - stretched) * self._scale, stretched * self._scale

    def _corner(self, corners: Tensor, column: int, offset: float) -> Tensor:
        """Return one coordinate of all regions' corners, ``[R, 1, 1]``, on the grid of the images' elements."""
        builder = corners.builder
        numbers = builder.op("Gather", corners, builder.scalar(column, ir.DataType.INT64), axis=1)
        scaled = builder.op("Reshape", numbers, builder.integers([-1, 1, 1])) * self._scale
        return scaled - offset if offset else scaled

    def _subdivided(self, ratio: int, bin_length: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Set ``points``; return a mask of the points that a region has, 1 / their number, and their places."""
        builder, dtype = bin_length.builder, bin_length.dtype
        if ratio > 0:
            self.points: int | Tensor = ratio
            return None, builder.scalar(1 / ratio, dtype), builder.constant(np.arange(0.5, ratio, dtype=dtype.numpy()))
        number, one = builder.op("Ceil", bin_length), builder.scalar(1, dtype)
        most = builder.op(
            "Concat", builder.op("Reshape", number, builder.integers([-1])), builder.constant(np.ones(1, dtype.numpy())), axis=0
        )
        self.points = builder.cast(builder.op("ReduceMax", most, keepdims=0), ir.DataType.INT64)
        points = builder.cast(range_of(self.points, builder), dtype)
        return builder.cast(builder.op("Less", points, number), dtype), 1 / builder.op("Max", number, one), points + 0.5

    def _arranged(self, tensor: Tensor, bins: int | None = None, taps: int = LINEAR.taps) -> Tensor:
        """Reshape ``[R * bins * points, taps]`` to ``[R, bins, bins, points, points, taps, taps]``, with 1 for the other side."""
        parts = [self._bins if bins is None else bins, self.points, taps]
        shape: list[int | Tensor] = [self._regions]
        for part in parts:
            shape += [part, 1] if self._axis == 0 else [1, part]
        return shaped(tensor, shape)


def max_roi_pool(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient goes to the first maximum of each bin; regions are rounded to whole elements, so they have no gradient."""
    if not op.wants(0):
        return None, None
    attributes = {name: op.attribute(name) for name in ("pooled_shape", "spatial_scale")}
    return MAX_ROI_POOL_GRAD(dy, op.required(0), op.required(1), **attributes), None


def lower_max_roi_pool_grad(op: Operation) -> Tensor:
    """The largest of each row of a bin, then the largest of its rows; an empty bin has none."""
    dy, x, rois = (op.required(index) for index in range(3))
    builder, index = op.builder, ir.DataType.INT64
    in_rows, in_columns = (_is_in_bins(op, x, rois, axis) for axis in range(2))
    image = builder.cast(builder.op("Gather", rois, builder.scalar(0, index), axis=1), index)
    lowest = builder.scalar(np.finfo(x.dtype.numpy()).min, x)
    by_row = builder.op("Unsqueeze", builder.op("Gather", x, image, axis=0), builder.integers([3]))
    by_row = builder.op("Where", builder.op("Unsqueeze", in_columns, builder.integers([1, 2])), by_row, lowest)
    columns = builder.op("ArgMax", by_row, axis=4, keepdims=0)
    largest = builder.op("ReduceMax", by_row, builder.integers([4]), keepdims=0)
    by_bin = builder.op("Unsqueeze", largest, builder.integers([2]))
    by_bin = builder.op("Where", builder.op("Unsqueeze", in_rows, builder.integers([1, 4])), by_bin, lowest)
    row = builder.op("ArgMax", by_bin, axis=3, keepdims=0)
    column = builder.op("GatherElements", columns, row, axis=2)
    first = builder.op("Reshape", image * size_of(x, 1), builder.integers([-1, 1])) + range_of(size_of(x, 1), builder)
    first = builder.op("Unsqueeze", first, builder.integers([2, 3])) * size_of(x, 2)
    places = (first + row) * size_of(x, 3) + column
    has_rows, has_columns = (
        builder.op("ReduceMax", builder.cast(inside, dy.dtype), builder.integers([2]), keepdims=0)
        for inside in (in_rows, in_columns)
    )
    rows_and_columns = builder.op("Unsqueeze", has_rows, builder.integers([1, 3])) * builder.op(
        "Unsqueeze", has_columns, builder.integers([1, 2])
    )
    return add_at_positions(dy * rows_and_columns, places, x)


def _is_in_bins(op: Operation, x: Tensor, rois: Tensor, axis: int) -> Tensor:
    """Return True if an element along an axis belongs to a bin of a region: ``[R, bins, extent]``.

    A region's corners are rounded, halves away from zero, and it has at least one element; bins overlap if they must.
    """
    builder, bins = op.builder, int(op.attribute("pooled_shape")[axis])
    precision = ir.DataType.FLOAT if rois.dtype in SIXTEEN_BIT else rois.dtype
    start, end = (_rounded_corner(op, builder.cast(rois, precision), column) for column in (2 - axis, 4 - axis))
    length = builder.op("Max", end - start + 1, builder.scalar(1, start)) / float(bins)
    numbers = builder.constant(np.arange(bins, dtype=precision.numpy()).reshape(1, -1, 1))
    begins = builder.op("Floor", numbers * length) + start
    ends = builder.op("Ceil", (numbers + 1) * length) + start
    places = builder.cast(range_of(size_of(x, axis + 2), builder), precision)
    return builder.op("And", builder.op("GreaterOrEqual", places, begins), builder.op("Less", places, ends))


def _rounded_corner(op: Operation, rois: Tensor, column: int) -> Tensor:
    builder = op.builder
    numbers = builder.op("Gather", rois, builder.scalar(column, ir.DataType.INT64), axis=1)
    scaled = builder.op("Reshape", numbers, builder.integers([-1, 1, 1])) * float(op.attribute("spatial_scale", 1.0))
    return builder.op("Floor", builder.op("Abs", scaled) + 0.5) * builder.op("Sign", scaled)


ROI_ALIGN_GRAD = SemanticOperator(
    "RoiAlignGrad", ("dy", "x", "rois", "batch_indices"), ("dx", "drois"), like("x", "rois"), lowering=lower_roi_align_grad
)
MAX_ROI_POOL_GRAD = SemanticOperator("MaxRoiPoolGrad", ("dy", "x", "rois"), ("dx",), like("x"), lowering=lower_max_roi_pool_grad)

OPERATORS = [
    Operator("RoiAlign", since=16, gradient=roi_align, axes=axis_rules.regions),
    Operator("MaxRoiPool", gradient=max_roi_pool, axes=axis_rules.regions),
    ROI_ALIGN_GRAD,
    MAX_ROI_POOL_GRAD,
]

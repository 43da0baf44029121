"""Interpolation between the elements of an image, and its adjoint.

A value at a point is a weighted sum over K elements around it, the *taps*: a weight is the product of one factor per axis, a
polynomial in the distance of the point from an element. GridSample, RoiAlign and DeformConv use these functions and differ in
their points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators.indexing import GATHER_GRAD
from burnish.operators.positions import count, extent, joined, reshape_as, reshape_to

MOST_NUMBERS = 1 << 20
"""The length of the longest constant range; a longer one is computed in the graph."""

CUBIC_A = -0.75
"""The coefficient of Keys' kernel ("Cubic convolution interpolation", 1981) in GridSample, as in PyTorch."""


@dataclass(frozen=True)
class Interpolation:
    """An interpolation between elements along one axis.

    Attributes:
        first: offset of the first tap from the last element at or before the point.
        coefficients: the taps' weights as polynomials in the distance from that element, highest power first,
            ``[powers, taps]``.
    """

    first: int
    coefficients: np.ndarray

    @property
    def taps(self) -> int:
        return int(self.coefficients.shape[1])

    @property
    def is_nearest(self) -> bool:
        """True if a value is that of one element, and constant under small moves of the point."""
        return self.taps == 1


NEAREST = Interpolation(0, np.ones((1, 1)))
LINEAR = Interpolation(0, np.array([[-1.0, 1.0], [1.0, 0.0]]))
CUBIC = Interpolation(
    -1,
    np.array(
        [
            [CUBIC_A, CUBIC_A + 2, -CUBIC_A - 2, -CUBIC_A],
            [-2 * CUBIC_A, -CUBIC_A - 3, 2 * CUBIC_A + 3, CUBIC_A],
            [CUBIC_A, 0.0, -CUBIC_A, 0.0],
            [0.0, 1.0, 0.0, 0.0],
        ]
    ),
)


@dataclass(frozen=True)
class Taps:
    """The taps of values at M points along one axis.

    Attributes:
        places: int64 ``[M, T]``, inside the axis.
        weights: ``[M, T]`` or ``[1, T]``.
        slopes: derivatives of the weights for the point's coordinate, likewise; None if the weights are constant.
    """

    places: Tensor
    weights: Tensor
    slopes: Tensor | None

    def masked(self, mask: Tensor) -> Taps:
        """Return the taps without those for which ``mask``, numbers that broadcast with the weights, is zero."""
        return Taps(self.places, self.weights * mask, None if self.slopes is None else self.slopes * mask)


def of_extent(tensor: Tensor, axis: int, function: Callable[..., Tensor | float], dtype: ir.DataType) -> Tensor:
    """Return a scalar computed from the extent along an axis: a constant if the extent is known."""
    builder, known = tensor.builder, tensor.dimension(axis)
    if known is not None:
        number = function(float(known))
        assert not isinstance(number, Tensor)
        return builder.scalar(number, dtype)
    computed = function(builder.cast(count(tensor, axis, axis + 1), dtype))
    assert isinstance(computed, Tensor)
    return computed


def taps_around(
    position: Tensor, interpolation: Interpolation, last: Tensor, continued: Callable[[Tensor], Tensor] | None
) -> Taps:
    """Return the taps of points ``[M]`` along an axis with its last element at ``last``.

    ``continued`` maps an outside place to the element used instead; without it the outside is zero.
    """
    builder = position.builder
    base = builder.op("Round" if interpolation.is_nearest else "Floor", position)
    axis = builder.integers([1])
    offsets = interpolation.first + np.arange(interpolation.taps)
    places = builder.op("Unsqueeze", base, axis) + _row(builder, offsets, position.dtype)
    fraction = None if interpolation.is_nearest else builder.op("Unsqueeze", position - base, axis)
    powers = interpolation.coefficients
    weights = _polynomial(builder, fraction, powers, position.dtype)
    slopes = None
    if fraction is not None:
        exponents = np.arange(len(powers) - 1, 0, -1)[:, np.newaxis]
        slopes = _polynomial(builder, fraction, powers[:-1] * exponents, position.dtype)
    if continued is not None:
        places = continued(places)
    inside = builder.op("Clip", places, builder.scalar(0, position), last)
    taps = Taps(builder.cast(inside, ir.DataType.INT64), weights, slopes)
    if continued is not None:
        return taps
    return taps.masked(builder.cast(builder.op("Equal", inside, places), position.dtype))


@dataclass(frozen=True)
class Reading:
    """Values at M points of images as sums over K taps each, from rows ``[images * elements, C]`` by ``rows_of``.

    Attributes:
        places: int64 ``[M, K]``, the rows.
        taps: the taps along each axis.
    """

    places: Tensor
    taps: Sequence[Taps]

    @staticmethod
    def of(taps: Sequence[Taps], extents: Sequence[int | Tensor], first: Tensor) -> Reading:
        """Combine the taps along each axis, the axes' extents and each point's first row (int64 ``[M, 1]``)."""
        total: Tensor | None = None
        step: int | Tensor | None = None
        for axis in reversed(range(len(taps))):
            places = taps[axis].places
            places = _beside(places + first if step is None else places * step, axis, len(taps))
            total = places if total is None else places + total
            step = extents[axis] if step is None else extents[axis] * step
        assert total is not None
        return Reading(_side_by_side(total, taps), taps)

    @property
    def weights(self) -> Tensor:
        """``[M, K]``, or ``[1, K]`` if all points have the same."""
        return self._product(None)

    def slopes(self, axis: int) -> Tensor:
        return self._product(axis)

    def values(self, rows: Tensor) -> Tensor:
        """Return the taps' values, ``[M, K, C]``."""
        return rows.builder.op("Gather", rows, self.places, axis=0)

    def read(self, rows: Tensor) -> Tensor:
        """Return the values at the points, ``[M, C]``."""
        builder = rows.builder
        weights = builder.op("Unsqueeze", self.weights, builder.integers([2]))
        return builder.op("ReduceSum", self.values(rows) * weights, builder.integers([1]), keepdims=0)

    def given_back(self, contributions: Tensor, rows: Tensor) -> Tensor:
        """The adjoint of ``values``: contributions ``[M, K, C]`` added to the rows read."""
        return GATHER_GRAD(contributions, self.places, rows, axis=0)

    def moved(self, slopes_by_tap: Tensor, axis: int) -> Tensor:
        """Return the gradient of the points' coordinates along an axis, ``[M]``, from that of the weights, ``[M, K]``."""
        builder = slopes_by_tap.builder
        return builder.op("ReduceSum", slopes_by_tap * self.slopes(axis), builder.integers([1]), keepdims=0)

    def _product(self, slope: int | None) -> Tensor:
        result: Tensor | None = None
        for axis, taps in enumerate(self.taps):
            factor = taps.slopes if axis == slope else taps.weights
            assert factor is not None
            factor = _beside(factor, axis, len(self.taps))
            result = factor if result is None else result * factor
        assert result is not None
        return _side_by_side(result, self.taps)


def rows_of(images: Tensor) -> Tensor:
    """Reshape images ``[N, C, spatial]`` to rows ``[N * elements, C]``: the channels of an element are adjacent."""
    builder = images.builder
    return builder.op("Reshape", _channels_last(images), joined(builder, [builder.integers([-1]), extent(images, 1)]))


def images_of(rows: Tensor, like: Tensor) -> Tensor:
    """Reshape rows to images with the shape of ``like``: the inverse of ``rows_of``, and its adjoint."""
    rank = known_axes(like)
    last = reshape_as(rows, _channels_last(like))
    return like.builder.op("Transpose", last, perm=[0, rank - 1, *range(1, rank - 1)], like=like)


def size_of(tensor: Tensor, axis: int) -> int | Tensor:
    """Return the extent along an axis: an int if known, otherwise an int64 scalar."""
    known = tensor.dimension(axis)
    return count(tensor, axis, axis + 1) if known is None else known


def known_axes(tensor: Tensor) -> int:
    assert tensor.rank is not None
    return tensor.rank


def range_of(number: int | Tensor, builder: Builder) -> Tensor:
    """Return the integers from 0 to ``number`` - 1."""
    if isinstance(number, int) and number <= MOST_NUMBERS:
        return builder.integers(range(number))
    index = ir.DataType.INT64
    end = builder.scalar(number, index) if isinstance(number, int) else number
    return builder.op("Range", builder.scalar(0, index), end, builder.scalar(1, index))


def shaped(tensor: Tensor, extents: Sequence[int | Tensor]) -> Tensor:
    """Reshape a tensor to extents that are ints or int64 scalars."""

    def vector(number: Tensor) -> Callable[[], Tensor]:
        return lambda: number.builder.op("Reshape", number, number.builder.integers([1]))

    return reshape_to(tensor, [extent if isinstance(extent, int) else vector(extent) for extent in extents])


def unchanged(places: Tensor) -> Tensor:
    """Keep places as they are, if no tap outside has a weight."""
    return places


def _channels_last(images: Tensor) -> Tensor:
    return images.builder.op("Transpose", images, perm=[0, *range(2, known_axes(images)), 1])


def _beside(tensor: Tensor, axis: int, axes: int) -> Tensor:
    """Return ``[M, T]`` with its taps at their axis among those of all axes: ``[M, ..., T, ...]``."""
    others = [1 + other for other in range(axes) if other != axis]
    return tensor.builder.op("Unsqueeze", tensor, tensor.builder.integers(others)) if others else tensor


def _side_by_side(tensor: Tensor, taps: Sequence[Taps]) -> Tensor:
    """Return ``[M, T, ..., T]`` as ``[M, K]``."""
    if len(taps) == 1:
        return tensor
    terms = prod(int(along.places.dimension(1) or 0) for along in taps)
    return tensor.builder.op("Reshape", tensor, tensor.builder.integers([-1, terms]))


def _polynomial(builder: Builder, x: Tensor | None, coefficients: np.ndarray, dtype: ir.DataType) -> Tensor:
    """Polynomials in x ``[M, 1]``, by Horner's rule: ``[M, T]``, or ``[1, T]`` for constants."""
    result = _row(builder, coefficients[0], dtype)
    for row in coefficients[1:]:
        assert x is not None
        result = result * x
        if row.any():
            result = result + _row(builder, row, dtype)
    return result


def _row(builder: Builder, numbers: np.ndarray, dtype: ir.DataType) -> Tensor:
    return builder.constant(np.asarray(numbers)[np.newaxis].astype(dtype.numpy()))

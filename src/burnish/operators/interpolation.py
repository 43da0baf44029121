"""Values between the elements of an image, and the adjoint of reading them.

A value at a point is a sum over K elements around it, the *taps*: their weights are products of what is taken along each axis,
polynomials in how far the point lies behind an element. What reads images at computed points is written with these: GridSample,
RoiAlign and DeformConv differ in their points.
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
"""Of a range that is a constant; a longer one is made where it is used."""

CUBIC_A = -0.75
"""The coefficient of Keys' kernel ("Cubic convolution interpolation", 1981) in GridSample, as in PyTorch."""


@dataclass(frozen=True)
class Interpolation:
    """How a value between elements is made of them, along one axis.

    Attributes:
        first: where the first tap lies, counted from the last element that is not behind the point.
        coefficients: of the taps' weights as polynomials in the distance from that element, highest power first,
            ``[powers, taps]``.
    """

    first: int
    coefficients: np.ndarray

    @property
    def taps(self) -> int:
        """How many elements a value is made of."""
        return int(self.coefficients.shape[1])

    @property
    def is_nearest(self) -> bool:
        """Whether a value is that of one element, and does not change where the point moves a little."""
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
    """What values at M points are made of along one axis.

    Attributes:
        places: int64 ``[M, T]``, inside the axis.
        weights: ``[M, T]`` or ``[1, T]``.
        slopes: their derivatives by the point's coordinate, likewise; None where they do not change.
    """

    places: Tensor
    weights: Tensor
    slopes: Tensor | None

    def masked(self, mask: Tensor) -> Taps:
        """The same without the taps where ``mask``, numbers that broadcast with the weights, is zero."""
        return Taps(self.places, self.weights * mask, None if self.slopes is None else self.slopes * mask)


def of_extent(tensor: Tensor, axis: int, function: Callable[..., Tensor | float], dtype: ir.DataType) -> Tensor:
    """A scalar computed from the extent along an axis: a constant where that is known."""
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
    """The taps of points ``[M]`` along an axis whose last element is at ``last``.

    ``continued`` says which element stands for one that lies outside; without it there are zeros outside.
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
    """Values at M points of images as sums over K taps each: of rows ``[images * elements, C]``, as ``rows_of`` makes them.

    Attributes:
        places: int64 ``[M, K]``, the rows.
        taps: along each axis.
    """

    places: Tensor
    taps: Sequence[Taps]

    @staticmethod
    def of(taps: Sequence[Taps], extents: Sequence[int | Tensor], first: Tensor) -> Reading:
        """From the taps along each axis, the axes' extents and each point's first row (int64 ``[M, 1]``)."""
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
        """``[M, K]``, or ``[1, K]`` where all points have the same."""
        return self._product(None)

    def slopes(self, axis: int) -> Tensor:
        """The derivatives of the weights by the points' coordinates along an axis."""
        return self._product(axis)

    def values(self, rows: Tensor) -> Tensor:
        """The taps' values, ``[M, K, C]``."""
        return rows.builder.op("Gather", rows, self.places, axis=0)

    def read(self, rows: Tensor) -> Tensor:
        """The values at the points, ``[M, C]``."""
        builder = rows.builder
        weights = builder.op("Unsqueeze", self.weights, builder.integers([2]))
        return builder.op("ReduceSum", self.values(rows) * weights, builder.integers([1]), keepdims=0)

    def given_back(self, contributions: Tensor, rows: Tensor) -> Tensor:
        """The adjoint of ``values``: contributions ``[M, K, C]`` added where they were read."""
        return GATHER_GRAD(contributions, self.places, rows, axis=0)

    def moved(self, slopes_by_tap: Tensor, axis: int) -> Tensor:
        """The gradient of the points' coordinates along an axis, ``[M]``, from that of the weights, ``[M, K]``."""
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
    """Images ``[N, C, spatial]`` as rows ``[N * elements, C]``: what is read together lies together."""
    builder = images.builder
    return builder.op("Reshape", _channels_last(images), joined(builder, [builder.integers([-1]), extent(images, 1)]))


def images_of(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as images of the shape of ``like``: the inverse of ``rows_of``, and its adjoint."""
    rank = known_axes(like)
    last = reshape_as(rows, _channels_last(like))
    return like.builder.op("Transpose", last, perm=[0, rank - 1, *range(1, rank - 1)], like=like)


def size_of(tensor: Tensor, axis: int) -> int | Tensor:
    """The extent along an axis: an int where it is known, else an int64 scalar."""
    known = tensor.dimension(axis)
    return count(tensor, axis, axis + 1) if known is None else known


def known_axes(tensor: Tensor) -> int:
    """The rank, which a rule has made sure is known."""
    assert tensor.rank is not None
    return tensor.rank


def range_of(number: int | Tensor, builder: Builder) -> Tensor:
    """The integers from 0 up to a number, which is left out."""
    if isinstance(number, int) and number <= MOST_NUMBERS:
        return builder.integers(range(number))
    index = ir.DataType.INT64
    end = builder.scalar(number, index) if isinstance(number, int) else number
    return builder.op("Range", builder.scalar(0, index), end, builder.scalar(1, index))


def shaped(tensor: Tensor, extents: Sequence[int | Tensor]) -> Tensor:
    """The tensor in a shape whose extents are ints, or int64 scalars."""

    def vector(number: Tensor) -> Callable[[], Tensor]:
        return lambda: number.builder.op("Reshape", number, number.builder.integers([1]))

    return reshape_to(tensor, [extent if isinstance(extent, int) else vector(extent) for extent in extents])


def unchanged(places: Tensor) -> Tensor:
    """What stands for elements outside where no tap lies there with a weight."""
    return places


def _channels_last(images: Tensor) -> Tensor:
    return images.builder.op("Transpose", images, perm=[0, *range(2, known_axes(images)), 1])


def _beside(tensor: Tensor, axis: int, axes: int) -> Tensor:
    """``[M, T]`` with its taps at their axis among those of all axes: ``[M, ..., T, ...]``."""
    others = [1 + other for other in range(axes) if other != axis]
    return tensor.builder.op("Unsqueeze", tensor, tensor.builder.integers(others)) if others else tensor


def _side_by_side(tensor: Tensor, taps: Sequence[Taps]) -> Tensor:
    """``[M, T, ..., T]`` as ``[M, K]``."""
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

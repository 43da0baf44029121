"""Reading images at points: GridSample, AffineGrid, DeformConv, MaxRoiPool.

The evaluator's GridSample knows only the names that modes have since opset 20, computes in float32 inside, and moves points to
the border where cubic interpolation repeats the border's elements; its DeformConv is written on that. Its AffineGrid returns
float32 whatever it reads, and it has no MaxRoiPool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from burnish.engines.reference.operators.operator import Operator, listed, wide

CUBIC_A = -0.75
Taps = list[tuple[np.ndarray, np.ndarray]]
"""Along one axis: places and weights of each tap, of the points' shape."""


class GridSample(Operator):
    """Interpolation at the points of a grid, in any number of dimensions."""

    def _run(
        self,
        x: np.ndarray,
        grid: np.ndarray,
        mode: str = "linear",
        padding_mode: str = "zeros",
        align_corners: int = 0,
    ) -> tuple[np.ndarray, ...]:
        data = wide(x)
        along = []
        for axis, size in enumerate(x.shape[2:]):
            numbers = grid[..., -1 - axis].reshape(len(grid), math.prod(grid.shape[1:-1])).astype(data.dtype)
            position = (numbers + 1) / 2 * (size - 1) if align_corners else ((numbers + 1) * size - 1) / 2
            along.append(_taps(position, size, mode, padding_mode, bool(align_corners)))
        return (_read(data, along).reshape(*x.shape[:2], *grid.shape[1:-1]).astype(x.dtype),)


class AffineGrid(Operator):
    """Where an affine map takes the places of an image, each counted from -1 to 1."""

    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int = 0) -> tuple[np.ndarray, ...]:
        spatial = [int(extent) for extent in size[2:]]
        dtype = wide(theta).dtype
        axes = []
        for extent in spatial:
            if align_corners:
                axes.append(np.linspace(-1, 1, extent, dtype=dtype) if extent > 1 else np.zeros(1, dtype))
            else:
                axes.append((2 * np.arange(extent, dtype=dtype) + 1) / extent - 1)
        places = [*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(spatial, dtype)]
        grid = np.einsum("nij,j...->n...i", wide(theta), np.stack(places))
        return (grid.astype(theta.dtype),)


class DeformConv(Operator):
    """A convolution over points that are moved by offsets and weighed by a mask; zeros outside of the data."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        offset: np.ndarray,
        bias: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        group: int = 1,
        offset_group: int = 1,
        strides: Sequence[int] | None = None,
        dilations: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[np.ndarray, ...]:
        images, channels, *spatial = x.shape
        axes, kernel, output = len(spatial), w.shape[2:], offset.shape[2:]
        step, spacing = listed(strides, 1, axes), listed(dilations, 1, axes)
        begin = listed(pads, 0, 2 * axes)[:axes]
        data = wide(x).reshape(images * offset_group, channels // offset_group, *spatial)
        moves = wide(offset).reshape(len(data), *kernel, axes, *output)
        along, points = [], math.prod(kernel) * math.prod(output)
        for axis, size in enumerate(spatial):
            inside = np.arange(kernel[axis]) * spacing[axis] - begin[axis]
            starts = np.arange(output[axis]) * step[axis]
            places = np.expand_dims(inside, [a for a in range(2 * axes) if a != axis])
            places = places + np.expand_dims(starts, [a for a in range(2 * axes) if a != axes + axis])
            position = (np.take(moves, axis, axis=1 + axes) + places.astype(data.dtype)).reshape(len(data), points)
            along.append(_taps(position, size, "linear", "zeros", aligned=False))
        read = _read(data, along)
        if mask is not None:
            read = read * wide(mask).reshape(len(data), 1, points)
        columns = read.reshape(images, group, channels // group * math.prod(kernel), math.prod(output))
        y = np.matmul(wide(w).reshape(group, len(w) // group, -1), columns).reshape(images, len(w), *output)
        if bias is not None:
            y = y + wide(bias).reshape(-1, *[1] * axes)
        return (y.astype(x.dtype),)


class MaxRoiPool(Operator):
    """The largest element of each bin of each region, whose corners are rounded to whole elements; zero of an empty bin."""

    def _run(
        self, x: np.ndarray, rois: np.ndarray, pooled_shape: Sequence[int], spatial_scale: float = 1.0
    ) -> tuple[np.ndarray, ...]:
        y = np.zeros((len(rois), x.shape[1], *pooled_shape), x.dtype)
        for region, (image, *corners) in enumerate(rois):
            left, top, right, bottom = (
                float(np.sign(n) * np.floor(np.abs(n) + 0.5)) for n in np.asarray(corners) * rois.dtype.type(spatial_scale)
            )
            rows, columns = (
                _bins(start, end, number, size, rois.dtype)
                for start, end, number, size in zip((top, left), (bottom, right), pooled_shape, x.shape[2:], strict=True)
            )
            for (i, row), (j, column) in product(enumerate(rows), enumerate(columns)):
                box = x[int(image), :, row, column]
                if box.size:
                    y[region, :, i, j] = box.max(axis=(1, 2))
        return (y,)


def _bins(start: float, end: float, number: int, size: int, dtype: np.dtype) -> list[slice]:
    length = dtype.type(max(end - start + 1, 1)) / dtype.type(number)
    limits = [(np.floor(place * length) + start, np.ceil((place + 1) * length) + start) for place in range(number)]
    return [slice(int(np.clip(begin, 0, size)), int(np.clip(stop, 0, size))) for begin, stop in limits]


def _taps(position: np.ndarray, size: int, mode: str, padding: str, aligned: bool) -> Taps:
    """The elements around points along an axis; padding moves the points, or for cubic interpolation the elements."""
    is_cubic = mode in ("cubic", "bicubic")
    place = _padded(padding, size, aligned)
    if not is_cubic:
        position = place(position)
    if mode == "nearest":
        base, weights = np.round(position), [np.ones_like(position)]
    else:
        base = np.floor(position)
        fraction = position - base
        weights = _cubic(fraction) if is_cubic else [1 - fraction, fraction]
    taps = []
    for number, weight in enumerate(weights):
        at = base + number - (1 if is_cubic else 0)
        at = place(at) if is_cubic else at
        inside = np.clip(at, 0, size - 1)
        taps.append((inside.astype(np.int64), np.where(inside == at, weight, 0) if padding == "zeros" else weight))
    return taps


def _padded(padding: str, size: int, aligned: bool) -> Callable[[np.ndarray], np.ndarray]:
    """What places outside stand for."""
    if padding == "zeros":
        return lambda places: places
    if padding == "border":
        return lambda places: np.clip(places, 0, size - 1)
    first, span = (0.0, max(size - 1, 1)) if aligned else (-0.5, size)

    def reflected(places: np.ndarray) -> np.ndarray:
        return np.clip(span - np.abs(np.mod(places - first, 2 * span) - span) + first, 0, size - 1)

    return reflected


def _cubic(fraction: np.ndarray) -> list[np.ndarray]:
    """The weights of the cubic convolution kernel (Keys, 1981) at the four elements around."""
    weights = []
    for distance in (1 + fraction, fraction, 1 - fraction, 2 - fraction):
        near = ((CUBIC_A + 2) * distance - (CUBIC_A + 3)) * distance**2 + 1
        far = CUBIC_A * (((distance - 5) * distance + 8) * distance - 4)
        weights.append(np.where(distance <= 1, near, far))
    return weights


def _read(data: np.ndarray, along: Sequence[Taps]) -> np.ndarray:
    """Images ``[N, C, spatial]`` at points, as sums over the products of the axes' taps: ``[N, C, points]``."""
    flat = data.reshape(*data.shape[:2], math.prod(data.shape[2:]))
    total = np.zeros((*data.shape[:2], along[0][0][0].shape[1]), data.dtype)
    for taps in product(*along):
        place, weight = np.zeros((), np.int64), np.ones((), data.dtype)
        for size, (places, weights) in zip(data.shape[2:], taps, strict=True):
            place, weight = place * size + places, weight * weights
        total += weight[:, None] * np.take_along_axis(flat, place[:, None], axis=2)
    return total

"""Windows over signals, images and volumes: convolution, pooling, resizing, sampling where a grid says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from onnx.reference.ops.op_resize import Resize as EvaluatorResize

from burnish.engines.reference.operators.operator import Operator, listed, per_channel, wide
from burnish.graph import same_padding, split_padding


@dataclass(frozen=True)
class Windows:
    """Windows over data of known size; one entry per spatial axis.

    ``pads_end`` is what the node says; ``reach_end`` is how far behind the data the last window reaches, which a rounded-up
    output size makes more, and trailing entries that no window reaches make less.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads_begin: list[int]
    pads_end: list[int]
    reach_end: list[int]
    counts: list[int]

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @staticmethod
    def of(extents: Sequence[int], kernel: Sequence[int], attributes: dict[str, Any]) -> Windows:
        """The windows of a convolution or pool over data of these spatial extents."""
        rank = len(kernel)
        strides, dilations = (listed(attributes.get(name), 1, rank) for name in ("strides", "dilations"))
        pads, mode = listed(attributes.get("pads"), 0, 2 * rank), attributes.get("auto_pad") or "NOTSET"
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
        begin, end = pads[:rank], pads[rank:]
        if mode == "VALID":
            begin, end = [0] * rank, [0] * rank
        elif mode in ("SAME_UPPER", "SAME_LOWER"):
            totals = [same_padding(*axis) or 0 for axis in zip(extents, spans, strides, strict=True)]
            begin, end = map(list, split_padding(totals, more_at_end=mode == "SAME_UPPER"))
        rounded_up = bool(attributes.get("ceil_mode")) and not mode.startswith("SAME")
        counts, reach_end = [], []
        for axis in range(rank):
            room = extents[axis] + begin[axis] + end[axis] - spans[axis]
            count = room // strides[axis] + 1
            # A window that would start behind the data is left out.
            if rounded_up and room % strides[axis] and count * strides[axis] < extents[axis] + begin[axis]:
                count += 1
            counts.append(count)
            reach_end.append((count - 1) * strides[axis] + spans[axis] - begin[axis] - extents[axis])
        return Windows(list(kernel), strides, dilations, begin, end, reach_end, counts)

    def view(self, x: np.ndarray, outside: Any) -> np.ndarray:
        """Return ``x`` [N, C, *space] as [N, C, *counts, *kernel], ``outside`` where a window reaches beyond it."""
        rank = self.rank
        cropped = x[(..., *(slice(None, min(reach, 0) or None) for reach in self.reach_end))]
        around = [(0, 0), (0, 0), *((begin, max(reach, 0)) for begin, reach in zip(self.pads_begin, self.reach_end, strict=True))]
        padded = np.pad(cropped, around, constant_values=outside)
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True)]
        seen = sliding_window_view(padded, spans, axis=tuple(range(2, rank + 2)))
        steps = [slice(None, None, step) for step in (*self.strides, *self.dilations)]
        return seen[(slice(None), slice(None), *steps)]

    def counted(self, extents: Sequence[int], include_pads: bool) -> np.ndarray:
        """How many elements of each window [*counts] lie inside the data of these extents, or also inside its pads."""
        total = np.ones(())
        for axis, extent in enumerate(extents):
            first = np.arange(self.counts[axis])[:, None] * self.strides[axis] - self.pads_begin[axis]
            places = first + np.arange(self.kernel[axis]) * self.dilations[axis]
            inside = places < extent + self.pads_end[axis] if include_pads else (places >= 0) & (places < extent)
            total = np.multiply.outer(total, inside.sum(axis=1))
        return total


class Conv(Operator):
    """Products of the weight with the data seen through windows."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, group: int = 1, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], w.shape[2:], attributes)
        rank, (images, channels), outputs = windows.rank, x.shape[:2], w.shape[0]
        if channels != w.shape[1] * group or outputs % group:
            raise ValueError(f"{channels} channels, a weight of shape {w.shape} and {group} groups do not fit together")
        seen = windows.view(wide(x), 0).reshape(images, group, channels // group, *windows.counts, *windows.kernel)
        # [group, images and windows, channels and kernel] times [group, channels and kernel, outputs]
        rows = np.moveaxis(seen, (1, 2), (0, rank + 2)).reshape(group, -1, w[0].size)
        columns = wide(w).reshape(group, outputs // group, -1).transpose(0, 2, 1)
        y = (rows @ columns).reshape(group, images, *windows.counts, outputs // group)
        y = np.moveaxis(y, (0, -1), (1, 2)).reshape(images, outputs, *windows.counts)
        return (_biased(y, bias).astype(x.dtype),)


class ConvTranspose(Operator):
    """Each element of the data times the weight, added where the windows of the convolution lie that this one transposes."""

    def _run(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, group: int = 1, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        kernel, (images, channels), sizes = w.shape[2:], x.shape[:2], x.shape[2:]
        rank, outputs = len(kernel), w.shape[1] * group
        if channels != w.shape[0] or channels % group:
            raise ValueError(f"{channels} channels, a weight of shape {w.shape} and {group} groups do not fit together")
        strides, dilations = (listed(attributes.get(name), 1, rank) for name in ("strides", "dilations"))
        padding = listed(attributes.get("output_padding"), 0, rank)
        spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
        full = [(sizes[axis] - 1) * strides[axis] + spans[axis] + padding[axis] for axis in range(rank)]
        data = wide(x).reshape(images, group, channels // group, -1)
        weight = wide(w).reshape(group, channels // group, outputs // group, *kernel)
        y = np.zeros((images, outputs, *full), data.dtype)
        for tap in np.ndindex(*kernel):
            product = np.swapaxes(weight[(slice(None),) * 3 + tap], 1, 2) @ data
            places = [
                slice(first := place * dilation, first + (size - 1) * stride + 1, stride)
                for place, dilation, size, stride in zip(tap, dilations, sizes, strides, strict=True)
            ]
            y[(slice(None), slice(None), *places)] += product.reshape(images, outputs, *sizes)
        begin, end = _crops(full, sizes, strides, rank, attributes)
        kept = [slice(begin[axis], full[axis] - end[axis]) for axis in range(rank)]
        return (_biased(y[(slice(None), slice(None), *kept)], bias).astype(x.dtype),)


def _crops(
    full: list[int], sizes: tuple[int, ...], strides: list[int], rank: int, attributes: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """How much of the whole sum is taken away before and behind it."""
    mode, wanted = attributes.get("auto_pad") or "NOTSET", attributes.get("output_shape")
    if wanted is None and mode == "VALID":
        return [0] * rank, [0] * rank
    if wanted is None and mode == "NOTSET":
        pads = listed(attributes.get("pads"), 0, 2 * rank)
        return pads[:rank], pads[rank:]
    target = [sizes[axis] * strides[axis] for axis in range(rank)] if wanted is None else list(wanted)[-rank:]
    totals = [extent - number for extent, number in zip(full, target, strict=True)]
    if min(totals) < 0:
        raise ValueError(f"the output shape {target} is larger than what the windows reach, {full}")
    begin, end = split_padding(totals, more_at_end=mode == "SAME_UPPER")
    return list(begin), list(end)


def _biased(y: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return y if bias is None else y + per_channel(wide(bias), y.ndim)


class MaxPool(Operator):
    """The first largest element of each window, and where it lies in the whole of the data."""

    def _run(self, x: np.ndarray, kernel_shape: list[int], storage_order: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        lowest = -np.inf if x.dtype.kind not in "iu" else np.iinfo(x.dtype).min
        seen = windows.view(x, lowest)
        flat = seen.reshape(*seen.shape[: 2 + windows.rank], -1)
        first = flat.argmax(axis=-1)
        y = np.take_along_axis(flat, first[..., None], axis=-1)[..., 0]
        if len(self.output) < 2:
            return (y,)
        positions = windows.view(_positions(x.shape, by_column=bool(storage_order)), -1).reshape(flat.shape)
        return y, np.take_along_axis(positions, first[..., None], axis=-1)[..., 0]


class AveragePool(Operator):
    """The mean of what each window counts: elements inside the data, or also inside its pads, but none beyond those."""

    def _run(
        self, x: np.ndarray, kernel_shape: list[int], count_include_pad: int = 0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        total = windows.view(wide(x), 0).sum(axis=tuple(range(-windows.rank, 0)))
        numbers = windows.counted(x.shape[2:], include_pads=bool(count_include_pad))
        return ((total / numbers.astype(total.dtype)).astype(x.dtype),)


class LpPool(Operator):
    """The p-norm of each window."""

    def _run(self, x: np.ndarray, kernel_shape: list[int], p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        windows = Windows.of(x.shape[2:], kernel_shape, attributes)
        powers = windows.view(np.abs(wide(x)) ** p, 0).sum(axis=tuple(range(-windows.rank, 0)))
        return (_root(powers, p).astype(x.dtype),)


class GlobalLpPool(Operator):
    """The p-norm of each channel; the evaluator has none."""

    def _run(self, x: np.ndarray, p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        powers = (np.abs(wide(x)) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
        return (_root(powers, p).astype(x.dtype),)


class GlobalMaxPool(Operator):
    """The largest element of each channel; the evaluator has it for images only."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class MaxUnpool(Operator):
    """Elements at the flat positions that their indices count in the output, as the importer writes it; zero elsewhere."""

    def _run(
        self, x: np.ndarray, indices: np.ndarray, output_shape: np.ndarray | None = None, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        kernel = attributes["kernel_shape"]
        rank = len(kernel)
        strides, pads = listed(attributes.get("strides"), 1, rank), listed(attributes.get("pads"), 0, 2 * rank)
        spatial = [
            (x.shape[axis + 2] - 1) * strides[axis] - pads[axis] - pads[axis + rank] + kernel[axis] for axis in range(rank)
        ]
        shape = [*x.shape[:2], *spatial] if output_shape is None else [int(extent) for extent in output_shape]
        flat = np.zeros(prod(shape), x.dtype)
        flat[indices.reshape(-1)] = x.reshape(-1)
        return (flat.reshape(shape),)


def _root(powers: np.ndarray, p: int) -> np.ndarray:
    if p == 1:
        return powers
    return np.sqrt(powers) if p == 2 else powers ** (1 / p)


def _positions(shape: tuple[int, ...], by_column: bool) -> np.ndarray:
    """The number of each element, in row-major order; or with the last two axes exchanged, in the order of columns."""
    if not by_column or len(shape) < 4:
        return np.arange(prod(shape)).reshape(shape)
    exchanged = (*shape[:-2], shape[-1], shape[-2])
    return np.swapaxes(np.arange(prod(shape)).reshape(exchanged), -1, -2)


class Resize(EvaluatorResize):
    """Where coordinates go from end to end, the length of the resized data is the whole number that it has, not its product with
    the scale."""

    op_domain = ""

    def _run(self, x: np.ndarray, roi: Any = None, scales: Any = None, sizes: Any = None, **attributes: Any) -> Any:  # type: ignore[override]
        by_ends = attributes.get("coordinate_transformation_mode") in ("align_corners", "tf_crop_and_resize")
        if by_ends and scales is not None and len(scales):
            extents = np.array([x.shape[axis] for axis in attributes.get("axes") or range(x.ndim)])
            scales, sizes = None, np.floor(extents.astype(np.float32) * scales).astype(np.int64)
        return super()._run(x, roi, scales, sizes, **attributes)


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

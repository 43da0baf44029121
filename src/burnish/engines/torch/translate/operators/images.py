"""Windows over images: pooling, patches, deformable convolutions, regions of interest, and sampling at grid points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from burnish.engines.torch.translate.rules import Call, explicit_pads, translates
from burnish.operators.pooling import AVERAGE_POOL_GRAD, MAX_POOL_GRAD
from burnish.operators.sampling import GRID_SAMPLE_GRAD

MAX_POOL = {
    1: functional.max_pool1d_with_indices,
    2: functional.max_pool2d_with_indices,
    3: functional.max_pool3d_with_indices,
}
AVERAGE_POOL: dict[int, Any] = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}
CONVOLUTION: dict[int, Any] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED: dict[int, Any] = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def _window(op: Call) -> tuple[list[int], list[int], list[int], list[Any]]:
    kernel = list(op.attribute("kernel_shape"))
    strides = list(op.attribute("strides", [1] * len(kernel)))
    dilations = list(op.attribute("dilations", [1] * len(kernel)))
    pads = list(op.attribute("pads", [0] * (2 * len(kernel))))
    return kernel, strides, dilations, explicit_pads(op, kernel, strides, dilations, pads)


def _amounts(pads: list[Any]) -> list[Any]:
    rank = len(pads) // 2
    return [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[axis + rank])]


def _fits(kernel: list[int], pads: list[Any]) -> bool:
    """True if PyTorch supports these pads: symmetric, and at most half a window."""
    rank = len(kernel)
    return pads[:rank] == pads[rank:] and all(2 * pad <= size for pad, size in zip(pads[:rank], kernel, strict=True))


def _with_ceiling(op: Call, kernel: list[int], strides: list[int], dilations: list[int], pads: list[Any]) -> list[Any]:
    """Return the pads, extended to the last windows of a rounded-up output size; windows start inside x or its pads."""
    if not op.attribute("ceil_mode", 0):
        return pads
    rank, pads = len(kernel), list(pads)
    for axis, extent in enumerate(op.known_extents()[2:]):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        steps = math.ceil((extent + pads[axis] + pads[axis + rank] - reach) / strides[axis])
        if steps * strides[axis] >= extent + pads[axis]:
            steps -= 1
        pads[axis + rank] = max(steps * strides[axis] + reach - extent - pads[axis], 0)
    return pads


@translates("MaxPool")
def max_pool(op: Call) -> Any:
    kernel, strides, dilations, pads = _window(op)
    rank = len(kernel)
    x = op.tensor() if op.dtype(0).is_floating_point() else op.tensor().to(torch.float32)
    if _fits(kernel, pads):
        pooled = MAX_POOL[rank](x, kernel, strides, pads[:rank], dilations, bool(op.attribute("ceil_mode", 0)))
        values, indices = pooled[0], pooled[1]
        padded = None
    else:
        padded = _with_ceiling(op, kernel, strides, dilations, pads)
        pooled = MAX_POOL[rank](
            functional.pad(x, _amounts(padded), value=float("-inf")), kernel, strides, [0] * rank, dilations, False
        )
        values, indices = pooled[0], pooled[1]
    values = values if op.dtype(0).is_floating_point() else values.to(op.torch_dtype(0))
    return values, _flat_positions(op, indices, padded) if op.is_read(1) else None


def _flat_positions(op: Call, indices: Any, padded: list[Any] | None) -> Any:
    """PyTorch counts within one image (here with its pads), ONNX over the whole tensor without pads."""
    batch, channels, *spatial = op.extents()
    rank = len(spatial)
    by_column = bool(op.attribute("storage_order", 0))
    if padded is not None or by_column:
        around = padded or [0] * (2 * rank)
        places: list[Any] = []
        rest = indices
        for axis in reversed(range(rank)):
            width = spatial[axis] + around[axis] + around[axis + rank]
            places.insert(0, torch.remainder(rest, width) - around[axis])
            rest = torch.div(rest, width, rounding_mode="floor")
        order = list(range(rank))
        if by_column:
            order[-2:] = reversed(order[-2:])
        indices = places[order[0]]
        for axis in order[1:]:
            indices = indices * spatial[axis] + places[axis]
    area: Any = 1
    for extent in spatial:
        area = extent * area
    images = torch.reshape(torch.arange(batch * channels, device=op.device), [batch, channels, *[1] * rank])
    return indices + images * area


@translates(MAX_POOL_GRAD)
def max_pool_gradient(op: Call) -> Any:
    """dy is added at the position of its maximum; indices are flat over the whole of x."""
    flat = torch.zeros([torch.numel(op.tensor(2))], dtype=op.torch_dtype(0), device=op.device)
    total = torch.index_add(flat, 0, torch.reshape(op.tensor(1), [-1]), torch.reshape(op.tensor(0), [-1]))
    return torch.reshape(total, op.extents(2))


@translates("MaxUnpool")
def max_unpool(op: Call) -> Any:
    """Elements return to their flat positions in the output."""
    kernel = op.attribute("kernel_shape")
    rank = len(kernel)
    strides, pads = op.attribute("strides", [1] * rank), op.attribute("pads", [0] * (2 * rank))
    extents = op.extents()
    natural = [(extents[axis + 2] - 1) * strides[axis] - pads[axis] - pads[axis + rank] + kernel[axis] for axis in range(rank)]
    shape = op.integers(2) if op.has(2) else [extents[0], extents[1], *natural]
    count: Any = 1
    for extent in shape:
        count = extent * count
    flat = torch.zeros([count], dtype=op.torch_dtype(0), device=op.device)
    placed = torch.scatter(flat, 0, torch.reshape(op.tensor(1), [-1]), torch.reshape(op.tensor(0), [-1]))
    return torch.reshape(placed, list(shape))


@translates("AveragePool")
def average_pool(op: Call) -> Any:
    kernel, strides, dilations, pads = _window(op)
    rank, counts_pads = len(kernel), bool(op.attribute("count_include_pad", 0))
    x, ceil = op.tensor(), bool(op.attribute("ceil_mode", 0))
    if _fits(kernel, pads) and all(dilation == 1 for dilation in dilations):
        return AVERAGE_POOL[rank](x, kernel, strides, pads[:rank], ceil, counts_pads)
    reached = _with_ceiling(op, kernel, strides, dilations, pads)
    total = _window_sums(op, functional.pad(x, _amounts(reached)), kernel, strides, dilations)
    extents = op.extents()[2:]
    outputs = [
        (extent + reached[axis] + reached[axis + rank] - (kernel[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1
        for axis, extent in enumerate(extents)
    ]
    return total / _counts(op, outputs, extents, kernel, strides, dilations, pads, counts_pads)


def _counts(
    op: Call,
    outputs: list[Any],
    extents: list[Any],
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    pads: list[Any],
    counts_pads: bool,
) -> Any:
    """Return the number of counted elements of each window: those inside x, or inside its pads too, but none beyond."""
    rank, result = len(kernel), None
    for axis in range(rank):
        begin, end = pads[axis], pads[axis + rank]
        first = torch.unsqueeze(torch.arange(outputs[axis], device=op.device) * strides[axis] - begin, 1)
        places = first + torch.arange(kernel[axis], device=op.device) * dilations[axis]
        lowest, highest = (-begin, extents[axis] + end) if counts_pads else (0, extents[axis])
        inside = torch.logical_and(places >= lowest, places < highest)
        along = torch.reshape(torch.sum(inside, 1), [-1, *[1] * (rank - 1 - axis)])
        result = along if result is None else result * along
    assert result is not None
    return result.to(op.torch_dtype(0))


def _window_sums(op: Call, x: Any, kernel: list[int], strides: list[int], dilations: list[int]) -> Any:
    """Return sums over windows: a convolution with ones, in which each channel is a separate image."""
    rank = len(kernel)
    batch, channels = op.extents()[:2]
    ones = torch.ones([1, 1, *kernel], dtype=op.torch_dtype(0), device=op.device)
    images = torch.flatten(x, 0, 1)
    sums = CONVOLUTION[rank](torch.unsqueeze(images, 1), ones, None, strides, [0] * rank, dilations)
    return torch.unflatten(torch.squeeze(sums, 1), 0, [batch, channels])


@translates(AVERAGE_POOL_GRAD)
def average_pool_gradient(op: Call) -> Any:
    """Translate (dy, x) -> dx; only the shape of x is read."""
    kernel, strides, dilations, pads = _window(op)
    rank, counts_pads, ceil = len(kernel), bool(op.attribute("count_include_pad", 0)), bool(op.attribute("ceil_mode", 0))
    dy, x = op.tensor(0), op.tensor(1)
    if _fits(kernel, pads) and all(dilation == 1 for dilation in dilations):
        if rank == 1:  # ATen only has the gradient for images: use one row
            windows = [1, *kernel], [1, *strides], [0, pads[0]]
            dy, x = torch.unsqueeze(dy, 2), torch.unsqueeze(x, 2)
            return torch.squeeze(torch.ops.aten.avg_pool2d_backward.default(dy, x, *windows, ceil, counts_pads, None), 2)
        backward = {
            2: torch.ops.aten.avg_pool2d_backward.default,
            3: torch.ops.aten.avg_pool3d_backward.default,
        }[rank]
        return backward(dy, x, kernel, strides, pads[:rank], ceil, counts_pads, None)
    outputs, extents = op.extents(0)[2:], op.extents(1)[2:]
    reached = list(pads)
    for axis in range(rank):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        whole = (outputs[axis] - 1) * strides[axis] + reach
        reached[axis + rank] = whole - extents[axis] - pads[axis]
    share = dy / _counts(op, outputs, extents, kernel, strides, dilations, pads, counts_pads)
    ones = torch.ones([1, 1, *kernel], dtype=op.torch_dtype(0), device=op.device)
    images = torch.unsqueeze(torch.flatten(share, 0, 1), 1)
    spread = TRANSPOSED[rank](images, ones, None, strides, [0] * rank, [0] * rank, 1, dilations)
    spread = functional.pad(spread, [-amount for amount in _amounts(reached)])
    return torch.reshape(spread, op.extents(1))


@translates("LpPool")
def power_pool(op: Call) -> Any:
    """The p-norm over each window: (sum |x|^p)^(1/p); elements beyond x count as zero."""
    kernel, strides, dilations, pads = _window(op)
    power = op.attribute("p", 2)
    padded = functional.pad(_powers(op, power), _amounts(_with_ceiling(op, kernel, strides, dilations, pads)))
    return _root(_window_sums(op, padded, kernel, strides, dilations), power)


@translates("GlobalLpPool")
def global_power_pool(op: Call) -> Any:
    power = op.attribute("p", 2)
    return _root(torch.sum(_powers(op, power), list(range(2, op.rank())), keepdim=True), power)


def _powers(op: Call, power: int) -> Any:
    x = op.tensor()
    return torch.abs(x) if power == 1 else x * x if power == 2 else torch.pow(torch.abs(x), power)


def _root(total: Any, power: int) -> Any:
    return total if power == 1 else torch.sqrt(total) if power == 2 else torch.pow(total, 1 / power)


@translates("GlobalAveragePool")
def global_average_pool(op: Call) -> Any:
    return torch.mean(op.tensor(), list(range(2, op.rank())), keepdim=True)


@translates("GlobalMaxPool")
def global_max_pool(op: Call) -> Any:
    return torch.amax(op.tensor(), list(range(2, op.rank())), keepdim=True)


@translates("Col2Im")
def columns_to_image(op: Call) -> Any:
    """Blocks are added up in the padded image, which is then cropped."""
    image, block = op.known_integers(1, ()), op.known_integers(2, ())
    axes = len(image)
    strides, dilations = (op.attribute(name, [1] * axes) for name in ("strides", "dilations"))
    pads = op.attribute("pads", [0] * 2 * axes)
    padded = [image[axis] + pads[axis] + pads[axes + axis] for axis in range(axes)]
    # Positions per axis [block, blocks]; together [block, ..., blocks, ...], like the columns.
    places: Any = 0
    terms = math.prod(block)
    for axis in range(axes):
        blocks = (padded[axis] - (block[axis] - 1) * dilations[axis] - 1) // strides[axis] + 1
        terms *= blocks
        inside = torch.reshape(torch.arange(block[axis], device=op.device) * dilations[axis], [-1, 1])
        along = inside + torch.arange(blocks, device=op.device) * strides[axis]
        shape = [1] * 2 * axes
        shape[axis], shape[axes + axis] = block[axis], blocks
        places = places + torch.reshape(along * math.prod(padded[axis + 1 :]), shape)
    batch, elements, _ = op.extents()
    channels = elements // math.prod(block)
    flat = torch.zeros([batch, channels, math.prod(padded)], dtype=op.torch_dtype(0), device=op.device)
    columns = torch.reshape(op.tensor(0), [batch, channels, terms])
    total = torch.index_add(flat, 2, torch.reshape(places, [-1]), columns)
    images = torch.reshape(total, [batch, channels, *padded])
    for axis in range(axes):
        images = torch.narrow(images, 2 + axis, pads[axis], image[axis])
    return images


@translates("RoiAlign", since=16)
def roi_align(op: Call) -> Any:
    """The weighted average of all points of a bin; with the mode max, the largest product of an element and its weight.

    Raises:
        NotKnownYet: the number of points depends on the regions' sizes, which are computed at run time.
    """
    images, (_, channels, height, width) = op.tensor(0), op.extents()
    vertical, horizontal = _Side(op, 0, height), _Side(op, 1, width)
    first = torch.reshape(op.tensor(2).to(torch.int64) * (height * width), [-1, *[1] * 6])
    places = first + vertical.places * width + horizontal.places
    weights = torch.unsqueeze(vertical.weights * horizontal.weights, -1)
    rows = torch.reshape(torch.permute(images, [0, 2, 3, 1]), [-1, channels])
    read = torch.reshape(torch.index_select(rows, 0, torch.reshape(places, [-1])), [*places.shape, channels])
    products = weights * read
    if op.attribute("mode", "avg") == "max":
        if vertical.mask is not None:
            counted = torch.unsqueeze(vertical.mask * horizontal.mask, -1)
            products = torch.where(counted, products, float("-inf"))
        largest = torch.amax(products, [3, 4, 5, 6])
        pooled = torch.where(torch.isinf(largest), 0.0, largest) if vertical.mask is not None else largest
    else:
        pooled = torch.sum(products, [3, 4, 5, 6])
    return torch.permute(pooled, [0, 3, 1, 2])


class _Side:
    """The points of all regions' bins along one axis: places, weights and mask.

    They broadcast with ``[R, bins, bins, points, points, taps, taps]``.
    """

    def __init__(self, op: Call, axis: int, size: Any):
        bins = op.attribute(("output_height", "output_width")[axis], 1)
        scale, ratio = op.attribute("spatial_scale", 1.0), op.attribute("sampling_ratio", 0)
        half_pixel = op.attribute("coordinate_transformation_mode", "half_pixel") == "half_pixel"
        offset = 0.5 if half_pixel else 0.0
        start, end = (
            torch.reshape(torch.select(op.tensor(1), 1, column), [-1, 1, 1]) * scale - offset for column in (1 - axis, 3 - axis)
        )
        length = end - start if half_pixel else torch.clamp_min(end - start, 1.0)
        bin_length = length / bins
        self.mask: Any = None
        if ratio > 0:
            number: Any = ratio
            points = torch.arange(ratio, device=op.device)
        else:
            number = torch.ceil(bin_length)
            points = torch.arange(_most_points(op, axis, bins, scale, offset), device=op.device)
            self.mask = self._arranged(torch.reshape(points, [1, 1, -1]) < number, axis)
            number = torch.clamp_min(number, 1.0)
        points = torch.reshape(points, [1, 1, -1])
        steps = torch.reshape(torch.arange(bins, device=op.device), [1, -1, 1])
        position = start + steps * bin_length + (points + 0.5) * bin_length / number
        counted = torch.logical_and(position >= -1.0, position <= size)
        if self.mask is not None:
            counted = torch.logical_and(counted, points < torch.ceil(bin_length))
        position = torch.clamp(position, 0.0, size - 1)
        base = torch.floor(position)
        fraction = torch.where(counted, position - base, 0.0)
        before = torch.where(counted, 1.0 - (position - base), 0.0)
        weights = torch.stack([before, fraction], -1)
        if op.attribute("mode", "avg") != "max":
            weights = weights / (number if ratio > 0 else torch.unsqueeze(number, -1))
        places = base.to(torch.int64)
        self.places = self._arranged(torch.stack([places, torch.clamp_max(places + 1, size - 1)], -1), axis)
        self.weights = self._arranged(weights, axis)

    def _arranged(self, tensor: Any, axis: int) -> Any:
        """Return ``[R, bins, points, taps]``, or a tensor without taps, with ones at the other side's axes."""
        if tensor.ndim == 3:
            tensor = torch.unsqueeze(tensor, -1)
        for place in (2, 4, 6) if axis == 0 else (1, 3, 5):
            tensor = torch.unsqueeze(tensor, place)
        return tensor


def _most_points(op: Call, axis: int, bins: int, scale: float, offset: float) -> int:
    rois = op.known_array(1)
    kind = rois.dtype.type
    start, end = (rois[:, column] * kind(scale) - kind(offset) for column in (1 - axis, 3 - axis))
    lengths = end - start if offset else np.maximum(end - start, kind(1))
    return max(int(np.ceil(lengths / kind(bins)).max(initial=1)), 1)


@translates("MaxRoiPool")
def max_roi_pool(op: Call) -> Any:
    """The largest element of each bin of each region; zero for an empty bin."""
    _, _, *spatial = op.extents()
    x = torch.index_select(op.tensor(0), 0, torch.select(op.tensor(1), 1, 0).to(torch.int64))
    rows, columns = (_in_bins(op, axis, spatial[axis]) for axis in range(2))
    by_row = torch.where(columns[:, None, None], torch.unsqueeze(x, 3), float("-inf"))
    by_bin = torch.where(rows[:, None, :, :, None], torch.unsqueeze(torch.amax(by_row, 4), 2), float("-inf"))
    is_empty = torch.logical_not(torch.logical_and(rows.any(2)[:, None, :, None], columns.any(2)[:, None, None, :]))
    return torch.where(is_empty, 0.0, torch.amax(by_bin, 3))


def _in_bins(op: Call, axis: int, size: Any) -> Any:
    """Return a mask that is true if an element along an axis belongs to a bin of a region: ``[R, bins, extent]``."""
    bins, scale = op.attribute("pooled_shape")[axis], op.attribute("spatial_scale", 1.0)
    start, end = (torch.reshape(torch.select(op.tensor(1), 1, column), [-1, 1, 1]) * scale for column in (2 - axis, 4 - axis))
    start, end = (torch.floor(torch.abs(corner) + 0.5) * torch.sign(corner) for corner in (start, end))
    length = torch.clamp_min(end - start + 1, 1.0) / bins
    numbers = torch.reshape(torch.arange(bins, device=op.device), [1, -1, 1])
    places = torch.arange(size, device=op.device)
    begins, ends = torch.floor(numbers * length) + start, torch.ceil((numbers + 1) * length) + start
    return torch.logical_and(places >= begins, places < ends)


LINEAR, ZEROS = 0, 0
"""ATen's numbers for linear interpolation and zero padding."""


@translates("DeformConv")
def deformable_convolution(op: Call) -> Any:
    """Columns are sampled at the points with the kernel of GridSample, and multiplied by the weights."""
    images, channels, *spatial = op.extents()
    out_channels, _, *kernel = op.known_extents(1)
    if len(spatial) != 2:
        raise op.unsupported("its data are no images")
    groups, offset_groups = op.attribute("group", 1), op.attribute("offset_group", 1)
    output = op.extents(2)[2:]
    moves = torch.reshape(op.tensor(2), [images * offset_groups, *kernel, 2, *output])
    # ATen counts from -1 to 1 over the whole width of an image's elements, horizontally first.
    columns = [(_positions(op, moves, axis, kernel, output) * 2 + 1) / spatial[axis] - 1 for axis in (1, 0)]
    points = torch.reshape(torch.stack(columns, -1), [images * offset_groups, -1, output[1], 2])
    data = torch.reshape(op.tensor(0), [images * offset_groups, channels // offset_groups, *spatial])
    read: Any = torch.ops.aten.grid_sampler_2d.default(data, points, LINEAR, ZEROS, False)
    if op.has(4):
        read = read * torch.reshape(op.tensor(4), [images * offset_groups, 1, -1, output[1]])
    read = torch.reshape(read, [images, groups, -1, output[0] * output[1]])
    weights = torch.reshape(op.tensor(1), [groups, out_channels // groups, -1])
    y = torch.reshape(torch.matmul(weights, read), [images, out_channels, *output])
    return y + torch.reshape(op.tensor(3), [-1, 1, 1]) if op.has(3) else y


def _positions(op: Call, moves: Any, axis: int, kernel: list[int], output: list[Any]) -> Any:
    """Return the positions of the points along an axis, ``[N * offset groups, kernel, outputs]``."""
    strides, dilations = op.attribute("strides", [1, 1]), op.attribute("dilations", [1, 1])
    inside = torch.arange(kernel[axis], device=op.device) * dilations[axis] - op.attribute("pads", [0] * 4)[axis]
    starts = torch.arange(output[axis], device=op.device) * strides[axis]
    inside = torch.reshape(inside, [-1, 1, 1, 1] if axis == 0 else [1, -1, 1, 1])
    starts = torch.reshape(starts, [1, 1, -1, 1] if axis == 0 else [1, 1, 1, -1])
    return torch.select(moves, 3, axis) + (inside + starts)


MODES = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}
IMAGE, VOLUME = 4, 5


def _sampling(op: Call, rank: int) -> tuple[int, int, bool]:
    mode = MODES[op.attribute("mode", "linear")]
    if rank not in (IMAGE, VOLUME) or (rank == VOLUME and mode == MODES["cubic"]):
        raise op.unsupported("it samples data of another rank, or volumes by cubic interpolation")
    return mode, PADDINGS[op.attribute("padding_mode", "zeros")], bool(op.attribute("align_corners", 0))


@translates("GridSample")
def grid_sample(op: Call) -> Any:
    rank = op.rank()
    sampler: Any = torch.ops.aten.grid_sampler_2d if rank == IMAGE else torch.ops.aten.grid_sampler_3d
    return sampler.default(op.tensor(0), op.tensor(1).to(op.torch_dtype(0)), *_sampling(op, rank))


@translates(GRID_SAMPLE_GRAD)
def grid_sample_gradient(op: Call) -> Any:
    """Translate (dy, x, grid) -> dx, dgrid."""
    rank, dtype = op.rank(1), op.torch_dtype(1)
    backward: Any = torch.ops.aten.grid_sampler_2d_backward if rank == IMAGE else torch.ops.aten.grid_sampler_3d_backward
    tensors = op.tensor(0), op.tensor(1), op.tensor(2).to(dtype)
    asked_for = [op.is_read(0), op.is_read(1)]
    dx, dgrid = backward.default(*tensors, *_sampling(op, rank), asked_for)[:2]
    return (dx if asked_for[0] else None), (dgrid.to(op.torch_dtype(2)) if asked_for[1] else None)


@translates("AffineGrid")
def affine_grid(op: Call) -> Any:
    return torch.ops.aten.affine_grid_generator.default(op.tensor(0), op.integers(1), bool(op.attribute("align_corners", 0)))

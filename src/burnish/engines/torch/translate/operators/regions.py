"""Pooling over regions of interest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from burnish.engines.torch.translate.rules import Call, translates


@translates("RoiAlign", since=16)
def roi_align(op: Call) -> Any:
    """The taps of all points of a bin, averaged by their weights; with the mode max the largest product of a tap and its weight.

    Raises:
        NotKnownYet: the number of points goes by the regions' sizes, which are computed when the graph runs.
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
    """The points of all regions' bins along one axis: places, weights and mask that broadcast with
    ``[R, bins, bins, points, points, taps, taps]``."""

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
        """``[R, bins, points, taps]``, or one without taps, with ones at the other side's axes."""
        if tensor.ndim == 3:
            tensor = torch.unsqueeze(tensor, -1)
        for place in (2, 4, 6) if axis == 0 else (1, 3, 5):
            tensor = torch.unsqueeze(tensor, place)
        return tensor


def _most_points(op: Call, axis: int, bins: int, scale: float, offset: float) -> int:
    """How many points a bin has at most along an axis."""
    rois = op.known_array(1)
    kind = rois.dtype.type
    start, end = (rois[:, column] * kind(scale) - kind(offset) for column in (1 - axis, 3 - axis))
    lengths = end - start if offset else np.maximum(end - start, kind(1))
    return max(int(np.ceil(lengths / kind(bins)).max(initial=1)), 1)


@translates("MaxRoiPool")
def max_roi_pool(op: Call) -> Any:
    """The largest element of each bin of each region; zero where a bin has none."""
    _, _, *spatial = op.extents()
    x = torch.index_select(op.tensor(0), 0, torch.select(op.tensor(1), 1, 0).to(torch.int64))
    rows, columns = (_in_bins(op, axis, spatial[axis]) for axis in range(2))
    by_row = torch.where(columns[:, None, None], torch.unsqueeze(x, 3), float("-inf"))
    by_bin = torch.where(rows[:, None, :, :, None], torch.unsqueeze(torch.amax(by_row, 4), 2), float("-inf"))
    is_empty = torch.logical_not(torch.logical_and(rows.any(2)[:, None, :, None], columns.any(2)[:, None, None, :]))
    return torch.where(is_empty, 0.0, torch.amax(by_bin, 3))


def _in_bins(op: Call, axis: int, size: Any) -> Any:
    """Whether an element along an axis belongs to a bin of a region: ``[R, bins, extent]``."""
    bins, scale = op.attribute("pooled_shape")[axis], op.attribute("spatial_scale", 1.0)
    start, end = (torch.reshape(torch.select(op.tensor(1), 1, column), [-1, 1, 1]) * scale for column in (2 - axis, 4 - axis))
    start, end = (torch.floor(torch.abs(corner) + 0.5) * torch.sign(corner) for corner in (start, end))
    length = torch.clamp_min(end - start + 1, 1.0) / bins
    numbers = torch.reshape(torch.arange(bins, device=op.device), [1, -1, 1])
    places = torch.arange(size, device=op.device)
    begins, ends = torch.floor(numbers * length) + start, torch.ceil((numbers + 1) * length) + start
    return torch.logical_and(places >= begins, places < ends)

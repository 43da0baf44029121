"""Convolution over points that are moved by offsets."""

from __future__ import annotations

from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, translates

LINEAR, ZEROS = 0, 0
"""How ATen reads between elements, and outside of them."""


@translates("DeformConv")
def deformable_convolution(op: Call) -> Any:
    """Columns read at the points, by the kernel of GridSample, and their product with the weights."""
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
    """Where the points lie along an axis, ``[N * offset groups, kernel, outputs]``."""
    strides, dilations = op.attribute("strides", [1, 1]), op.attribute("dilations", [1, 1])
    inside = torch.arange(kernel[axis], device=op.device) * dilations[axis] - op.attribute("pads", [0] * 4)[axis]
    starts = torch.arange(output[axis], device=op.device) * strides[axis]
    inside = torch.reshape(inside, [-1, 1, 1, 1] if axis == 0 else [1, -1, 1, 1])
    starts = torch.reshape(starts, [1, 1, -1, 1] if axis == 0 else [1, 1, 1, -1])
    return torch.select(moves, 3, axis) + (inside + starts)

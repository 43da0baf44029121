"""Pooling over windows and over whole images."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from burnish.engines.torch.translate.rules import Call, translates
from burnish.engines.torch.translate.window_padding import explicit_pads
from burnish.operators.pooling import AVERAGE_POOL_GRAD, MAX_POOL_GRAD

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
    """Whether PyTorch pads so itself: evenly, and by half a window at most."""
    rank = len(kernel)
    return pads[:rank] == pads[rank:] and all(2 * pad <= size for pad, size in zip(pads[:rank], kernel, strict=True))


def _with_ceiling(op: Call, kernel: list[int], strides: list[int], dilations: list[int], pads: list[Any]) -> list[Any]:
    """The pads with what the last windows reach over where the output size is rounded up; windows start inside x or its pads."""
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
    """dy is added where its maximum was; indices are flat over the whole of x."""
    flat = torch.zeros([torch.numel(op.tensor(2))], dtype=op.torch_dtype(0), device=op.device)
    total = torch.index_add(flat, 0, torch.reshape(op.tensor(1), [-1]), torch.reshape(op.tensor(0), [-1]))
    return torch.reshape(total, op.extents(2))


@translates("MaxUnpool")
def max_unpool(op: Call) -> Any:
    """Elements go back to their flat places in the output."""
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
    """How many elements each window counts: those inside x, or inside its pads, but never what lies beyond."""
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
    """Sums over windows: a convolution with ones, each channel an image of its own."""
    rank = len(kernel)
    batch, channels = op.extents()[:2]
    ones = torch.ones([1, 1, *kernel], dtype=op.torch_dtype(0), device=op.device)
    images = torch.flatten(x, 0, 1)
    sums = CONVOLUTION[rank](torch.unsqueeze(images, 1), ones, None, strides, [0] * rank, dilations)
    return torch.unflatten(torch.squeeze(sums, 1), 0, [batch, channels])


@translates(AVERAGE_POOL_GRAD)
def average_pool_gradient(op: Call) -> Any:
    """(dy, x) -> dx; of x the shape is read."""
    kernel, strides, dilations, pads = _window(op)
    rank, counts_pads, ceil = len(kernel), bool(op.attribute("count_include_pad", 0)), bool(op.attribute("ceil_mode", 0))
    dy, x = op.tensor(0), op.tensor(1)
    if _fits(kernel, pads) and all(dilation == 1 for dilation in dilations):
        if rank == 1:  # ATen has the gradient of an image of one row
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
    """The p-norm over each window: (sum |x|^p)^(1/p); what lies beyond x counts as zero."""
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

"""Convolution and transposed convolution, in any number of groups and dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np

from burnish.engines.reference.operators.operator import Operator, listed, per_channel, wide
from burnish.engines.reference.operators.windows import Windows
from burnish.graph import split_padding


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

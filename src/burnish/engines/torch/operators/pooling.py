"""Pooling over windows and over whole images."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from burnish.engines.torch.operators.convolution import _explicit_pads
from burnish.engines.torch.translation import Call, translates
from burnish.graph import BURNISH_DOMAIN


def _window(op: Call) -> tuple[list[int], list[int], list[int], list[Any]]:
    kernel = list(op.attribute("kernel_shape"))
    strides = list(op.attribute("strides", [1] * len(kernel)))
    dilations = list(op.attribute("dilations", [1] * len(kernel)))
    pads = list(op.attribute("pads", [0] * (2 * len(kernel))))
    return kernel, strides, dilations, _explicit_pads(op, kernel, strides, dilations, pads)


def _amounts(pads: list[Any]) -> list[Any]:
    rank = len(pads) // 2
    return [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[axis + rank])]


def _fits(kernel: list[int], pads: list[Any]) -> bool:
    """Whether PyTorch pads so itself: evenly, and by half a window at most."""
    rank = len(kernel)
    return pads[:rank] == pads[rank:] and all(2 * pad <= size for pad, size in zip(pads, kernel, strict=False))


@translates("MaxPool")
def max_pool(op: Call) -> Any:
    kernel, strides, dilations, pads = _window(op)
    rank = len(kernel)
    ceil = bool(op.attribute("ceil_mode", 0))
    x = op.tensor()
    if not op.dtype(0).is_floating_point():
        raise op.unsupported("its input holds integers")
    function = {
        1: functional.max_pool1d_with_indices,
        2: functional.max_pool2d_with_indices,
        3: functional.max_pool3d_with_indices,
    }[rank]
    if _fits(kernel, pads):
        pooled = function(x, kernel, strides, pads[:rank], dilations, ceil)
        extents = op.extents()
    elif op.is_read(1):
        raise op.unsupported("it is padded unevenly, or by more than half a window, and its indices are read")
    else:
        padded = functional.pad(x, _amounts(pads), value=float("-inf"))
        return function(padded, kernel, strides, [0] * rank, dilations, ceil)[0], None
    if not op.is_read(1):
        return pooled[0], None
    if op.attribute("storage_order", 0):
        raise op.unsupported("storage_order=1 and its indices are read")
    # PyTorch counts within one image, ONNX over the whole tensor.
    batch, channels, *spatial = extents
    area: Any = 1
    for extent in spatial:
        area = extent * area
    images = torch.reshape(torch.arange(batch * channels, device=op.device), [batch, channels, *[1] * rank])
    return pooled[0], pooled[1] + images * area


@translates("MaxPoolGrad", domain=BURNISH_DOMAIN)
def max_pool_gradient(op: Call) -> Any:
    """dy is added where its maximum was; indices are flat over the whole of x."""
    flat = torch.zeros([torch.numel(op.tensor(2))], dtype=op.torch_dtype(0), device=op.device)
    total = torch.index_add(flat, 0, torch.reshape(op.tensor(1), [-1]), torch.reshape(op.tensor(0), [-1]))
    return torch.reshape(total, op.extents(2))


@translates("AveragePool")
def average_pool(op: Call) -> Any:
    kernel, strides, dilations, pads = _window(op)
    if any(dilation != 1 for dilation in dilations):
        raise op.unsupported("it has dilations")
    rank, counts_pads = len(kernel), bool(op.attribute("count_include_pad", 0))
    ceil = bool(op.attribute("ceil_mode", 0))
    function: Any = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}[rank]
    if _fits(kernel, pads):
        return function(op.tensor(), kernel, strides, pads[:rank], ceil, counts_pads)
    padded = functional.pad(op.tensor(), _amounts(pads))
    total = function(padded, kernel, strides, [0] * rank, ceil, True)
    if counts_pads:
        return total
    ones = functional.pad(torch.ones_like(op.tensor()), _amounts(pads))
    return total / function(ones, kernel, strides, [0] * rank, ceil, True)


@translates("GlobalAveragePool")
def global_average_pool(op: Call) -> Any:
    return torch.mean(op.tensor(), list(range(2, op.rank())), keepdim=True)


@translates("GlobalMaxPool")
def global_max_pool(op: Call) -> Any:
    return torch.amax(op.tensor(), list(range(2, op.rank())), keepdim=True)

"""Normalization layers of the standard, for inference and lowered graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from burnish.engines.torch.translate.rules import Call, translates
from burnish.graph import SIXTEEN_BIT


@translates("BatchNormalization", since=14)
def batch_normalization(op: Call) -> Any:
    x, scale, bias, mean, variance = (op.tensor(index) for index in range(5))
    epsilon = op.attribute("epsilon", 1e-5)
    if not op.attribute("training_mode", 0):
        return _normalized(op, x, scale, bias, mean, variance, epsilon)
    retention = op.attribute("momentum", 0.9)
    axes = [axis for axis in range(op.rank()) if axis != 1]
    if op.communicator is None and op.device.type == "cuda":
        # One pass over x; the mean on its own would be a second.
        variance_of_batch, mean_of_batch = torch.var_mean(x, axes, correction=0)
    elif op.communicator is None:
        mean_of_batch = torch.mean(x, axes)
        variance_of_batch = torch.var_mean(x, axes, correction=0)[0]
    else:
        mean_of_batch = torch.mean(x, axes)
        # A worker may have no samples, and var_mean warns about that for each layer.
        centered = x - torch.mean(x, axes, keepdim=True)
        variance_of_batch = torch.mean(centered * centered, axes)
    y = _normalized(op, x, scale, bias, mean_of_batch, variance_of_batch, epsilon)
    return (
        y,
        mean * retention + mean_of_batch * (1 - retention),
        variance * retention + variance_of_batch * (1 - retention),
    )


def _normalized(op: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, epsilon: float) -> Any:
    if isinstance(op.extents()[1], int):
        return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    # Groups of samples are stored as channels, and a worker without samples has none, which functional.batch_norm refuses. This
    # function checks nothing, and reads beyond a vector that is shorter than the channels: expanding refuses another length.
    channels = [op.extents()[1]]
    scale, bias, mean, variance = (vector.expand(channels) for vector in (scale, bias, mean, variance))
    return torch.native_batch_norm(x, scale, bias, mean, variance, False, 0.0, epsilon)[0]


def standardized(x: Any, axes: list[int], epsilon: float) -> tuple[Any, Any, Any]:
    """Return (x - mean) / sqrt(variance + epsilon) over ``axes``, the mean and the inverse deviation.

    PyTorch's layer and group normalization apply x * a + b, which loses digits if the mean is large relative to the deviation.
    Here, the mean is subtracted, and then the remaining mean, which is due to rounding (docs/normalization-accuracy.md).
    """
    mean = torch.mean(x, axes, keepdim=True)
    centered = x - mean
    left = torch.mean(centered, axes, keepdim=True)
    centered = centered - left
    inverse = torch.rsqrt(torch.mean(centered * centered, axes, keepdim=True) + epsilon)
    return centered * inverse, mean + left, inverse


def _staged(op: Call) -> Any:
    """Return the input in the precision of the statistics: single for sixteen bits, by ``stash_type``."""
    x = op.tensor()
    return x.to(torch.float32) if op.dtype(0) in SIXTEEN_BIT and op.attribute("stash_type", 1) == 1 else x


def _per_channel(op: Call, index: int) -> Any:
    return torch.reshape(op.tensor(index), [1, -1, *[1] * (op.rank() - 2)])


@translates("LayerNormalization")
def layer_normalization(op: Call) -> Any:
    axis = op.attribute("axis", -1) % op.rank()
    normalized, mean, inverse = standardized(_staged(op), list(range(axis, op.rank())), op.attribute("epsilon", 1e-5))
    y = normalized.to(op.torch_dtype(0)) * op.tensor(1)
    return y + op.tensor(2) if op.has(2) else y, mean, inverse


@translates("RMSNormalization")
def root_mean_square_normalization(op: Call) -> Any:
    axis = op.attribute("axis", -1) % op.rank()
    x = _staged(op)
    square = torch.mean(x * x, list(range(axis, op.rank())), keepdim=True)
    return (x * torch.rsqrt(square + op.attribute("epsilon", 1e-5))).to(op.torch_dtype(0)) * op.tensor(1)


@translates("GroupNormalization", since=18)
def group_normalization(op: Call) -> Any:
    """Scale and bias hold one value per channel, before version 21 one per group."""
    x, groups, rank = _staged(op), op.attribute("num_groups"), op.rank()
    extents = op.extents()
    grouped = torch.reshape(x, [extents[0], groups, -1])
    normalized, _, _ = standardized(grouped, [2], op.attribute("epsilon", 1e-5))
    if op.opset < 21:
        y = normalized.to(op.torch_dtype(0)) * torch.reshape(op.tensor(1), [1, -1, 1]) + torch.reshape(op.tensor(2), [1, -1, 1])
        return torch.reshape(y, extents)
    y = torch.reshape(normalized.to(op.torch_dtype(0)), extents)
    assert rank == len(extents)
    return y * _per_channel(op, 1) + _per_channel(op, 2)


@translates("InstanceNormalization")
def instance_normalization(op: Call) -> Any:
    normalized, _, _ = standardized(_staged(op), list(range(2, op.rank())), op.attribute("epsilon", 1e-5))
    return normalized.to(op.torch_dtype(0)) * _per_channel(op, 1) + _per_channel(op, 2)


@translates("MeanVarianceNormalization")
def mean_variance_normalization(op: Call) -> Any:
    """(x - mean) / (deviation + 1e-9)."""
    x, axes = op.tensor(), list(op.attribute("axes", [0, 2, 3]))
    centered = x - torch.mean(x, axes, keepdim=True)
    centered = centered - torch.mean(centered, axes, keepdim=True)
    return centered / (torch.sqrt(torch.mean(centered * centered, axes, keepdim=True)) + 1e-9)


@translates("LpNormalization")
def power_normalization(op: Call) -> Any:
    """Divides x by its norm along one axis; zero if the norm is zero."""
    x, axis = op.tensor(), op.attribute("axis", -1)
    if op.attribute("p", 2) == 1:
        norm = torch.sum(torch.abs(x), axis, keepdim=True)
    else:
        norm = torch.sqrt(torch.sum(x * x, axis, keepdim=True))
    return torch.where(norm == 0, torch.zeros_like(x), x / norm)


@translates("LRN")
def local_response_normalization(op: Call) -> Any:
    """x / (bias + alpha / size * sum of squares over neighbouring channels) ^ beta; an even window has one more at its end."""
    x, size = op.tensor(), op.attribute("size")
    before = (size - 1) // 2
    squares = functional.pad(x * x, [*[0, 0] * (op.rank() - 2), before, size - 1 - before])
    channels = op.extents()[1]
    total: Any = None
    for shift in range(size):
        part = torch.narrow(squares, 1, shift, channels)
        total = part if total is None else total + part
    scale = op.attribute("bias", 1.0) + op.attribute("alpha", 1e-4) / size * total
    return x * torch.pow(scale, -op.attribute("beta", 0.75))

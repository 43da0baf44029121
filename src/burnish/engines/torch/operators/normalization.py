"""Normalization layers of the standard, as inference and lowered graphs use them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from burnish.engines.torch.translation import Call, translates


@translates("BatchNormalization", since=14)
def batch_normalization(op: Call) -> Any:
    x, scale, bias, mean, variance = (op.tensor(index) for index in range(5))
    epsilon = op.attribute("epsilon", 1e-5)
    if not op.attribute("training_mode", 0):
        return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    retention = op.attribute("momentum", 0.9)
    axes = [axis for axis in range(op.rank()) if axis != 1]
    variance_of_batch, mean_of_batch = torch.var_mean(x, axes, correction=0)[0], torch.mean(x, axes)
    y = functional.batch_norm(x, mean_of_batch, variance_of_batch, scale, bias, False, 0.0, epsilon)
    return (
        y,
        mean * retention + mean_of_batch * (1 - retention),
        variance * retention + variance_of_batch * (1 - retention),
    )


@translates("LayerNormalization")
def layer_normalization(op: Call) -> Any:
    axis = op.attribute("axis", -1) % op.rank()
    extents = op.extents()[axis:]
    bias = op.optional(2)
    normalized = torch.ops.aten.native_layer_norm.default(
        op.tensor(0),
        extents,
        torch.broadcast_to(op.tensor(1), extents),
        None if bias is None else torch.broadcast_to(bias, extents),
        op.attribute("epsilon", 1e-5),
    )
    return normalized[0], normalized[1], normalized[2]


@translates("InstanceNormalization")
def instance_normalization(op: Call) -> Any:
    return functional.instance_norm(
        op.tensor(0), weight=op.tensor(1), bias=op.tensor(2), use_input_stats=True, eps=op.attribute("epsilon", 1e-5)
    )

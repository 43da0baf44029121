"""ATen operators as ONNX ones, where PyTorch's exporter has none, or one that training needs in another form.

Each function is traced by ``torch.onnx.export`` with the values of an ATen call; ``op`` emits nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset20

aten = torch.ops.aten

op: Any = opset20

OPSET = 20
"""The version of the operators that are emitted here, and that the exporter is asked for."""


def batch_norm(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float) -> Any:
    """Batch normalization with running statistics: the standard's operator, which burnish binds to a mode."""
    channels, dtype = running_mean.shape[0], running_mean.dtype.numpy()
    scale = op.Constant(value=ir.tensor(np.ones(channels, dtype))) if weight is None else weight
    shift = op.Constant(value=ir.tensor(np.zeros(channels, dtype))) if bias is None else bias
    y = op.BatchNormalization(x, scale, shift, running_mean, running_var, epsilon=eps, momentum=1.0 - momentum)
    return y, op.Constant(value=ir.tensor(np.zeros(0, dtype))), op.Constant(value=ir.tensor(np.zeros(0, dtype)))


def batch_norm_without_statistics(x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float) -> Any:
    """Batch normalization by the statistics of the batch in every mode, written out."""
    axes = _integers([axis for axis in range(len(x.shape)) if axis != 1])
    mean = op.ReduceMean(x, axes, keepdims=1)
    centered = op.Sub(x, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    y = op.Div(centered, op.Sqrt(op.Add(variance, op.Constant(value=ir.tensor(np.asarray(eps, x.dtype.numpy()))))))
    per_channel = _integers([-1, *[1] * (len(x.shape) - 2)])
    y = y if weight is None else op.Mul(y, op.Reshape(weight, per_channel))
    return (y if bias is None else op.Add(y, op.Reshape(bias, per_channel))), mean, variance


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten._native_batch_norm_legit.no_stats: batch_norm_without_statistics,
}


def _integers(values: list[int]) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(values, np.int64)))

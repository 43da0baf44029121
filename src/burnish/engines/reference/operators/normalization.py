"""Normalization layers that the evaluator has wrong, or expands into function bodies of float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from burnish.engines.reference.operators.operator import Operator, per_channel, wide


class GroupNormalization(Operator):
    """Of each sample's groups of channels; scale and bias for each channel, or before opset 21 for each group."""

    def _run(
        self, x: np.ndarray, scale: np.ndarray, bias: np.ndarray, num_groups: int, epsilon: float = 1e-5, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        grouped = wide(x).reshape(x.shape[0], num_groups, -1)
        centered = grouped - grouped.mean(axis=2, keepdims=True)
        normalized = centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + epsilon)
        repeats = x.shape[1] // len(scale)
        factors = [per_channel(np.repeat(wide(vector), repeats), x.ndim) for vector in (scale, bias)]
        return ((normalized.reshape(x.shape) * factors[0] + factors[1]).astype(x.dtype),)


class LRN(Operator):
    """Each element over a power of the squares of its neighbours among the channels."""

    def _run(
        self, x: np.ndarray, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        data, channels = wide(x), x.shape[1]
        below, above = (size - 1) // 2, size // 2
        sums = [(data[:, max(0, c - below) : c + above + 1] ** 2).sum(axis=1) for c in range(channels)]
        return ((data / (bias + alpha / size * np.stack(sums, axis=1)) ** beta).astype(x.dtype),)


class LayerNormalization(Operator):
    """Along the last axes; the statistics come in float32 where ``stash_type`` says so, whatever the operands."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        bias: np.ndarray | None = None,
        axis: int = -1,
        epsilon: float = 1e-5,
        stash_type: int = 1,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        data, along = wide(x), tuple(range(axis % x.ndim, x.ndim))
        mean = data.mean(axis=along, keepdims=True)
        inverse_std = 1 / np.sqrt(((data - mean) ** 2).mean(axis=along, keepdims=True) + data.dtype.type(epsilon))
        normalized = ((data - mean) * inverse_std).astype(x.dtype) * scale
        stashed = np.float32 if stash_type == 1 else x.dtype
        return (normalized if bias is None else normalized + bias), mean.astype(stashed), inverse_std.astype(stashed)


class LpNormalization(Operator):
    """Over the norm along an axis; what has a norm of zero stays zero."""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2, **attributes: Any) -> tuple[np.ndarray, ...]:
        data = wide(x)
        norm = np.abs(data).sum(axis=axis, keepdims=True) if p == 1 else np.sqrt((data**2).sum(axis=axis, keepdims=True))
        return (np.divide(data, norm, out=np.zeros_like(data), where=norm != 0).astype(x.dtype),)


class MeanVarianceNormalization(Operator):
    """Over the deviation and 1e-9 more, as the standard's function body says."""

    def _run(self, x: np.ndarray, axes: tuple[int, ...] = (0, 2, 3), **attributes: Any) -> tuple[np.ndarray, ...]:
        data, along = wide(x), tuple(axes)
        centered = data - data.mean(axis=along, keepdims=True)
        return ((centered / (np.sqrt((centered**2).mean(axis=along, keepdims=True)) + 1e-9)).astype(x.dtype),)

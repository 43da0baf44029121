"""Integers that stand for floating-point numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from burnish.engines.reference.operators.operator import Operator


class DequantizeLinear(Operator):
    """The evaluator's own is there from opset 19 on, and computes in float32 whatever the dtype of the scale."""

    def _run(
        self,
        x: np.ndarray,
        scale: np.ndarray,
        zero_point: np.ndarray | None = None,
        axis: int = 1,
        block_size: int = 0,
        output_dtype: int = 0,
        **attributes: Any,
    ) -> tuple[np.ndarray, ...]:
        dtype = tensor_dtype_to_np_dtype(output_dtype) if output_dtype else scale.dtype
        wide = np.float64 if scale.dtype == np.float64 else np.float32
        number = x.astype(wide)
        if zero_point is not None:
            number = number - _placed(zero_point.astype(wide), x.shape, axis, block_size)
        return (np.asarray(number * _placed(scale.astype(wide), x.shape, axis, block_size)).astype(dtype),)


def _placed(numbers: np.ndarray, shape: tuple[int, ...], axis: int, block: int) -> np.ndarray:
    """Scales or zero points in a shape that broadcasts to what they belong to."""
    if numbers.size == 1:
        return numbers.reshape(())
    if block:
        return np.repeat(numbers, block, axis).take(range(shape[axis]), axis)
    along = axis % len(shape)
    return numbers.reshape([-1 if place == along else 1 for place in range(len(shape))])

"""Functions of elements, reductions and attention: activations, the error function, the mean of several operands, integers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype
from onnx.reference.ops.op_attention import Attention_24 as EvaluatorAttention

from burnish.engines.reference.operators.operator import Operator, wide


def erf(x: np.ndarray) -> np.ndarray:
    """The error function, in the dtype of ``x``."""
    exact: np.ndarray = np.vectorize(math.erf, otypes=[np.float64])(x.astype(np.float64))
    return exact.astype(x.dtype)


class Erf(Operator):
    """The evaluator's own gives values of float32."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (erf(x),)


class Gelu(Operator):
    """The evaluator runs the standard's function body, whose constants are of float32."""

    def _run(self, x: np.ndarray, approximate: str = "none", **attributes: Any) -> tuple[np.ndarray, ...]:
        data = wide(x)
        if approximate == "tanh":
            cube = data + 0.044715 * data**3
            return ((0.5 * data * (1 + np.tanh(math.sqrt(2 / math.pi) * cube))).astype(x.dtype),)
        return ((0.5 * data * (1 + erf(data * math.sqrt(0.5)))).astype(x.dtype),)


class HardSwish(Operator):
    """The evaluator runs the standard's function body, whose sixth is of float32."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        data = wide(x)
        return ((data * np.clip(data / 6 + 0.5, 0, 1)).astype(x.dtype),)


class Softsign(Operator):
    """The evaluator's own writes into the result, which a number has no place for."""

    def _run(self, x: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        return (np.asarray(x / (1 + np.abs(x))),)


class Mean(Operator):
    """The evaluator's own adds up in the shape of the first operand."""

    def _run(self, *operands: np.ndarray, **attributes: Any) -> tuple[np.ndarray, ...]:
        total = functools.reduce(np.add, map(wide, operands))
        return (np.asarray(total / total.dtype.type(len(operands))).astype(operands[0].dtype),)


class LogSoftmax(Operator):
    """Without the logarithm of a probability, which may be too small for its dtype."""

    def _run(self, x: np.ndarray, axis: int = -1, **attributes: Any) -> tuple[np.ndarray, ...]:
        if x.size == 0:
            return (x,)
        below = x - x.max(axis=axis, keepdims=True)
        return ((below - np.log(np.exp(below).sum(axis=axis, keepdims=True))).astype(x.dtype),)


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


class ReduceLogSumExp(Operator):
    """The evaluator's own writes into the result, which a number has no place for."""

    def _run(
        self, x: np.ndarray, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        named = [] if axes is None else np.asarray(axes).tolist()
        along = tuple(named) if named or noop_with_empty_axes else tuple(range(x.ndim))
        data = wide(x)
        largest = np.max(data, axis=along, keepdims=True, initial=-np.inf)
        shift = np.where(np.isfinite(largest), largest, 0)
        result = np.log(np.sum(np.exp(data - shift), axis=along, keepdims=True)) + shift
        return (np.asarray(result if keepdims else np.squeeze(result, axis=along), x.dtype),)


WITH_SCORES = 4
"""Outputs of a node that gives its scores, too."""


class Attention(EvaluatorAttention):
    """With a mask that all queries share and causal, and with the scores as they are before the cap, where those are asked for.

    The evaluator's own takes such a mask for that of the first query, and gives capped scores.
    """

    op_domain = ""

    def _run(  # type: ignore[override]
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None = None, *cache: Any, **attributes: Any
    ) -> Any:
        if mask is not None:
            queries = q.shape[-2]
            mask = np.broadcast_to(mask, (*mask.shape[:-2], queries, mask.shape[-1]))
        results = super()._run(q, k, v, mask, *cache, **attributes)
        if len(self.output) < WITH_SCORES or attributes.get("qk_matmul_output_mode") or not attributes.get("softcap"):
            return results
        uncapped = super()._run(q, k, v, mask, *cache, **{**attributes, "softcap": None})
        return (*results[:3], uncapped[3])

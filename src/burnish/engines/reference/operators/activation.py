"""Functions of elements: activations, the error function, the logarithm of softmax, the mean of several operands."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

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

"""Reductions along axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from burnish.engines.reference.operators.operator import Operator, wide


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

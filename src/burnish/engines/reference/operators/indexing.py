"""Gathering, padding, and telling apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.ops.op_pad import Pad_18 as EvaluatorPad

from burnish.engines.reference.operators.operator import Operator


class GatherElements(Operator):
    """With indices of fewer rows or columns than the data, too, and any number of them along the axis."""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:
        along = axis % data.ndim
        seen = tuple(slice(None) if place == along else slice(extent) for place, extent in enumerate(indices.shape))
        return (np.take_along_axis(data[seen], indices, axis=along),)


class Unique(Operator):
    """In the order of their first occurrence along any axis, too, however many outputs the node has."""

    def _run(self, x: np.ndarray, axis: int | None = None, sorted: int = 1, **attributes: Any) -> tuple[np.ndarray, ...]:
        y, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
        inverse = inverse.reshape(-1)
        if not sorted:
            order = np.argsort(first)
            y, first, counts = np.take(y, order, axis=axis or 0), first[order], counts[order]
            inverse = np.argsort(order)[inverse]
        return (y, *(numbers.astype(np.int64) for numbers in (first, inverse, counts)))[: len(self.output)]


class Pad(EvaluatorPad):
    """With negative amounts, too, which take elements away."""

    op_domain = ""

    def _run(self, data: np.ndarray, pads: np.ndarray, *operands: Any, **attributes: Any) -> Any:
        axes = operands[1] if len(operands) > 1 and operands[1] is not None else range(data.ndim)
        begins, ends = pads.reshape(2, -1)
        kept = [slice(None)] * data.ndim
        for axis, begin, end in zip(axes, begins, ends, strict=True):
            kept[axis] = slice(max(-begin, 0), data.shape[axis] - max(-end, 0))
        return super()._run(data[tuple(kept)], np.maximum(pads, 0), *operands, **attributes)  # type: ignore[no-untyped-call]

"""Gathering and padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.ops.op_pad import Pad_18 as EvaluatorPad

from burnish.engines.reference.operators.operator import Operator


class GatherElements(Operator):
    """With indices of fewer rows or columns than the data, too, and any number of them along the axis."""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0, **attributes: Any) -> tuple[np.ndarray, ...]:  # type: ignore[override]
        along = axis % data.ndim
        seen = tuple(slice(None) if place == along else slice(extent) for place, extent in enumerate(indices.shape))
        return (np.take_along_axis(data[seen], indices, axis=along),)


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

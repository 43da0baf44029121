"""What changes over training, computed in the graph from the step counter."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Tensor


def linear(step: Tensor, start: int, end: int, first: float, last: float) -> Tensor:
    """Return ``first`` up to step ``start``, ``last`` from step ``end`` on, and the line between, as a float64 scalar.

    Args:
        step: int64 scalar, the number of updates done before this one.
        start, end: steps, ``start`` before ``end``.
        first, last: the values there.
    """
    builder = step.builder
    done = builder.op("Min", builder.op("Max", step - start, 0), end - start)
    return builder.cast(done, ir.DataType.DOUBLE) * ((last - first) / (end - start)) + first

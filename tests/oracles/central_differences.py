"""Central differences in float64: an oracle that needs nothing but forward evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

STEP = float(np.finfo(np.float64).eps) ** (1 / 3)
"""The step, relative to max(1, |x|), at which truncation (h²/6 f''') and rounding (eps/h f) are of one size: 6e-6."""

TOLERANCE = 1e-6
"""Relative to the norm of the gradient. Both errors are near 4e-11 for functions of order one; the rest is for their
conditioning (large third derivatives, sums that cancel)."""


def central_differences(
    function: Callable[[list[np.ndarray | None]], float], inputs: Sequence[np.ndarray | None], index: int
) -> np.ndarray:
    """Return the gradient of a scalar function with respect to ``inputs[index]``, element by element, in float64.

    Args:
        function: takes all inputs, returns a float.
        inputs: float64 arrays (others are passed through; None for one that is left out).
        index: the input to differentiate by.
    """
    point = inputs[index]
    assert point is not None
    point = np.asarray(point, dtype=np.float64)
    result = np.zeros_like(point)
    for position in np.ndindex(point.shape):
        step = STEP * max(1.0, abs(float(point[position])))
        values = []
        for sign in (1, -1):
            moved = point.copy()
            moved[position] += sign * step
            values.append((float(moved[position]), function([*inputs[:index], moved, *inputs[index + 1 :]])))
        (above, upper), (below, lower) = values
        result[position] = (upper - lower) / (above - below)
    return result

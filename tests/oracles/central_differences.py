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


def directional_problem(
    function: Callable[[list[np.ndarray | None]], float],
    inputs: Sequence[np.ndarray | None],
    index: int,
    gradient: np.ndarray,
    rng: np.random.Generator,
    directions: int = 3,
) -> str:
    """Compare a gradient with central differences along random directions; return what is wrong, or nothing.

    All elements move at once: two evaluations a direction, where the gradient element by element takes two for each element. An
    error e of the gradient shows as the product of e with the direction, which for normal numbers is of the size of e's norm.

    Args:
        function, inputs, index: as for ``central_differences``.
        gradient: with respect to ``inputs[index]``, of its shape.
    """
    point = np.asarray(inputs[index], dtype=np.float64)
    if gradient.shape != point.shape:
        return f"the gradient has shape {gradient.shape}, and the input {point.shape}"
    for _ in range(directions):
        step = STEP * np.maximum(1.0, np.abs(point)) * rng.standard_normal(point.shape)
        above, below = np.asarray(point + step), np.asarray(point - step)
        upper, lower = (function([*inputs[:index], moved, *inputs[index + 1 :]]) for moved in (above, below))
        terms = gradient * (above - below)
        error = abs(upper - lower - terms.sum())
        allowed = TOLERANCE * (np.linalg.norm(terms) + 1e-3 * np.linalg.norm(above - below))
        if not error <= allowed:
            return f"along a direction the function changes by {upper - lower:.9g}, and by the gradient {terms.sum():.9g}"
    return ""

"""How far the states of two sessions that train alike are apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = Mapping[str, np.ndarray]
# A parameter whose gradient is zero but for rounding, such as the bias of keys in attention, moves by noise of this size.
NOISE = 1e-6


def apart(state: Arrays, expected: Arrays, start: Arrays) -> float:
    """The largest distance of an entry from where it should be, as a share of how far it should have moved.

    Args:
        state, expected: entries by name; whole numbers must be equal.
        start: where both began.

    Raises:
        ValueError: entries are missing, have other dtypes, or whole numbers differ.
    """
    if state.keys() != expected.keys():
        raise ValueError(f"the states have other entries: {sorted(state.keys() ^ expected.keys())}")
    worst = 0.0
    for name, array in expected.items():
        if state[name].dtype != array.dtype:
            raise ValueError(f"{name} has dtype {state[name].dtype}, and {array.dtype} is expected")
        if array.dtype.kind in "iub":
            if not np.array_equal(state[name], array):
                raise ValueError(f"{name} is {state[name]}, and {array} is expected")
            continue
        exact, begun = array.astype(np.float64), start[name].astype(np.float64)
        moved = np.linalg.norm(exact - begun) + NOISE * np.sqrt(exact.size)
        worst = max(worst, float(np.linalg.norm(state[name].astype(np.float64) - exact) / moved))
    return worst


def check_apart(state: Arrays, expected: Arrays, start: Arrays, allowed: float, step: int) -> float:
    """Return how far two states are apart after a step.

    Raises:
        ValueError: further than ``allowed``, or as ``apart``.
    """
    distance = apart(state, expected, start)
    if not distance <= allowed:
        raise ValueError(f"after step {step} the states are apart by {distance:.1e} of their way; {allowed:g} is allowed")
    return distance

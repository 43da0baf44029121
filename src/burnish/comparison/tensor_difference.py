"""Differences of arrays, and their tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from burnish.errors import ConfigurationError

SPACINGS = {8: 1000.0, 4: 1000.0, 2: 16.0}
"""Bytes of a floating-point type -> default relative tolerance in units of its spacing at 1. Sums of many products in different
orders stay below it; for 16-bit types it covers a few roundings of intermediate results.
"""


@dataclass(frozen=True)
class Difference:
    """The difference of two arrays.

    Attributes:
        by_norm: Euclidean norm of the difference, relative to the larger norm; for integers and booleans the share of unequal
            entries.
        by_max: largest difference of an entry, relative to the largest entry; for integers 1 if any differs.
        absolute: largest difference of an entry.
    """

    by_norm: float
    by_max: float
    absolute: float

    @property
    def relative(self) -> float:
        """The larger relative difference."""
        return max(self.by_norm, self.by_max)


NONE = Difference(0.0, 0.0, 0.0)
TOTAL = Difference(math.inf, math.inf, math.inf)


def difference(actual: np.ndarray, expected: np.ndarray, scale: np.ndarray | None = None) -> Difference:
    """Return the difference of ``actual`` and ``expected``, computed in float64.

    Args:
        actual, expected: arrays of one shape; equal NaN and infinities agree.
        scale: further scale of each entry, used if it exceeds the entries (for a canceling sum).

    Returns:
        The difference; infinite if the shapes, NaN or infinities differ.
    """
    if actual.shape != expected.shape:
        return TOTAL
    if actual.size == 0:
        return NONE
    if expected.dtype.kind in "biuSUO":
        unequal = actual != expected
        if not unequal.any():
            return NONE
        is_number = expected.dtype.kind in "biu"
        apart = float(np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()) if is_number else 1.0
        return Difference(float(unequal.mean()), 1.0, apart)
    first, second = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    finite = np.isfinite(first) & np.isfinite(second)
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True):
        return TOTAL
    first, second = first[finite], second[finite]
    if first.size == 0:
        return NONE
    references = [first, second] if scale is None else [first, second, np.abs(scale.astype(np.float64)).ravel()[finite]]
    distances = np.abs(first - second)
    largest, norm = float(distances.max()), _norm(distances)
    if largest == 0:
        return NONE
    by_norm = norm / max(map(_norm, references))
    return Difference(by_norm, largest / max(float(np.abs(reference).max()) for reference in references), largest)


@dataclass(frozen=True)
class Tolerance:
    """Tolerance between engines.

    Args:
        rtol: relative tolerance by norm and by largest entry; by default 1000 spacings of float32 (1.2e-4) and float64 (2.2e-13),
            16 of float16 (1.6e-2) and bfloat16 (1.3e-1).
        atol: absolute tolerance of entries, as an alternative.

    Raises:
        ConfigurationError: a tolerance is negative or not finite.
    """

    rtol: float | None = None
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name}={value!r}: give a finite number that is not negative")

    def relative(self, dtype: np.dtype) -> float:
        """Return the relative tolerance of a dtype; 0 for integers."""
        if dtype.kind in "biuSUO":
            return 0.0
        if self.rtol is not None:
            return self.rtol
        return SPACINGS[dtype.itemsize] * _spacing(dtype)

    def allows(self, apart: Difference, dtype: np.dtype) -> bool:
        """True if a difference of arrays of this dtype is within tolerance."""
        return apart.relative <= self.relative(dtype) or apart.absolute <= self.atol


def _norm(values: np.ndarray) -> float:
    largest = float(np.abs(values).max())
    return 0.0 if largest == 0 else largest * float(np.linalg.norm(values / largest))


def _spacing(dtype: np.dtype) -> float:
    if dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(dtype).eps)

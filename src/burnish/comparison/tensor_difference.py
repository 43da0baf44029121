"""How far two arrays of the same thing are apart, and how far they may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from burnish.errors import ConfigurationError

SPACINGS = {8: 1000.0, 4: 1000.0, 2: 16.0}
"""Bytes of a floating-point type -> the default relative tolerance in units of its spacing at 1: sums of many products, added up
in different orders, stay below it; of sixteen-bit values it covers a few roundings of intermediate results."""


@dataclass(frozen=True)
class Difference:
    """How far an array is from another.

    Attributes:
        by_norm: Euclidean norm of the difference, relative to the larger of the two norms. Of integers and truth values: the
            share of entries that are not equal.
        by_max: largest difference of an entry, relative to the largest entry of both. Of integers: 1 where any differs.
        absolute: the largest difference of an entry.
    """

    by_norm: float
    by_max: float
    absolute: float

    @property
    def relative(self) -> float:
        """The larger of the two relative differences."""
        return max(self.by_norm, self.by_max)


NONE = Difference(0.0, 0.0, 0.0)
TOTAL = Difference(math.inf, math.inf, math.inf)


def difference(actual: np.ndarray, expected: np.ndarray, scale: np.ndarray | None = None) -> Difference:
    """Return how far ``actual`` is from ``expected``, computed in float64.

    Args:
        actual, expected: arrays of one shape; NaN and infinities agree where both have the same.
        scale: of that shape: what an entry is measured by too, where it is larger than the entries are (a sum that cancels).

    Returns:
        The difference; infinite where the shapes differ, or only one has a NaN or an infinity somewhere.
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
    """How far two engines may be apart.

    Args:
        rtol: relative tolerance of floating-point values, by norm and by largest entry; None: 1000 spacings of float32 (1.2e-4)
            and of float64 (2.2e-13), 16 of float16 (1.6e-2) and of bfloat16 (1.3e-1).
        atol: what any difference of entries may come to, beside that.

    Raises:
        ConfigurationError: a tolerance that is negative or not finite.
    """

    rtol: float | None = None
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name}={value!r}: give a finite number that is not negative")

    def relative(self, dtype: np.dtype) -> float:
        """The relative tolerance of a dtype; 0 of integers, which must be equal."""
        if dtype.kind in "biuSUO":
            return 0.0
        if self.rtol is not None:
            return self.rtol
        return SPACINGS[dtype.itemsize] * _spacing(dtype)

    def allows(self, apart: Difference, dtype: np.dtype) -> bool:
        """Whether two arrays of this dtype that are so far apart agree."""
        return apart.relative <= self.relative(dtype) or apart.absolute <= self.atol


def _norm(values: np.ndarray) -> float:
    largest = float(np.abs(values).max())
    return 0.0 if largest == 0 else largest * float(np.linalg.norm(values / largest))


def _spacing(dtype: np.dtype) -> float:
    if dtype.name == "bfloat16":
        return 2.0**-7
    return float(np.finfo(dtype).eps)

"""Central differences of a function of arrays, to check its gradient.

Derivatives are checked along directions: one of random signs, and single elements. If a derivative and its estimate differ,
smaller steps are tried, since a kink may lie within the step. If one-sided differences still disagree, the point itself is a kink
without a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from burnish.engines import Arrays

STEPS = (1e-5, 1e-4, 1e-6, 1e-7)
"""Step sizes, relative to the size of elements."""
DEFAULT_RTOL = 1e-6
DEFAULT_PROBES = 4
ROUNDING = 1e-15
SETTLING = 2.0
"""Allowed error of a derivative, in multiples of the distance between the last two estimates."""
NOISE = 16.0
"""Error of a difference of the function, in multiples of its response to rounding of its inputs."""


@dataclass
class TensorCheck:
    """The check of one array's gradient.

    Attributes:
        name, shape: of the array.
        probes: directions checked.
        kinks: further directions, without a derivative.
        error: largest difference, relative to the gradient.
        agrees: True if all directions are within tolerance.
        is_zero: True if the gradient is zero everywhere.
    """

    name: str
    shape: tuple[int, ...]
    probes: int = 0
    kinks: int = 0
    error: float = 0.0
    agrees: bool = True
    is_zero: bool = False


@dataclass
class Differences:
    """A function at a point, with its differences.

    Args:
        function: function of the arrays of ``point`` to a number, in float64.
        point: the arrays, also those without a gradient.
        rtol: tolerance relative to the gradient's size.
        seed: seed of the directions.
    """

    function: Callable[[Mapping[str, np.ndarray]], float]
    point: Arrays
    rtol: float = DEFAULT_RTOL
    seed: int = 0
    _generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)

    @cached_property
    def value(self) -> float:
        """The function at the point."""
        return self.function(self.point)

    @cached_property
    def rounding(self) -> float:
        """Change of the function if all its inputs change by rounding: the resolution of differences."""
        moved = []
        for _ in range(2):
            arrays = {
                name: array * (1 + ROUNDING * self._generator.choice((-1.0, 1.0), array.shape))
                if array.dtype.kind == "f"
                else array
                for name, array in self.point.items()
            }
            moved.append(abs(self.function(arrays) - self.value))
        return max(*moved, ROUNDING * abs(self.value))

    def judge(self, name: str, gradient: np.ndarray, probes: int = DEFAULT_PROBES) -> TensorCheck:
        """Compare a gradient with differences.

        Args:
            name: array of the gradient.
            gradient: the gradient.
            probes: number of directions; small arrays are checked at all elements.
        """
        array = self.point[name]
        check = TensorCheck(name, array.shape, is_zero=not np.any(gradient))
        size = float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0
        for direction, scale in self._directions(gradient, probes):
            found = self._derivative(name, direction, float(np.sum(direction * gradient)), scale, size or 1.0)
            if found is None:
                check.kinks += 1
                continue
            check.probes += 1
            error, agrees = found
            check.agrees = check.agrees and agrees
            check.error = max(check.error, error)
        return check

    def _directions(self, gradient: np.ndarray, probes: int) -> Iterator[tuple[np.ndarray, float]]:
        largest = float(np.max(np.abs(gradient), initial=0.0))
        elements = np.arange(gradient.size)
        if gradient.size > probes:
            yield self._generator.choice((-1.0, 1.0), gradient.shape), float(np.linalg.norm(gradient))
            # The largest elements, and some random ones, since large ones can hide errors of the others.
            order = np.argsort(-np.abs(gradient), axis=None)
            few = max(probes - 1, 0)
            elements = np.concatenate([order[: few // 2], self._generator.choice(order, few - few // 2, replace=False)])
        for element in elements:
            direction = np.zeros(gradient.size)
            direction[element] = 1.0
            yield direction.reshape(gradient.shape), largest

    def _derivative(
        self, name: str, direction: np.ndarray, derivative: float, scale: float, size: float
    ) -> tuple[float, bool] | None:
        """Return the error of a derivative, and True if it is within tolerance; None at a kink."""
        estimates, errors = [], []
        for step in STEPS:
            distance = step * size
            upper, lower = (
                self.function({**self.point, name: self.point[name] + sign * distance * direction}) for sign in (1, -1)
            )
            estimates.append((upper - lower) / (2 * distance))
            # For derivatives that are zero up to rounding, the rounding sets the scale.
            measure = max(abs(estimates[-1]), abs(derivative), scale, NOISE * self.rounding / distance / self.rtol)
            error = abs(estimates[-1] - derivative) / measure if measure else 0.0
            errors.append(error if np.isfinite(error) else np.inf)
            if errors[-1] <= self.rtol:
                return errors[-1], True
        if self._is_kink(name, direction, scale, size):
            return None
        # Estimates that do not settle reveal kinks within the steps, as in many activations.
        unsettled = SETTLING * abs(estimates[-1] - estimates[-2])
        return min(errors), bool(abs(estimates[-1] - derivative) <= unsettled)

    def _is_kink(self, name: str, direction: np.ndarray, scale: float, size: float) -> bool:
        """True if the one-sided differences stay apart for smaller steps."""
        gaps = []
        for step in (1e-5, 1e-6, 1e-7):
            distance = step * size
            upper, lower = (
                self.function({**self.point, name: self.point[name] + sign * distance * direction}) for sign in (1, -1)
            )
            gap = abs((upper - self.value) - (self.value - lower)) / distance
            gaps.append(gap - NOISE * self.rounding / distance)
        return min(gaps) > self.rtol * scale and gaps[2] > 0.5 * gaps[0]

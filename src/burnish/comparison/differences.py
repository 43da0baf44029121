"""Central differences of a function of arrays, beside the gradient that somebody says it has.

A derivative is judged along directions: one of random signs over the whole array, and single elements of it. The step is made
smaller where the two do not agree, as a kink may lie within it; where the one-sided differences stay apart, the point itself is a
kink, which has no derivative to judge by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from burnish.engines import Arrays

STEPS = (1e-5, 1e-4, 1e-6, 1e-7)
"""How far an element moves, of the size of those around it."""
DEFAULT_RTOL = 1e-6
DEFAULT_PROBES = 4
ROUNDING = 1e-15
SETTLING = 2.0
"""How many times the distance of the last two estimates a derivative may be from the last."""
NOISE = 16.0
"""By how many times the answer to a rounding of all that it reads a difference of the function may be off."""


@dataclass
class TensorCheck:
    """What was found of the gradient of one array.

    Attributes:
        name: of the array.
        shape: of the array.
        probes: how many directions were judged.
        kinks: how many more could not be judged: the function has no derivative there.
        error: the worst difference, relative to the gradient.
        agrees: whether every direction is within tolerance.
        is_zero: whether the gradient is zero throughout.
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
    """A function at a point, and what its differences are there.

    Args:
        function: of the arrays of ``point`` to a number, in float64.
        point: the arrays, those that are not differentiated by among them.
        rtol: how far a gradient may be from the differences, relative to its size.
        seed: of the directions.
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
        """How far the function moves where everything that it reads moves by a rounding: no difference can be finer."""
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
            name: of the array that it is the gradient of.
            gradient: what is judged.
            probes: along how many directions; all elements of an array that has no more than that.
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
        """Give directions, and what an error along each is relative to."""
        largest = float(np.max(np.abs(gradient), initial=0.0))
        elements = np.arange(gradient.size)
        if gradient.size > probes:
            yield self._generator.choice((-1.0, 1.0), gradient.shape), float(np.linalg.norm(gradient))
            # The largest elements say most, and a few at random what those hide.
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
        """Return the error of a derivative, and whether it is within tolerance; None at a kink."""
        estimates, errors = [], []
        for step in STEPS:
            distance = step * size
            upper, lower = (
                self.function({**self.point, name: self.point[name] + sign * distance * direction}) for sign in (1, -1)
            )
            estimates.append((upper - lower) / (2 * distance))
            # Of what is zero but for rounding, the rounding is the measure.
            measure = max(abs(estimates[-1]), abs(derivative), scale, NOISE * self.rounding / distance / self.rtol)
            error = abs(estimates[-1] - derivative) / measure if measure else 0.0
            errors.append(error if np.isfinite(error) else np.inf)
            if errors[-1] <= self.rtol:
                return errors[-1], True
        if self._is_kink(name, direction, scale, size):
            return None
        # Kinks within the steps, as many activations have them, are told by estimates that do not settle.
        unsettled = SETTLING * abs(estimates[-1] - estimates[-2])
        return min(errors), bool(abs(estimates[-1] - derivative) <= unsettled)

    def _is_kink(self, name: str, direction: np.ndarray, scale: float, size: float) -> bool:
        """Whether the differences to both sides stay apart as the step gets smaller."""
        gaps = []
        for step in (1e-5, 1e-6, 1e-7):
            distance = step * size
            upper, lower = (
                self.function({**self.point, name: self.point[name] + sign * distance * direction}) for sign in (1, -1)
            )
            gap = abs((upper - self.value) - (self.value - lower)) / distance
            gaps.append(gap - NOISE * self.rounding / distance)
        return min(gaps) > self.rtol * scale and gaps[2] > 0.5 * gaps[0]

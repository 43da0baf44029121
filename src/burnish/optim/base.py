"""What an optimizer is: a pure graph builder from parameters, gradients and state to the next parameters and state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor

Tensors = dict[str, Tensor]


@runtime_checkable
class Optimizer(Protocol):
    """A pure graph builder: (parameters, gradients, state, step) -> (next parameters, next state)."""

    @property
    def name(self) -> str:
        """How the optimizer is asked for."""
        ...

    def hyperparameters(self) -> dict[str, float]:
        """Return the scalars that a step may override, with their defaults; they become float32 graph inputs."""
        ...

    def init(self, builder: Builder, params: Mapping[str, Tensor]) -> Tensors:
        """Emit the initial state: ``<slot>/<initializer>`` -> value."""
        ...

    def update(
        self,
        builder: Builder,
        params: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        step: Tensor,
        hyperparameters: Mapping[str, Tensor],
    ) -> tuple[Tensors, Tensors]:
        """Emit one update.

        Args:
            builder: emits into the graph.
            params: initializer name -> parameter, floating-point; the update is computed in its dtype.
            gradients: the same keys; dtype and shape of the parameter.
            state: the keys and dtypes that ``init`` gives.
            step: int64 scalar, the number of updates already done: 0 at the first.
            hyperparameters: scalars of the names that ``hyperparameters()`` gives, of any floating-point dtype.

        Returns:
            The next parameters and the next state, with the same keys.
        """
        ...

    def options(self) -> dict[str, Any]:
        """Return name and settings as JSON-compatible values; ``burnish.optim.get`` builds the optimizer from them again."""
        ...


class Scalars:
    """Scalars of an update in the dtype of each parameter, each emitted once per graph, however many parameters there are.

    They are computed in float64: ``1 - 0.999`` has four correct digits in float32, and it divides every element.
    """

    def __init__(self, builder: Builder):
        self._builder = builder
        self._cast: dict[tuple[ir.Value, ir.DataType], Tensor] = {}

    def double(self, tensor: Tensor) -> Tensor:
        """Cast a scalar to float64."""
        return self._builder.cast(tensor, ir.DataType.DOUBLE)

    def of(self, scalar: Tensor, like: Tensor) -> Tensor:
        """Return ``scalar`` in the dtype of ``like``."""
        key = (scalar.value, like.dtype)
        if key not in self._cast:
            self._cast[key] = self._builder.cast(scalar, like.dtype)
        return self._cast[key]


def check_finite(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a finite number."""
    for name, number in numbers.items():
        if not _is_number(number):
            raise ConfigurationError(f"{optimizer}: {name} must be a finite number, not {number!r}")


def check_not_negative(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a finite number or is negative."""
    for name, number in numbers.items():
        if not _is_number(number) or number < 0.0:
            raise ConfigurationError(f"{optimizer}: {name} must be a finite number that is not negative, not {number!r}")


def check_fraction(optimizer: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a number in [0, 1)."""
    for name, number in numbers.items():
        if not _is_number(number) or not 0.0 <= number < 1.0:
            raise ConfigurationError(f"{optimizer}: {name} must be at least 0 and less than 1, not {number!r}")


def _is_number(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)

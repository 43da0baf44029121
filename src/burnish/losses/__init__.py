"""Losses: what training minimizes, as sums of terms over sums of weights, in operators that autodiff differentiates.

One file per family, on what is in ``base``. How a loss is wired into a program is in ``burnish.program``; what is only
reported is in ``burnish.metrics``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from burnish.errors import ConfigurationError
from burnish.losses.base import (
    CLASS_AXIS,
    Activation,
    Compared,
    LabelSpec,
    Loss,
    LossBase,
    Reading,
    Reduction,
    Term,
    average,
    combined,
)
from burnish.losses.cross_entropy import CrossEntropy, cross_entropy
from burnish.losses.regression import MeanSquaredError, mean_squared_error

__all__ = [
    "CLASS_AXIS",
    "LOSSES",
    "Activation",
    "Compared",
    "CrossEntropy",
    "LabelSpec",
    "Loss",
    "LossBase",
    "MeanSquaredError",
    "Reading",
    "Reduction",
    "Term",
    "average",
    "combined",
    "cross_entropy",
    "get",
    "mean_squared_error",
]

LOSSES: dict[str, Callable[..., Loss]] = {
    "cross_entropy": cross_entropy,
    "mean_squared_error": mean_squared_error,
    "mse": mean_squared_error,
}


def get(loss: str | Mapping[str, Any] | Loss) -> Loss:
    """Return the loss of a name, of the options that a loss gave (``Loss.options``), or the loss object itself.

    Raises:
        ConfigurationError: there is no loss of that name, or no such option.
    """
    if isinstance(loss, str):
        return _named(loss)()
    if isinstance(loss, Mapping):
        settings = {key: value for key, value in loss.items() if key != "name"}
        try:
            return _named(str(loss.get("name")))(**settings)
        except TypeError as error:
            raise ConfigurationError(f"loss '{loss.get('name')}': {error}; it was given the options {settings}") from error
    if isinstance(loss, Loss):
        return loss
    raise ConfigurationError(
        f"loss must be a name or a loss object of burnish.losses, not {type(loss).__name__}; there is {', '.join(sorted(LOSSES))}"
    )


def _named(name: str) -> Callable[..., Loss]:
    if name not in LOSSES:
        raise ConfigurationError(f"there is no loss '{name}'; there is {', '.join(sorted(LOSSES))}")
    return LOSSES[name]

"""Precision of a program: its dtype, the layers kept in float32, and the loss scale."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import onnx_ir as ir

from burnish import optim
from burnish.errors import ConfigurationError
from burnish.optim.loss_scale import LossScaled
from burnish.rewriting.mixed_precision import mix_precision
from burnish.settings import PlainSettings, with_settings
from burnish.validation import is_number, is_whole

FULL = "float32"
MIXED = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
INITIAL_SCALE = 65536.0


@dataclass(frozen=True)
class MixedPrecision(PlainSettings):
    """Mixed precision: products in sixteen bits; weights, statistics, sums, losses, gradients and updates in float32.

    Attributes:
        dtype: ``float16`` or ``bfloat16``.
        loss_scale: initial factor of the loss before differentiation; None for no scaling. By default 65536 for float16, in which
            small gradients would underflow, and None for bfloat16, which has the range of float32.
        growth_interval: number of consecutive steps without an overflow after which the scale doubles; None keeps it constant.
        growth_factor, backoff_factor: factors of the scale then, and at an overflow.
        keep: shell-style patterns of layers that stay in float32: the name of a node or of its weight, or a weight's name without
            its last part, such as ``classifier``.

    Raises:
        ConfigurationError: a setting outside its range.
    """

    dtype: str = "float16"
    loss_scale: float | Literal["auto"] | None = "auto"
    growth_interval: int | None = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in MIXED:
            raise ConfigurationError(
                f"precision: the dtype of mixed precision is one of {', '.join(map(repr, MIXED))}, not {self.dtype!r}"
            )
        if self.loss_scale not in ("auto", None):
            _check_number("loss_scale", self.loss_scale, 0.0, math.inf)
        if self.growth_interval is not None:
            _check_interval(self.growth_interval)
        _check_number("growth_factor", self.growth_factor, 1.0, math.inf)
        _check_number("backoff_factor", self.backoff_factor, 0.0, 1.0)
        patterns = (self.keep,) if isinstance(self.keep, str) else self.keep
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigurationError(f"precision: keep must be names or patterns of layers, not {self.keep!r}")
        object.__setattr__(self, "keep", tuple(patterns))
        self._check_scaling()

    def _check_scaling(self) -> None:
        """Raise ConfigurationError for settings that have no effect without a changing loss scale."""
        scale = "no loss_scale" if self.initial_scale is None else "growth_interval=None"
        for name in ("growth_factor", "backoff_factor") if self.initial_scale is None or self.growth_interval is None else ():
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                raise ConfigurationError(f"precision: {name}={value:g} changes nothing with {scale}: leave it out")

    @property
    def initial_scale(self) -> float | None:
        """Loss scale of the first step; None without scaling."""
        if self.loss_scale != "auto":
            return self.loss_scale
        return INITIAL_SCALE if self.dtype == "float16" else None

    def narrow(self, model: ir.Model, weights: Collection[ir.Value]) -> None:
        """Insert the casts into a graph not yet bound to a mode; see ``burnish.rewriting.mixed_precision``."""
        mix_precision(model, MIXED[self.dtype], weights, self.keep)

    def scaled(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """Return the optimizer wrapped in the loss scaling, if any."""
        if self.initial_scale is None:
            return optimizer
        return LossScaled(optimizer, self.initial_scale, self.growth_factor, self.backoff_factor, self.growth_interval)

    def options(self) -> dict[str, Any]:
        """Return the settings as JSON-compatible values for ``get``."""
        return {**asdict(self), "keep": list(self.keep)}


Precision = str | Mapping[str, Any] | MixedPrecision


def get(precision: Precision) -> MixedPrecision | None:
    """Return mixed precision from a dtype's name, options or an object; None for ``float32``.

    Raises:
        ConfigurationError: an unknown name or invalid settings.
    """
    known = ", ".join(map(repr, (FULL, *MIXED)))
    if isinstance(precision, MixedPrecision):
        return precision
    if isinstance(precision, Mapping):
        return with_settings("precision", MixedPrecision, precision)
    if not isinstance(precision, str) or precision not in (FULL, *MIXED):
        raise ConfigurationError(f"precision: unknown {precision!r}; choose among {known}, or give a burnish.MixedPrecision(...)")
    return None if precision == FULL else MixedPrecision(precision)


def _check_number(name: str, number: object, above: float, below: float) -> None:
    if not is_number(number) or not above < number < below:
        limits = f"above {above:g}" + (f" and below {below:g}" if math.isfinite(below) else "")
        raise ConfigurationError(f"precision: {name} must be a finite number {limits}, not {number!r}")


def _check_interval(interval: object) -> None:
    if not is_whole(interval) or interval < 1:
        raise ConfigurationError(
            f"precision: growth_interval must be a whole number of at least 1, or None for a scale that never changes, not "
            f"{interval!r}"
        )

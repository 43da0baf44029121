"""A rate that falls when a monitored figure stops improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, count, double, number
from burnish.optim.schedules.base import check_positive
from burnish.optim.slots import Slot
from burnish.settings import NamedSettings
from burnish.validation import check_choice, check_count, check_fraction, check_not_negative

MONITORED = "monitored"
RATE = Slot("plateau_rate", per_parameter=False)
BEST = Slot("plateau_best", per_parameter=False)
SEEN = Slot("plateau_seen", per_parameter=False)
BAD = Slot("plateau_bad", per_parameter=False)
COOLING = Slot("plateau_cooling", per_parameter=False)


@dataclass(frozen=True)
class Plateau(NamedSettings):
    """A rate that is multiplied by ``factor`` when more than ``patience`` figures in a row did not improve on the best.

    At each step with a finite number as the input ``monitored``, in this order::

        better   = the first one, or monitored < best * (1 - threshold)
        best     = monitored if better
        bad      = 0 if better else bad + 1
        bad      = 0 and cooling = cooling - 1, if cooling > 0
        rate     = max(rate * factor, lowest), if bad > patience and that changes it by more than eps
        cooling  = cooldown and bad = 0, if bad > patience

    With mode ``max`` better is monitored > best * (1 + threshold); with threshold_mode ``abs`` the limits are best - threshold
    and best + threshold. This is ``torch.optim.lr_scheduler.ReduceLROnPlateau``. A step's rate already uses the figure given with
    it. At any other step, with ``monitored`` NaN or infinite, nothing changes.

    State: ``plateau_rate`` and ``plateau_best``, float64; ``plateau_seen`` (figures so far), ``plateau_bad`` and
    ``plateau_cooling``, int64; scalars.

    Args:
        lr: rate of the first step.
        factor: factor of the rate, in (0, 1).
        patience: number of figures in a row without improvement before that.
        mode: ``min`` if less is better (a loss), ``max`` if more is (an accuracy).
        threshold: smallest improvement on the best figure.
        threshold_mode: ``rel``, as a share of the best, or ``abs``.
        cooldown: number of figures after a fall that do not count as bad.
        lowest: lower bound of the rate.
        eps: largest fall that is skipped.

    Raises:
        ConfigurationError: a negative or non-finite number, a factor outside (0, 1), an unknown mode.
    """

    name = "plateau"
    end = None
    slots = (RATE, BEST, SEEN, BAD, COOLING)
    lr: float
    factor: float = 0.1
    patience: int = 10
    mode: str = "min"
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    lowest: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr, threshold=self.threshold, lowest=self.lowest, eps=self.eps)
        check_fraction(self.name, factor=self.factor)
        check_positive(self.name, factor=self.factor)
        check_count(self.name, least=0, patience=self.patience, cooldown=self.cooldown)
        check_choice(self.name, "mode", self.mode, ("min", "max"))
        check_choice(self.name, "threshold_mode", self.threshold_mode, ("rel", "abs"))

    def hyperparameters(self) -> dict[str, float | None]:
        return {MONITORED: math.nan}

    def init(self, builder: Builder) -> Tensors:
        zero = count(builder, 0)
        return {RATE: number(builder, self.lr), BEST: number(builder, 0.0), SEEN: zero, BAD: zero, COOLING: zero}

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        def where(condition: Tensor, chosen: Tensor | float, other: Tensor) -> Tensor:
            chosen = chosen if isinstance(chosen, Tensor) else builder.scalar(chosen, other)
            return builder.op("Where", condition, chosen, other)

        monitored = double(hyperparameters[MONITORED])
        is_new = builder.op("Not", builder.op("Or", builder.op("IsNaN", monitored), builder.op("IsInf", monitored)))
        is_better = builder.op("Or", builder.op("Equal", state[SEEN], 0), self._beats(monitored, state[BEST]))
        is_cooling = builder.op("Greater", state[COOLING], 0)
        bad = where(builder.op("Or", is_better, is_cooling), 0, state[BAD] + 1)
        is_reduced = builder.op("Greater", bad, self.patience)
        lowered = builder.op("Max", state[RATE] * self.factor, self.lowest)
        is_changed = builder.op("And", is_reduced, builder.op("Greater", state[RATE] - lowered, self.eps))
        following: Tensors = {
            RATE: where(is_changed, lowered, state[RATE]),
            BEST: where(is_better, monitored, state[BEST]),
            SEEN: state[SEEN] + 1,
            BAD: where(is_reduced, 0, bad),
            COOLING: where(is_reduced, self.cooldown, where(is_cooling, state[COOLING] - 1, state[COOLING])),
        }
        next_state = {slot: where(is_new, value, state[slot]) for slot, value in following.items()}
        return next_state[RATE], next_state

    def _beats(self, monitored: Tensor, best: Tensor) -> Tensor:
        sign = -1.0 if self.mode == "min" else 1.0
        limit = best * (1.0 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return monitored.builder.op("Less" if self.mode == "min" else "Greater", monitored, limit)


plateau = Plateau

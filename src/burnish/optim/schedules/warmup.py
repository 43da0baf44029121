"""A linear rise before any schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import Schedule, Tensors, check_not_negative, is_schedule
from burnish.optim.schedules.base import check_counts, double, options_of
from burnish.optim.slots import Slot
from burnish.settings import PlainSettings


@dataclass(frozen=True)
class Warmup(PlainSettings):
    """rate(t) = schedule(max(t - steps, 0)) * (start + (1 - start) * min(t / steps, 1)).

    The schedule begins when the rise is over. ``torch.optim.lr_scheduler.LinearLR`` followed by the schedule in ``SequentialLR``.
    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.
    """

    name = "warmup"
    schedule: Schedule
    steps: int
    start: float

    def __post_init__(self) -> None:
        if not is_schedule(self.schedule):
            raise ConfigurationError(
                f"{self.name}: it stands before a schedule, not before {self.schedule!r}: "
                "give one of burnish.optim.schedules, such as constant(0.1)"
            )
        check_counts(self.name, steps=self.steps)
        check_not_negative(self.name, start=self.start)

    @property
    def end(self) -> int | None:
        return None if self.schedule.end is None else self.steps + self.schedule.end

    def hyperparameters(self) -> dict[str, float | None]:
        return self.schedule.hyperparameters()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(getattr(self.schedule, "slots", ()))

    def init(self, builder: Builder) -> Tensors:
        return self.schedule.init(builder)

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        rate, next_state = self.schedule.rate(builder, builder.op("Max", step - self.steps, 0), state, hyperparameters)
        to_climb = 1.0 - double(builder.op("Min", step, self.steps)) / float(self.steps)
        # Written from the top, so that the factor is exactly 1 when the rise is over.
        return rate * (1.0 - to_climb * (1.0 - self.start)), next_state

    def options(self) -> dict[str, Any]:
        return options_of(self)


def warmup(schedule: Schedule, steps: int, start: float | None = None) -> Warmup:
    """Return a schedule with a linear rise before it.

    Args:
        schedule: what follows; its step 0 is the step ``steps`` of the whole.
        steps: length of the rise.
        start: rate of the first step, as a share of the schedule's first rate; by default 1 / (steps + 1), so that the rise has
            equal steps from a rate of 0 before the first one.

    Raises:
        ConfigurationError: no schedule, fewer than one step, or a negative start.
    """
    check_counts("warmup", steps=steps)
    return Warmup(schedule, steps, 1.0 / (steps + 1) if start is None else start)

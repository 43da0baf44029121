"""A linear rise before any schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, double
from burnish.optim.base import Schedule, is_schedule
from burnish.optim.slots import Slot
from burnish.settings import NamedSettings
from burnish.validation import check_count, check_not_negative


@dataclass(frozen=True)
class Warmup(NamedSettings):
    """rate(t) = schedule(max(t - steps, 0)) * (start + (1 - start) * min(t / steps, 1)).

    The schedule begins after the rise. This is ``torch.optim.lr_scheduler.LinearLR`` followed by the schedule in
    ``SequentialLR``. Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour", 2017.

    Args:
        schedule: the schedule that follows; its step 0 is step ``steps`` overall.
        steps: length of the rise.
        start: rate of the first step, as a share of the schedule's first rate; by default 1 / (steps + 1), for equal steps up
            from a rate of 0 before the first one.

    Raises:
        ConfigurationError: no schedule, fewer than one step, or a negative start.
    """

    name = "warmup"
    schedule: Schedule
    steps: int
    start: float | None = None

    def __post_init__(self) -> None:
        check_count(self.name, steps=self.steps)
        if not is_schedule(self.schedule):
            raise ConfigurationError(
                f"{self.name}: it stands before a schedule, not before {self.schedule!r}: "
                "give one of burnish.optim.schedules, such as constant(0.1)"
            )
        if self.start is None:
            object.__setattr__(self, "start", 1.0 / (self.steps + 1))
        check_not_negative(self.name, start=self._start)

    @property
    def _start(self) -> float:
        assert self.start is not None
        return self.start

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
        # Written from the top, so that the factor is exactly 1 after the rise.
        return rate * (1.0 - to_climb * (1.0 - self._start)), next_state


warmup = Warmup

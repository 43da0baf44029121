"""What schedules share: those without a state, those with an end, checks of their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.base import Schedule, Tensors, check_not_negative
from burnish.settings import PlainSettings, is_whole

PAST_END = ("error", "hold")


@dataclass(frozen=True)
class StatelessSchedule(PlainSettings):
    """A schedule whose rate depends on the step alone; see ``burnish.optim.base.Schedule`` for the methods."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def end(self) -> int | None:
        return None

    def hyperparameters(self) -> dict[str, float | None]:
        return {}

    def init(self, builder: Builder) -> Tensors:
        return {}

    def rate(
        self, builder: Builder, step: Tensor, state: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensors]:
        return self.at(builder, step), {}

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        """Emit the rate of a step, a float64 scalar; ``step`` is an int64 scalar."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        return options_of(self)


@dataclass(frozen=True)
class EndingSchedule(StatelessSchedule):
    """A stateless schedule over a number of steps.

    Whoever holds the program refuses a step past the end, unless ``past_end`` is ``hold``. The graph itself, which cannot refuse
    anything, holds the last rate either way.
    """

    @property
    def length(self) -> int:
        """How many steps there are."""
        raise NotImplementedError

    @property
    def last(self) -> int:
        """The step whose rate is held from then on: by default the first one past the end, where the final rate is reached."""
        return self.length

    @property
    def holds(self) -> bool:
        """Whether steps past the end are allowed."""
        raise NotImplementedError

    @property
    def end(self) -> int | None:
        return None if self.holds else self.length

    def at(self, builder: Builder, step: Tensor) -> Tensor:
        return self.within(builder, double(builder.op("Min", step, self.last)))

    def within(self, builder: Builder, step: Tensor) -> Tensor:
        """Emit the rate of a step, a float64 scalar from 0 to ``last``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Descent(EndingSchedule):
    """From ``lr`` at step 0 to ``final`` at step ``steps``, the first one past the end."""

    lr: float
    steps: int
    final: float
    past_end: str

    @property
    def length(self) -> int:
        return self.steps

    @property
    def holds(self) -> bool:
        return self.past_end == "hold"

    def check(self) -> None:
        """Raise ConfigurationError, naming the argument, for a setting that cannot be."""
        check_not_negative(self.name, lr=self.lr, final=self.final)
        check_counts(self.name, steps=self.steps)
        check_choice(self.name, "past_end", self.past_end, PAST_END)

    def remaining(self, step: Tensor) -> Tensor:
        """Emit the share of the way that is left: 1 at step 0, 0 at ``steps``."""
        return (float(self.steps) - step) / float(self.steps)

    def descended(self, share: Tensor) -> Tensor:
        """Emit the rate at which ``share`` of the difference to ``final`` is left; exact at both ends."""
        return share * (self.lr - self.final) + self.final


def options_of(schedule: Schedule) -> dict[str, Any]:
    """Return name and settings of a schedule that is a dataclass, as JSON-compatible values."""
    settings: dict[str, Any] = {"name": schedule.name}
    for field in fields(schedule):  # type: ignore[arg-type]  # the protocol does not ask for a dataclass
        value = getattr(schedule, field.name)
        if isinstance(value, Schedule):
            value = value.options()
        settings[field.name] = list(value) if isinstance(value, tuple) else value
    return settings


def double(tensor: Tensor) -> Tensor:
    """Emit a scalar in float64."""
    return tensor.builder.cast(tensor, ir.DataType.DOUBLE)


def number(builder: Builder, value: float) -> Tensor:
    """Emit a float64 constant."""
    return builder.scalar(value, ir.DataType.DOUBLE)


def check_counts(schedule: str, least: int = 1, **counts: object) -> None:
    """Raise ConfigurationError, naming the argument, for a count that is no whole number, too small, or too large for int64."""
    needed = f"of at least {least}" if least else "that is not negative"
    for name, count in counts.items():
        if not is_whole(count) or count < least:
            raise ConfigurationError(f"{schedule}: {name} must be a whole number {needed}, not {count!r}")
        if count >= 2**62:
            raise ConfigurationError(f"{schedule}: {name} must be below 2^62, not {count}: give a smaller one")


def check_choice(schedule: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ConfigurationError, naming the argument, for what is not among the choices."""
    if value not in choices:
        raise ConfigurationError(f"{schedule}: {name} must be {' or '.join(map(repr, choices))}, not {value!r}")


def check_positive(schedule: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, for what is not a finite number above 0."""
    for name, value in numbers.items():
        check_not_negative(schedule, **{name: value})
        if value == 0:
            raise ConfigurationError(f"{schedule}: {name} must be above 0, not {value!r}")

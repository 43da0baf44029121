"""Base classes of schedules, and checks of their settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.optim.arithmetic import Tensors, double
from burnish.settings import NamedSettings
from burnish.validation import check_choice, check_count, check_not_negative

PAST_END = ("error", "hold")


class StatelessSchedule(NamedSettings):
    """A schedule that depends only on the step; see ``burnish.optim.base.Schedule`` for the methods."""

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
        return self.at(step), {}

    @abstractmethod
    def at(self, step: Tensor) -> Tensor:
        """Emit the rate of a step, a float64 scalar; ``step`` is an int64 scalar."""


class EndingSchedule(StatelessSchedule):
    """A stateless schedule over a number of steps.

    The holder of the program refuses steps after the end, unless ``past_end`` is ``hold``. The graph itself cannot refuse
    anything and always holds the last rate.
    """

    steps: int
    past_end: str

    @property
    def last(self) -> int:
        """The step from which the rate stays constant: by default the first one after the end, with the final rate."""
        return self.steps

    @property
    def end(self) -> int | None:
        return None if self.past_end == "hold" else self.steps

    def at(self, step: Tensor) -> Tensor:
        return self.within(double(step.builder.op("Min", step, self.last)))

    @abstractmethod
    def within(self, step: Tensor) -> Tensor:
        """Emit the rate of a step, a float64 scalar from 0 to ``last``."""


class Descent(EndingSchedule):
    """A schedule from ``lr`` at step 0 to ``final`` at step ``steps``, the first one after the end."""

    lr: float
    final: float

    def __post_init__(self) -> None:
        check_not_negative(self.name, lr=self.lr, final=self.final)
        check_count(self.name, steps=self.steps)
        check_choice(self.name, "past_end", self.past_end, PAST_END)

    def remaining(self, step: Tensor) -> Tensor:
        """Emit the remaining share of the steps: 1 at step 0, 0 at ``steps``."""
        return (float(self.steps) - step) / float(self.steps)

    def descended(self, share: Tensor) -> Tensor:
        """Emit the rate for a remaining ``share`` of the difference to ``final``; exact at both ends."""
        return share * (self.lr - self.final) + self.final


def check_positive(schedule: str, **numbers: float) -> None:
    """Raise ConfigurationError, naming the argument, unless it is a finite number above 0."""
    for name, value in numbers.items():
        check_not_negative(schedule, **{name: value})
        if value == 0:
            raise ConfigurationError(f"{schedule}: {name} must be above 0, not {value!r}")

"""One cycle: up to a high rate, then down to a very small one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.optim.schedules.base import PAST_END, EndingSchedule, check_positive
from burnish.optim.schedules.cosine import half_wave
from burnish.validation import check_choice, check_count, check_fraction

SHAPES = ("cosine", "linear")


@dataclass(frozen=True)
class OneCycle(EndingSchedule):
    """From lr / initial_divisor up to lr, and down to lr / (initial_divisor * final_divisor) at the last step.

    Each part is half a cosine wave or a straight line. With p = rising * steps, the top is at step p - 1 and the bottom at steps
    - 1; with three phases the initial rate is reached again at step 2p - 2. Source: Smith and Topin, "Super-convergence: very
    fast training of neural networks using large learning rates", 2019; ``torch.optim.lr_scheduler.OneCycleLR``.

    Args:
        lr: the highest rate.
        steps: number of steps; the last has the lowest rate.
        rising: share of the steps on the way up, in (0, 1).
        initial_divisor: ratio of ``lr`` to the first rate.
        final_divisor: ratio of the first rate to the last.
        shape: ``cosine`` or ``linear``.
        three_phases: True to go down to the first rate in as many steps as up, and then on to the last.
        past_end: ``error`` refuses steps after the end, ``hold`` continues with the last rate.

    Raises:
        ConfigurationError: a number that is not above 0, a share that leaves a part without steps, an unknown ``shape`` or
            ``past_end``.
    """

    name = "one_cycle"
    lr: float
    steps: int
    rising: float = 0.3
    initial_divisor: float = 25.0
    final_divisor: float = 1e4
    shape: str = "cosine"
    three_phases: bool = False
    past_end: str = "error"

    def __post_init__(self) -> None:
        check_positive(self.name, lr=self.lr, initial_divisor=self.initial_divisor, final_divisor=self.final_divisor)
        check_count(self.name, steps=self.steps)
        check_fraction(self.name, rising=self.rising)
        check_choice(self.name, "shape", self.shape, SHAPES)
        check_choice(self.name, "past_end", self.past_end, PAST_END)
        ends = [0.0, *(stop for stop, _ in self._parts())]
        if any(later <= earlier for earlier, later in pairwise(ends)):
            raise ConfigurationError(
                f"{self.name}: rising={self.rising} of {self.steps} steps leaves no step for one of its parts: they would end "
                f"at the steps {', '.join(f'{end:g}' for end in ends[1:])}; give more steps or another share"
            )

    @property
    def last(self) -> int:
        return self.steps - 1

    def within(self, step: Tensor) -> Tensor:
        builder = step.builder
        rates, begin, before = [], 0.0, self.lr / self.initial_divisor
        for stop, target in self._parts():
            remaining = (stop - step) / (stop - begin)
            share = half_wave(remaining) if self.shape == "cosine" else remaining
            rates.append((stop, share * (before - target) + target))
            begin, before = stop, target
        rate = rates.pop()[1]
        for stop, earlier in reversed(rates):
            rate = builder.op("Where", builder.op("LessOrEqual", step, stop), earlier, rate)
        return rate

    def _parts(self) -> list[tuple[float, float]]:
        """Return the end of each part, a step that need not be whole, and the rate there."""
        top = float(self.rising * self.steps)
        initial = self.lr / self.initial_divisor
        back = [(2 * top - 2, initial)] if self.three_phases else []
        return [(top - 1, self.lr), *back, (float(self.steps - 1), initial / self.final_divisor)]


one_cycle = OneCycle

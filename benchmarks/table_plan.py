"""Which rows the table of steps has, in the order of their worth, and how much time each of them gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BATCHES = (16, 8, 4, 2, 1)
WORKERS = 2
# Workers, and the batch of each: who personalises a model has few samples, who trains one has many; the rest lies between.
STAGES = ((1, 1), (1, 16), (1, 4), (2, 8), (2, 1), (1, 8), (1, 2), (2, 4), (2, 2), (2, 16))
# Rows of models whose steps take so many seconds that others are worth more of the same time; they come last.
SLOW = {("bert-base", 16), ("bert-base", 8)}
LEAST_ROUNDS = 3
"""Below it the second-least step is the median or more."""


@dataclass(frozen=True)
class Place:
    """A row of the table.

    Attributes:
        model: a name out of ``workloads.WORKLOADS``.
        workers: processes that train together; 1 is one process by itself.
        batch: samples of a step of each of them.
    """

    model: str
    workers: int
    batch: int

    @property
    def total(self) -> int:
        """Samples of a step."""
        return self.workers * self.batch


def places(models: Sequence[str], batches: Sequence[int], workers: Sequence[int] = (1, WORKERS)) -> list[Place]:
    """The rows of these models and batches, those of most worth first.

    Two workers with half the batch of one process each take the same step together, and with the whole batch each the same step
    apiece: a row with two of them serves both comparisons.
    """
    stages = [stage for stage in STAGES if stage[0] in workers and stage[1] in batches]
    stages += [(count, batch) for count in workers for batch in batches if (count, batch) not in STAGES]
    ordered = [Place(model, count, batch) for count, batch in stages for model in models]
    return sorted(ordered, key=lambda place: (place.model, place.total) in SLOW or (place.model, place.batch) in SLOW)


@dataclass
class Schedule:
    """How long the rounds of each row go on, so that a run ends in time and every row gets a fair part of it.

    A row begins where it is likely to end in time. What opening its contenders costs is known from rows of the same model;
    before the first of these, from all.

    Attributes:
        minutes: of the run; None takes ``rounds`` for every row.
        rounds: of a row at the most.
        now: the clock, in seconds.
    """

    minutes: float | None
    rounds: int
    now: Callable[[], float] = time.monotonic
    taken: dict[Place, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._end = None if self.minutes is None else self.now() + 60 * self.minutes

    @property
    def left(self) -> float | None:
        """Seconds until the end; None without one."""
        return None if self._end is None else self._end - self.now()

    def fits(self, place: Place) -> bool:
        """Whether the row is likely to end in time with the fewest rounds."""
        return self.left is None or (self.left > 0 and self.expected(place) <= self.left)

    def expected(self, place: Place) -> float:
        """Seconds that the row is likely to take with the fewest rounds, from those that are done; 0 where none is."""
        alike = [taken for done, taken in self.taken.items() if (done.model, done.workers) == (place.model, place.workers)]
        alike = alike or [taken for done, taken in self.taken.items() if done.model == place.model]
        known = alike or list(self.taken.values())
        return sum(known) / len(known) if known else 0.0

    def end_of_rounds(self, place: Place, ahead: Sequence[Place]) -> float | None:
        """When the rounds of a row that begins now are to end, ``ahead`` being those after it; None: after ``rounds``.

        A row may take what it is expected to, and an even part of what is left beyond what those take that fit in.
        """
        if self.left is None:
            return None
        spare, count = self.left - self.expected(place), 1
        for other in ahead:
            if self.expected(other) > spare:
                break
            spare, count = spare - self.expected(other), count + 1
        return self.now() + self.expected(place) + max(0.0, spare) / count

    def goes_on(self, done: int, end: float | None) -> bool:
        """Whether there is another round after so many."""
        if done >= self.rounds:
            return False
        return done < LEAST_ROUNDS or end is None or self.now() < end

    def note(self, place: Place, opening: float, rounds: int, of_rounds: float) -> None:
        """Note what a row took: the seconds of opening its contenders, and those of its rounds."""
        self.taken[place] = opening + of_rounds * min(LEAST_ROUNDS, rounds) / max(1, rounds)

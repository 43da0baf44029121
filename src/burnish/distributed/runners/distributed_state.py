"""A program of whose state every worker holds something of its own: all of them are asked for the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from burnish.engines import ProgramRunner
from burnish.engines.base import NOTHING, Arrays
from burnish.engines.communicator import Communicator


class SpreadRunner:
    """A runner of one worker's part of the state, that looks to its session as one of the whole.

    ``state`` is an exchange, which all workers make at the same time. A subclass says what of the state is spread.

    Args:
        runner: of this worker's part.
        communicator: to the others.

    Attributes:
        evaluates_together: whether ``evaluate`` and ``predict`` are exchanges too.
        gives_entries: whether an entry can be asked for without the others, while they take part (``asking``).
        writer: a runner that writes the same rows of tables on all workers; None if they write different ones.
    """

    evaluates_together = False
    gives_entries = False
    writer: ProgramRunner | None = None

    def __init__(self, runner: ProgramRunner, communicator: Communicator):
        self._runner, self._communicator = runner, communicator
        self._known: Arrays = {}
        """What others hold of the state, as far as this worker knows it; until the next step."""

    @property
    def is_spread(self) -> bool:
        """Whether other workers hold what this one does not."""
        return isinstance(self._runner, SpreadRunner) and self._runner.is_spread

    @property
    def route(self) -> str | None:
        """How a step of this worker runs, for ``Session.describe``."""
        return getattr(self._runner, "route", None)

    @property
    def ends_round(self) -> bool:
        """Whether workers exchange something in the next step; they do not within a round that each steps alone."""
        return True

    def asking(self) -> AbstractContextManager[None]:
        """While this lasts, the others that take part wait for what is asked of them."""
        return nullcontext()

    def synchronize(self) -> None:
        """End the round; does nothing if the workers have the same weights after each step."""

    def take_over(self, given: Callable[[str, np.ndarray], np.ndarray]) -> None:
        """Take over the state that the first worker loaded, if it alone was given the whole."""

    def own_state(self) -> Arrays:
        """Return what this worker holds; asks nobody."""
        return self._runner.own_state() if isinstance(self._runner, SpreadRunner) else self._runner.state()

    def take_part(self) -> None:
        """Give this worker's part of the state to another one, which asks for the state at the same time."""
        self.state()

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._runner.step(inputs)
        self._known = {}
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._runner.evaluate(inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._runner.predict(inputs, instead)

    def state(self) -> Arrays:
        return self._runner.state()

    def state_entry(self, name: str) -> np.ndarray:
        """The same as for any runner; for an entry that is spread, an exchange like ``state``."""
        return self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(state)

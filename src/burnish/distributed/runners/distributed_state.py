"""A program of whose state every worker holds something of its own: all of them are asked for the whole."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from burnish.engines import ProgramRunner
from burnish.engines.base import NOTHING, Arrays
from burnish.engines.communicator import Communicator


class SpreadRunner(ProgramRunner):
    """A runner of one worker's part of the state, that looks to its session as one of the whole.

    ``state`` is an exchange, which all workers make at the same time. A subclass says what of the state is spread.

    Args:
        runner: of this worker's part.
        communicator: to the others.

    """

    def __init__(self, runner: ProgramRunner, communicator: Communicator):
        self._runner, self._communicator = runner, communicator
        self._known: Arrays = {}
        """What others hold of the state, as far as this worker knows it; until the next step."""

    @property
    def is_spread(self) -> bool:
        return self._runner.is_spread

    @property
    def route(self) -> str | None:
        return self._runner.route

    def own_state(self) -> Arrays:
        return self._runner.own_state()

    def take_part(self) -> None:
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

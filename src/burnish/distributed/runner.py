"""Base of the runners that wrap an engine's runner for workers with different parts of the state."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from burnish.engines import ProgramRunner
from burnish.engines.base import NOTHING, Arrays
from burnish.engines.communicator import Communicator, array_of, buffer_of


class SpreadRunner(ProgramRunner):
    """A runner of one worker's part of the state that looks like one of the whole; all workers request ``state`` together."""

    def __init__(self, runner: ProgramRunner, communicator: Communicator):
        self._runner, self._communicator = runner, communicator
        # The others' parts of the state, known until the next step.
        self._known: Arrays | None = None

    @property
    def is_spread(self) -> bool:
        return bool(self._spread()) or self._runner.is_spread

    @property
    def route(self) -> str | None:
        return self._runner.route

    def _spread(self) -> Collection[str]:
        return ()

    def _whole(self, own: Arrays) -> Arrays:
        return {}

    def own_state(self) -> Arrays:
        return self._runner.own_state()

    def take_part(self) -> None:
        self.state()

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._runner.step(inputs)
        self._known = None
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._runner.evaluate(inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._runner.predict(inputs, instead)

    def state(self) -> Arrays:
        state = self._runner.state()
        if self._spread():
            state |= self._whole(state) if self._known is None else self._known
        return state

    def state_entry(self, name: str) -> np.ndarray:
        return self.state()[name] if name in self._spread() else self._runner.state_entry(name)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._runner.load_state(state)


def gathered(communicator: Communicator, array: np.ndarray) -> np.ndarray:
    return array_of(communicator.all_gather(buffer_of(communicator, array)))


def summed(communicator: Communicator, array: np.ndarray) -> np.ndarray:
    buffer = buffer_of(communicator, array)
    communicator.all_reduce(buffer).wait()
    return array_of(buffer)


def as_bytes(arrays: Mapping[str, np.ndarray], size: int = 0) -> np.ndarray:
    return np.frombuffer(b"".join(array.tobytes() for array in arrays.values()).ljust(size, b"\0"), np.uint8).copy()


def from_bytes(content: np.ndarray, forms: Mapping[str, tuple[np.dtype, Any]]) -> Arrays:
    arrays, begin = {}, 0
    for name, (dtype, shape) in forms.items():
        end = begin + dtype.itemsize * math.prod(shape)
        arrays[name] = content[begin:end].copy().view(dtype).reshape(shape)
        begin = end
    return arrays

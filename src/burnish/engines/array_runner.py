"""A program opened on an engine that runs one model at a time, with the state in numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from burnish.engines.base import NOTHING, Arrays, LoadedModel, check_finite_loss

if TYPE_CHECKING:
    from burnish.compiler.executable import Executable


class ArrayRunner:
    """A ``ProgramRunner`` made of graphs that an engine loads, each when it is first run. Every step reads and returns the state.

    Args:
        executable: the program.
        state: every state entry by name; copied.
        load: returns a graph of the executable, by its name, as something to call.
    """

    def __init__(self, executable: Executable, state: Mapping[str, np.ndarray], load: Callable[[str], LoadedModel]):
        self._signature = executable.signature
        self._load = load
        self._state = {name: np.array(array) for name, array in state.items()}
        self._loaded: dict[str, LoadedModel] = {}

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._run("step", inputs)
        signature = self._signature["step"]
        check_finite_loss(signature, outputs, lambda: self._state)
        for name, output in signature.updates.items():
            self._state[name] = np.array(outputs.pop(output))
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._run("evaluate", inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._run("predict", inputs, instead)

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self._state.items()}

    def state_entry(self, name: str) -> np.ndarray:
        return self._state[name].copy()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._state = {name: np.array(state[name]) for name in self._state}

    def _run(self, graph: str, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        run = self._loaded.get(graph)
        if run is None:
            run = self._loaded[graph] = self._load(graph)
        names = [entry.name for entry in self._signature[graph].inputs if entry.is_state]
        state = {name: self._state[instead.get(name, name)] for name in names}
        return run({**state, **inputs})

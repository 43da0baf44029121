"""The small protocol between a program and what runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from burnish.program import Program

Arrays = dict[str, np.ndarray]


class ProgramRunner(Protocol):
    """A program opened on an engine, holding its state there. Inputs are arrays by name, already checked."""

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run one training step: data, labels and hyperparameters in; loss and metrics out; the state moves on."""
        ...

    def evaluate(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run the evaluate graph on the current state; the state stays."""
        ...

    def predict(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run the predict graph on the current state; the state stays."""
        ...

    def state(self) -> Arrays:
        """Return copies of the state, by state name."""
        ...

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the state by copies of these arrays; names, dtypes and shapes are already checked."""
        ...


class Engine(Protocol):
    """Something that runs standard ONNX graphs."""

    name: str

    def open(
        self, program: Program, state: Mapping[str, np.ndarray], *, device: str | None, threads: int | None
    ) -> ProgramRunner:
        """Load a program and its state onto the device."""
        ...

    def run(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run a model once; returns its outputs by name."""
        ...

"""The features of a frozen backbone, computed from a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from burnish.engines import Engine, ProgramRunner
from burnish.engines.array_runner import InheritedRunner
from burnish.errors import ConfigurationError
from burnish.program import Program, Role
from burnish.program.layout import stand_in
from burnish.program.signature import FEATURES
from burnish.training.inputs import BatchCheck


class Features:
    """The features that the frozen part of a program computes from a batch (``burnish.compile(cached_features=...)``).

    Args:
        program: the program.
        engine, device, threads: those of the session.
        look: function called with the first batch of model inputs, as later batches have features.
        part: True if batches are a worker's parts, which may be empty.

    Attributes:
        program: the program.
        names: names of the features that the steps take; empty if there are none.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        device: str | None = None,
        threads: int | None = None,
        look: Callable[[Mapping[str, Any]], None] | None = None,
        part: bool = False,
    ):
        self.program, self._engine, self._device, self._threads = program, engine, device, threads
        self._runner: ProgramRunner | None = None
        self._lock = threading.Lock()
        self._look = look
        signature = program.signature
        self.names = tuple(entry.name for entry in signature[FEATURES].outputs) if FEATURES in signature.graphs else ()
        if self.names:
            taken = {entry.name for entry in signature["step"].inputs_of(Role.DATA, Role.LABEL)}
            computed_from = {entry.name for entry in signature[FEATURES].inputs_of(Role.DATA)}
            ignored = (taken | {entry.name for entry in signature.samples}) - computed_from
            self._check = BatchCheck(signature[FEATURES], ignored, part)
            self._taken = taken.difference(self.names)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the features of a batch by name, [samples, ...].

        Args:
            batch: the model's inputs by name; labels are ignored.

        Raises:
            ConfigurationError: the program has no cached features.
            InputError: the batch does not fit the model.
            EngineError: the engine fails.
        """
        if not self.names:
            raise ConfigurationError(
                "The program has no features that are computed once: compile it with cached_features='auto', or with the name of "
                "the value that they are"
            )
        inputs = self._check(batch)
        without_samples = {name: self._stand_in(name, array) for name, array in inputs.items() if not array.size}
        if not without_samples and self._look is not None:
            look, self._look = self._look, None
            look(batch)
        with self._lock:
            if self._runner is None:
                from burnish.compiler.lowered_graphs import LoweredGraphs

                graphs = LoweredGraphs.of_model(self.program.graphs.unlowered(FEATURES), self._engine.target)
                self._runner = self._engine.open(graphs, {}, device=self._device, threads=self._threads)
            computed = dict(self._runner.step({**inputs, **without_samples}))
        return {name: self._none_of(name, array) for name, array in computed.items()} if without_samples else computed

    def _stand_in(self, name: str, array: np.ndarray) -> np.ndarray:
        signature = self.program.signature[FEATURES]
        entry = next(entry for entry in signature.inputs_of(Role.DATA) if entry.name == name)
        return stand_in(entry, array.shape, signature)

    def _none_of(self, name: str, array: np.ndarray) -> np.ndarray:
        """A feature without samples, with the shape of one with samples."""
        entry = next(entry for entry in self.program.signature[FEATURES].outputs if entry.name == name)
        return array if entry.sample_axis is None else np.delete(array, np.s_[:], entry.sample_axis)

    def batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch for ``step`` and ``evaluate``: features replace the inputs that they are computed from.

        Raises:
            ConfigurationError, InputError, EngineError: as when the features are computed.
        """
        return {**self(batch), **{name: batch[name] for name in self._taken if name in batch}}

    def inherit(self) -> None:
        """Continue in a forked process, which must open the engine again."""
        self._lock = threading.Lock()
        if self._runner is not None:
            InheritedRunner(self._runner)
            self._runner = None

    def close(self) -> None:
        """Free the engine's resources; the next call opens it again."""
        with self._lock:
            self._runner = None

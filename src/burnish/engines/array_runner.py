"""Runners that engines share: one with the state in numpy arrays, and a substitute for a runner in a forked process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import onnx_ir as ir

from burnish.engines.base import NOTHING, Arrays, LoadedModel, ProgramRunner, uninterrupted
from burnish.engines.non_finite_loss import check_finite_loss
from burnish.engines.row_writes import RowChanges, RowWrite, RowWriter, take_row_writes, write_rows, written_by_rows
from burnish.errors import EngineError
from burnish.files.mapped_tables import adopted

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs


class ArrayRunner(ProgramRunner):
    """A runner that loads each graph when it is first run. Every step reads and returns the state.

    Args:
        graphs: graphs of the program, lowered to the engine's target.
        state: every state entry by name; copied.
        load: a function that returns one of the graphs, by its name, as a callable.
        load_model: a function that returns a modified graph as a callable. With it, tables that are updated by rows are written
            in place; without it, each step makes new ones.
    """

    def __init__(
        self,
        graphs: LoweredGraphs,
        state: Mapping[str, np.ndarray],
        load: Callable[[str], LoadedModel],
        load_model: Callable[[ir.Model, str], LoadedModel] | None = None,
    ):
        self._graphs = graphs
        self._signature = graphs.signature
        self._load = load
        self._load_model = load_model
        self._row_writes: list[RowWrite] = []
        self.row_changes = RowChanges()
        self._state = {name: _own(array) for name, array in state.items()}
        self._loaded: dict[str, LoadedModel] = {}

    @property
    def route(self) -> str:
        return "one graph, with the state in arrays"

    @property
    def row_writer(self) -> RowWriter | None:
        return None if self._load_model is None else self

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        outputs = self._run("step", inputs)
        signature = self._signature["step"]
        check_finite_loss(signature, outputs, lambda: self._state)
        by_rows = {write.entry for write in self._row_writes}
        following = {name: np.array(outputs.pop(output)) for name, output in signature.updates.items() if name not in by_rows}
        with uninterrupted():
            self.row_changes.note(self._row_writes, outputs)
            self._state |= following
            write_rows(self._row_writes, outputs, self._put)
        return outputs

    def _put(self, entry: str, indices: np.ndarray, rows: np.ndarray) -> None:
        self._state[entry][indices] = rows

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._run("evaluate", inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._run("predict", inputs, instead)

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self._state.items()}

    def state_entry(self, name: str) -> np.ndarray:
        return self._state[name].copy()

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return np.take(self._state[name], rows, axis=0)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._state = {name: _own(state[name]) for name in self._state}

    def _run(self, graph: str, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        run = self._loaded.get(graph)
        if run is None:
            run = self._loaded[graph] = self._load_step() if graph == "step" else self._load(graph)
        names = [entry.name for entry in self._signature[graph].inputs if entry.is_state]
        state = {name: self._state[instead.get(name, name)] for name in names}
        return run({**state, **inputs})

    def _load_step(self) -> LoadedModel:
        signature = self._signature["step"]
        if self._load_model is None or not written_by_rows(signature):
            return self._load("step")
        model = self._graphs.copy_of("step")
        self._row_writes = take_row_writes(model.graph, [entry.name for entry in signature.outputs], signature)
        return self._load_model(model, "step")


def _own(array: np.ndarray) -> np.ndarray:
    table = adopted(array)
    return np.array(array) if table is None else table


class InheritedRunner(ProgramRunner):
    """A runner in a forked process that refuses every call: the threads of its engine belong to the parent.

    Args:
        runner: the parent's runner. It is never freed here: that would wait for these threads.
    """

    def __init__(self, runner: ProgramRunner):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(runner))

    def step(self, inputs: Mapping[str, np.ndarray]) -> NoReturn:
        raise _refusal()

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> NoReturn:
        raise _refusal()

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> NoReturn:
        raise _refusal()

    def state(self) -> NoReturn:
        raise _refusal()

    def state_entry(self, name: str) -> NoReturn:
        raise _refusal()

    def load_state(self, state: Mapping[str, np.ndarray]) -> NoReturn:
        raise _refusal()


def _refusal() -> EngineError:
    return EngineError(
        f"The session was opened in another process, from which this one ({os.getpid()}) was forked: the threads of its "
        "engine do not live on here. Open a session in this process, Session(program, state=...) with a state that was taken "
        "before the fork, or start processes by multiprocessing's 'spawn'"
    )

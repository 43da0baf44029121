"""A program opened on ONNX Runtime, with the state in OrtValues.

A small state has two sets of buffers: a step reads one and writes the other through I/O binding; then they change roles. No
parameter is copied, and a failed step leaves the current set unchanged.

A large state has one. A step runs ``grad``, checks the loss, and runs ``apply``, which overwrites the present values if that is
safe (``analysis.in_place``).

An entry that a step updates in a few rows has one buffer: the step returns the rows, which are written after it has succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import onnx_ir as ir

from burnish.analysis.memory_plan import written_in_place
from burnish.engines.base import NOTHING, Arrays, HandedOver, ProgramRunner, uninterrupted
from burnish.engines.non_finite_loss import check_finite_loss
from burnish.engines.onnxruntime.bound_graph import BoundGraph, Buffer
from burnish.engines.onnxruntime.failures import description, has_bfloat16
from burnish.engines.onnxruntime.optimizations import OpenedGraph
from burnish.engines.row_writes import (
    RowChanges,
    RowWrite,
    RowWriter,
    signature_of_writes,
    take_row_writes,
    write_rows,
    written_by_rows,
)
from burnish.errors import EngineError
from burnish.files.mapped_tables import adopted
from burnish.graph import garbage_kept
from burnish.kernels.elementwise import FUSED_ELEMENTWISE, FUSED_ELEMENTWISE_GROUPS
from burnish.program.signature import Role, is_updated_in_place
from burnish.program.state import LazyArrays, blocks
from burnish.rewriting.change_dtypes import compute_in_float32

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs

ELEMENTWISE = (FUSED_ELEMENTWISE.name, FUSED_ELEMENTWISE_GROUPS.name)
"""Kernels whose results may overwrite operands."""


class _Opens(Protocol):
    def open_graph(
        self, model: ir.Model, graph: str, threads: int | None, *, rewrites: bool = True, in_turn: bool = False
    ) -> OpenedGraph: ...


class OnnxRuntimeRunner(ProgramRunner):
    """A program opened on ONNX Runtime. A session is made when a graph is first run, and again only if it is reopened."""

    def __init__(self, engine: _Opens, graphs: LoweredGraphs, state: Mapping[str, np.ndarray], threads: int | None):
        self._engine = engine
        self._graphs = graphs
        self._threads = threads
        self._signatures = dict(graphs.signature.graphs)
        self._row_writes: list[RowWrite] = []
        self.row_changes = RowChanges()
        by_rows = written_by_rows(self._signatures["step"])
        # An entry written by rows has only one buffer: it is as large as all others together.
        self._updates = {name: output for name, output in self._signatures["step"].updates.items() if name not in by_rows}
        self._in_place = self._applied() if _writes_in_place(graphs) else frozenset()
        self._training = ("grad", "apply") if self._in_place else ("step",)
        self._entries = {entry.name: entry for entry in graphs.signature.state}
        take = state.pop if isinstance(state, HandedOver) else state.__getitem__
        current = {name: Buffer.copy_of(take(name), entry) for name, entry in self._entries.items()}
        following = {
            name: Buffer.empty(buffer.array.shape, self._entries[name]) if self._has_two(name) else buffer
            for name, buffer in current.items()
        }
        self._sets = (current, following)
        self._current = 0
        self._failed_update: EngineError | None = None
        self._opened: dict[str, OpenedGraph] = {}
        self._bound_graphs: dict[tuple[str, tuple[tuple[str, str], ...]], BoundGraph] = {}

    def _applied(self) -> frozenset[str]:
        return frozenset(self._signatures["apply"].updates.keys() & self._updates.keys())

    def _has_two(self, name: str) -> bool:
        return name in self._updates and name not in self._in_place

    @property
    def route(self) -> str:
        return "gradients, then updates in place" if self._in_place else "one graph, with two buffers for the state"

    @property
    def row_writer(self) -> RowWriter:
        return self

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        if self._in_place:
            return self._step_in_place(inputs)
        outputs, _ = self._graph("step").run(self._current, inputs)
        check_finite_loss(self._signatures["step"], outputs, self._current_state)
        self._move_on(outputs)
        return outputs

    def _step_in_place(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        self._check_state()
        grad, apply = self.load_step()
        outputs, gradients = grad.run(self._current, inputs)
        check_finite_loss(self._signatures["step"], outputs, self._current_state)
        with uninterrupted():
            try:
                outputs |= apply.run(self._current, inputs, gradients)[0]
            except EngineError as error:
                self._failed_update = error
                self._check_state()
            self._move_on(outputs)
        return outputs

    def _check_state(self) -> None:
        """Raise EngineError if an update that overwrites the state failed."""
        if self._failed_update is not None:
            raise EngineError(
                f"The state is lost: its update failed{description(self._failed_update)} when a part of it was written over the "
                "present one. Load a state (load_state) or restore a checkpoint; if memory ran out, use a smaller batch"
            ) from self._failed_update

    def _move_on(self, outputs: Arrays) -> None:
        """Switch to the next state. Returned rows of state entries are removed from the outputs."""
        if not self._row_writes:
            self._current = 1 - self._current
            return
        with uninterrupted():
            self.row_changes.note(self._row_writes, outputs)
            write_rows(self._row_writes, outputs, self._put)
            self._current = 1 - self._current

    def _put(self, entry: str, indices: np.ndarray, rows: np.ndarray) -> None:
        self._sets[self._current][entry].array[indices] = rows

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        self._check_state()
        return self._graph("evaluate", instead).run(self._current, inputs)[0]

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        self._check_state()
        return self._graph("predict", instead).run(self._current, inputs)[0]

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self._current_state().items()}

    def state_entry(self, name: str) -> np.ndarray:
        self._check_state()
        return self._sets[self._current][name].array.copy()

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        self._check_state()
        return np.take(self._sets[self._current][name].array, rows, axis=0)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy into the other set, which becomes current when it is complete; most of the shared buffers do not change."""
        following = self._sets[1 - self._current]
        shared, replaced = {}, {}
        for name, buffer in following.items():
            array = state[name]
            if self._has_two(name):
                np.copyto(buffer.array, array, casting="no")
            elif adopted(array) is not None:
                continue  # it is this buffer's array, and its session fills it
            elif name in self._in_place and isinstance(state, LazyArrays):  # a later one may turn out to be missing
                replaced[name] = Buffer.copy_of(array, self._entries[name])
            elif not all(map(np.array_equal, blocks(buffer.array), blocks(array))):
                shared[name] = array
        with uninterrupted():
            for name, array in shared.items():
                np.copyto(following[name].array, array, casting="no")
            if replaced:
                self._replace_buffers(replaced, replaced)
            self._current = 1 - self._current
            self._failed_update = None

    def _replace_buffers(self, first: Mapping[str, Buffer], second: Mapping[str, Buffer]) -> None:
        for held, buffers in zip(self._sets, (first, second), strict=True):
            held.update(buffers)
        for bound in self._bound_graphs.values():
            bound.bind()

    @property
    def reopened(self) -> int:
        opened = self._opened.get(self._training[0])
        return 0 if opened is None else opened.reopened

    def reopen(self, reopened: int) -> None:
        if reopened:
            self._open(self._training[0]).reopen(reopened)

    def load_step(self) -> tuple[BoundGraph, ...]:
        """Load the graphs of a step, if necessary; return them in execution order."""
        return tuple(map(self._graph, self._training))

    def graphs_of_step(self) -> tuple[OpenedGraph, ...]:
        """The graphs of a step in execution order, as given to ONNX Runtime."""
        return tuple(map(self._open, self._training))

    def _current_state(self) -> Arrays:
        self._check_state()
        return {name: buffer.array for name, buffer in self._sets[self._current].items()}

    def _graph(self, graph: str, instead: Mapping[str, str] = NOTHING) -> BoundGraph:
        """Return a graph with its bindings; bindings that read other state entries share its session."""
        key = (graph, tuple(sorted(instead.items())))
        bound = self._bound_graphs.get(key)
        if bound is None:
            opened = self._open(graph)
            signature = self._signatures[graph]
            updates = signature.updates if graph in self._training else {}
            updates = {name: output for name, output in updates.items() if name in self._updates}
            bound = BoundGraph(_name_of(graph), opened, signature, self._sets, updates, instead)
            self._bound_graphs[key] = bound
        return bound

    @garbage_kept()
    def _open(self, graph: str) -> OpenedGraph:
        opened = self._opened.get(graph)
        if opened is None:
            model = self._updating_graph(graph) if graph in self._training else self._graphs[graph]
            if graph == "predict" and has_bfloat16(model):
                # The file itself has this dtype; if it is requested as a precision, an error says that there are no kernels.
                model = model.clone()
                compute_in_float32(model, keep_outputs=True)
            in_turn = graph in self._training and len(self._training) > 1
            opened = self._engine.open_graph(model, _name_of(graph), self._threads, rewrites=graph != "apply", in_turn=in_turn)
            if graph == "apply":
                self._take_second_buffers(opened.model.graph)
            self._opened[graph] = opened
        return opened

    def _take_second_buffers(self, apply: ir.Graph) -> None:
        """Add second buffers for entries that cannot be written in place in the actual graph."""
        safe = written_in_place(apply, self._signatures["apply"].updates, ELEMENTWISE)
        unsafe, self._in_place = self._in_place - safe, self._in_place & safe
        current, entries = self._sets[self._current], self._entries
        present = {name: current[name] for name in unsafe}
        others = {name: Buffer.empty(buffer.array.shape, entries[name]) for name, buffer in present.items()}
        self._replace_buffers(*((present, others) if self._current == 0 else (others, present)))

    def _updating_graph(self, graph: str) -> ir.Model:
        signature = self._signatures[graph]
        if not written_by_rows(signature):
            return self._graphs[graph]
        model = self._graphs.copy_of(graph)
        names = [entry.name for entry in signature.outputs]
        self._row_writes = take_row_writes(model.graph, names, signature)
        self._signatures[graph] = signature_of_writes(signature, self._row_writes)
        return model


def _writes_in_place(graphs: LoweredGraphs) -> bool:
    signatures = graphs.signature.graphs
    if not {"grad", "apply"} <= signatures.keys() or graphs.rewrites.get("step"):
        return False
    takes_text = any(entry.dtype == ir.DataType.STRING for entry in signatures["step"].inputs_of(Role.DATA, Role.LABEL))
    return not takes_text and is_updated_in_place(signatures["apply"])


def _name_of(graph: str) -> str:
    """Return the name of a graph in errors: the gradient graph is a part of the step."""
    return "step" if graph == "grad" else graph

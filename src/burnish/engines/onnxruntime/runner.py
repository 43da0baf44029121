"""A program opened on ONNX Runtime, with the state held in OrtValues and swapped each step.

Each state entry that a step updates has two buffers. A step reads the current set and writes the other through I/O binding;
then the sets change roles. No parameter is copied, and a step that fails leaves the current set untouched. An entry of which a
step updates a few rows has one buffer, in both sets: the step returns the rows, which are written there when it has succeeded.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.engines.base import NOTHING, Arrays, HandedOver, check_finite_loss
from burnish.engines.interrupts import uninterrupted
from burnish.engines.onnxruntime.failures import has_bfloat16, run_failure
from burnish.engines.onnxruntime.optimizations import OpenedGraph
from burnish.engines.row_writes import RowChanges, RowWrite, signature_of_writes, take_row_writes, written_by_rows
from burnish.formats.mapped_tables import adopted
from burnish.passes import compute_in_float32
from burnish.program.signature import Entry, GraphSignature, Role
from burnish.program.state import blocks

if TYPE_CHECKING:
    from burnish.compiler.executable import Executable

ALIGNMENT = 64


class _Opens(Protocol):
    def open_graph(self, model: ir.Model, graph: str, threads: int | None) -> OpenedGraph: ...


class OnnxRuntimeRunner:
    """A program opened on ONNX Runtime. A session is made when a graph is first run; again only where it is opened anew."""

    def __init__(self, engine: _Opens, executable: Executable, state: Mapping[str, np.ndarray], threads: int | None):
        self._engine = engine
        self._executable = executable
        self._threads = threads
        self._signatures = dict(executable.signature.graphs)
        self._row_writes: list[RowWrite] = []
        self.row_changes = RowChanges()
        by_rows = written_by_rows(self._signatures["step"])
        # What is written by rows has one buffer alone: it is as large as all else together.
        self._updates = {name: output for name, output in self._signatures["step"].updates.items() if name not in by_rows}
        entries = {entry.name: entry for entry in executable.signature.state}
        take = state.pop if isinstance(state, HandedOver) else state.__getitem__
        current = {name: _Buffer.copy_of(take(name), entry) for name, entry in entries.items()}
        following = {
            name: _Buffer.empty(buffer.array.shape, entries[name]) if name in self._updates else buffer
            for name, buffer in current.items()
        }
        self._sets = (current, following)
        self._current = 0
        self._opened: dict[str, OpenedGraph] = {}
        self._bound_graphs: dict[tuple[str, tuple[tuple[str, str], ...]], _BoundGraph] = {}

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        signature = self._signatures["step"]
        outputs = self._graph("step").run(self._current, inputs)
        check_finite_loss(signature, outputs, self._current_state)
        if self._row_writes:
            self._move_on(outputs)
        else:
            self._current = 1 - self._current
        return outputs

    def _move_on(self, outputs: Arrays) -> None:
        """Make the state the next one where a step returned rows of it, which are taken out of its outputs."""
        read = {write: (outputs[write.indices].reshape(-1), outputs[write.rows]) for write in self._row_writes}
        self.row_changes.note(self._row_writes, outputs)
        for write in self._row_writes:
            outputs.pop(write.indices, None)
            outputs.pop(write.rows, None)
        with uninterrupted():
            for write, (indices, rows) in read.items():
                self._sets[self._current][write.entry].array[indices] = rows
            self._current = 1 - self._current

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._graph("evaluate", instead).run(self._current, inputs)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._graph("predict", instead).run(self._current, inputs)

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self._current_state().items()}

    def state_entry(self, name: str) -> np.ndarray:
        return self._sets[self._current][name].array.copy()

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return np.take(self._sets[self._current][name].array, rows, axis=0)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Copy into the other set, which becomes the current one when all is there; what the two share mostly stays the same."""
        following = self._sets[1 - self._current]
        shared = {}
        for name, buffer in following.items():
            array = state[name]
            if name in self._updates:
                np.copyto(buffer.array, array, casting="no")
            elif adopted(array) is not None:
                continue  # it is this buffer's, and its session fills it
            elif not all(map(np.array_equal, blocks(buffer.array), blocks(array))):
                shared[name] = array
        for name, array in shared.items():
            np.copyto(following[name].array, array, casting="no")
        self._current = 1 - self._current

    @property
    def reopened(self) -> int:
        return self._opened["step"].reopened if "step" in self._opened else 0

    def reopen(self, reopened: int) -> None:
        if reopened:
            self._open("step").reopen(reopened)

    def session_of_step(self) -> onnxruntime.InferenceSession:
        """The session that runs steps, which ends its own profile."""
        return self._open("step").session

    def graph_of_step(self) -> ir.Model:
        """The step as ONNX Runtime was given it; not to be changed."""
        return self._open("step").model

    def _current_state(self) -> Arrays:
        return {name: buffer.array for name, buffer in self._sets[self._current].items()}

    def _graph(self, graph: str, instead: Mapping[str, str] = NOTHING) -> _BoundGraph:
        """The graph with its bindings; those that read other state entries instead share its session."""
        key = (graph, tuple(sorted(instead.items())))
        bound = self._bound_graphs.get(key)
        if bound is None:
            updates = self._updates if graph == "step" else {}
            opened = self._open(graph)
            bound = _BoundGraph(graph, opened, self._signatures[graph], self._sets, updates, instead)
            self._bound_graphs[key] = bound
        return bound

    def _open(self, graph: str) -> OpenedGraph:
        opened = self._opened.get(graph)
        if opened is None:
            model = self._graph_of_step() if graph == "step" else self._executable.graph(graph)
            if graph == "predict" and has_bfloat16(model):
                # It is the file's own dtype; whoever asks for it as a precision is told that there are no kernels.
                model = compute_in_float32(model.clone(), keep_outputs=True)
            opened = self._opened[graph] = self._engine.open_graph(model, graph, self._threads)
        return opened

    def _graph_of_step(self) -> ir.Model:
        """The step's graph, without what writes rows of the state where it has such."""
        signature = self._signatures["step"]
        if not written_by_rows(signature):
            return self._executable.graph("step")
        model = self._executable.copy_of("step")
        names = [entry.name for entry in signature.outputs]
        self._row_writes = take_row_writes(model.graph, names, signature)
        self._signatures["step"] = signature_of_writes(signature, self._row_writes)
        return model


class _Buffer:
    """An array and the OrtValue that shares its memory."""

    __slots__ = ("array", "value")

    def __init__(self, array: np.ndarray, entry: Entry):
        self.array = array
        self.value = _ort_value(array, entry)

    @classmethod
    def empty(cls, shape: tuple[int, ...], entry: Entry) -> _Buffer:
        """A buffer that begins on a cache line, which vector kernels read and write faster."""
        dtype = entry.numpy_dtype
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return cls(memory[start : start + size].view(dtype).reshape(shape), entry)

    @classmethod
    def copy_of(cls, array: np.ndarray, entry: Entry) -> _Buffer:
        """A buffer of an array's elements, in memory of its own; of a mapped table, in the table itself."""
        if (table := adopted(array)) is not None:
            return cls(table, entry)
        buffer = cls.empty(array.shape, entry)
        np.copyto(buffer.array, array, casting="no")
        return buffer


class _BoundGraph:
    """A graph with one binding per set of state buffers; a run rebinds only the batch and outputs that are not scalars."""

    def __init__(
        self,
        graph: str,
        opened: OpenedGraph,
        signature: GraphSignature,
        sets: tuple[dict[str, _Buffer], dict[str, _Buffer]],
        updates: Mapping[str, str],
        instead: Mapping[str, str] = NOTHING,
    ):
        self._graph = graph
        self._opened = opened
        self._signature, self._sets, self._updates, self._instead = signature, sets, updates, instead
        self._batch_inputs = signature.inputs_of(Role.DATA, Role.LABEL)
        self._takes_text = any(entry.dtype == ir.DataType.STRING for entry in self._batch_inputs)
        self._hyperparameters = {entry.name: _Buffer.empty((), entry) for entry in signature.inputs_of(Role.HYPERPARAMETER)}
        results = tuple(entry for entry in signature.outputs if entry.updates is None)
        reported = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC, Role.RATE)
        scalars = (entry for entry in results if entry.role in reported and entry.shape == ())
        self._scalars = {entry.name: _Buffer.empty((), entry) for entry in scalars}
        self._other_results = tuple(entry for entry in results if entry.name not in self._scalars)
        self._bound_session: onnxruntime.InferenceSession | None = None
        self._bindings: tuple[Any, ...] = ()
        self._bind(opened.session)

    def _bind(self, session: onnxruntime.InferenceSession) -> None:
        self._bindings = tuple(self._binding(session, self._sets[index], self._sets[1 - index]) for index in (0, 1))
        self._bound_session = session

    def _binding(self, session: onnxruntime.InferenceSession, current: dict[str, _Buffer], following: dict[str, _Buffer]) -> Any:
        binding = session.io_binding()
        for entry in self._signature.inputs:
            if entry.is_state:
                binding.bind_ortvalue_input(entry.name, current[self._instead.get(entry.name, entry.name)].value)
        for name, buffer in self._hyperparameters.items():
            binding.bind_ortvalue_input(name, buffer.value)
        for name, output in self._updates.items():
            binding.bind_ortvalue_output(output, following[name].value)
        for name, buffer in self._scalars.items():
            binding.bind_ortvalue_output(name, buffer.value)
        return binding

    def run(self, current: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run on state set ``current``; returns the outputs that are not state."""
        for name, buffer in self._hyperparameters.items():
            buffer.array[...] = inputs[name]
        try:
            self._opened.verify(lambda session: self._results(session, current, inputs))
            if self._takes_text:
                return self._opened.run(lambda session: self._run_plainly(session, current, inputs))
            batch = {entry.name: _ort_value(inputs[entry.name], entry) for entry in self._batch_inputs}
            return self._opened.run(lambda session: self._run(session, current, batch))
        except Exception as error:  # ONNX Runtime's errors share no base class of their own
            self._bind(self._opened.session)
            raise run_failure(self._graph, error, self._opened.model) from error

    def _run(self, session: onnxruntime.InferenceSession, current: int, batch: Mapping[str, onnxruntime.OrtValue]) -> Arrays:
        if session is not self._bound_session:
            self._bind(session)
        binding = self._bindings[current]
        for name, value in batch.items():
            binding.bind_ortvalue_input(name, value)
        for entry in self._other_results:
            binding.bind_output(entry.name, "cpu")
        session.run_with_iobinding(binding)
        outputs = {name: buffer.array.copy() for name, buffer in self._scalars.items()}
        if self._other_results:
            values = binding.get_outputs()[-len(self._other_results) :]
            outputs |= {entry.name: _copy(value, entry) for entry, value in zip(self._other_results, values, strict=True)}
        return outputs

    def _run_plainly(self, session: onnxruntime.InferenceSession, current: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run without a binding: ONNX Runtime makes no OrtValues of text, and copies what it returns."""
        results = self._results(session, current, inputs)
        for name, output in self._updates.items():
            self._sets[1 - current][name].array[...] = results.pop(output)
        return {name: np.asarray(result) for name, result in results.items()}

    def _results(self, session: onnxruntime.InferenceSession, current: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """All outputs of a run that writes to no buffer."""
        present = self._sets[current]
        read = (entry.name for entry in self._signature.inputs if entry.is_state)
        buffers = {name: present[self._instead.get(name, name)] for name in read} | self._hyperparameters
        names = [entry.name for entry in self._signature.outputs]
        if self._takes_text:
            feeds = {name: buffer.array for name, buffer in buffers.items()}
            feeds |= {entry.name: inputs[entry.name] for entry in self._batch_inputs}
            return dict(zip(names, session.run(names, feeds), strict=True))
        values = {name: buffer.value for name, buffer in buffers.items()}
        values |= {entry.name: _ort_value(inputs[entry.name], entry) for entry in self._batch_inputs}
        results = session.run_with_ort_values(names, values)
        return {entry.name: _copy(value, entry) for entry, value in zip(self._signature.outputs, results, strict=True)}


def _ort_value(array: np.ndarray, entry: Entry) -> onnxruntime.OrtValue:
    """Wrap an array without copying it."""
    if array.dtype.isbuiltin == 1:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(entry.dtype))


def _copy(value: onnxruntime.OrtValue, entry: Entry) -> np.ndarray:
    """Return a copy that outlives the binding; through the address for types that numpy has no name for (bfloat16)."""
    if entry.numpy_dtype.isbuiltin == 1:
        return np.array(value.numpy())
    shape, dtype = value.shape(), entry.numpy_dtype
    memory = (ctypes.c_char * (dtype.itemsize * math.prod(shape))).from_address(value.data_ptr())
    return np.frombuffer(memory, dtype=dtype).reshape(shape).copy()

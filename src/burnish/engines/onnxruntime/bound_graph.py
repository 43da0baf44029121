"""A graph that is bound to the buffers of the state."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.engines.base import NOTHING, Arrays
from burnish.engines.onnxruntime.failures import run_failure
from burnish.engines.onnxruntime.optimizations import OpenedGraph
from burnish.files.mapped_tables import adopted
from burnish.program.signature import GRADIENT_ROLES, Entry, GraphSignature, Role
from burnish.stopping import stoppable

ALIGNMENT = 64
LARGEST_COPIED_INPUT = 2**18
"""The size in bytes up to which copying an input into a bound buffer is faster than binding it."""
Values = dict[str, onnxruntime.OrtValue]
NO_VALUE = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(0, np.float32))
"""The value of an input between two runs, so that no memory of the real one is held."""
NO_VALUES: Values = {}


class Buffer:
    """An array and the OrtValue that shares its memory."""

    __slots__ = ("array", "value")

    def __init__(self, array: np.ndarray, entry: Entry):
        self.array = array
        self.value = _ort_value(array, entry)

    @classmethod
    def empty(cls, shape: tuple[int, ...], entry: Entry) -> Buffer:
        """Return a buffer that starts on a cache line, which vector kernels access faster."""
        dtype = entry.numpy_dtype
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return cls(memory[start : start + size].view(dtype).reshape(shape), entry)

    @classmethod
    def copy_of(cls, array: np.ndarray, entry: Entry) -> Buffer:
        """Return a buffer with a copy of an array; for a mapped table, the table itself."""
        if (table := adopted(array)) is not None:
            return cls(table, entry)
        buffer = cls.empty(array.shape, entry)
        np.copyto(buffer.array, array, casting="no")
        return buffer


class BoundGraph:
    """A graph with one binding per set of state buffers; a run rebinds only large inputs and non-scalar outputs.

    Smaller inputs are copied into buffers that stay bound as long as their shapes do not change.
    """

    def __init__(
        self,
        graph: str,
        opened: OpenedGraph,
        signature: GraphSignature,
        sets: tuple[dict[str, Buffer], dict[str, Buffer]],
        updates: Mapping[str, str],
        instead: Mapping[str, str] = NOTHING,
    ):
        self._graph = graph
        self._opened = opened
        self._options = run_options()
        self._signature, self._sets, self._updates, self._instead = signature, sets, updates, instead
        self._batch_inputs = signature.inputs_of(Role.DATA, Role.LABEL, Role.SAMPLES)
        self._takes_text = any(entry.dtype == ir.DataType.STRING for entry in self._batch_inputs)
        self._hyperparameters = {entry.name: Buffer.empty((), entry) for entry in signature.inputs_of(Role.HYPERPARAMETER)}
        results = tuple(entry for entry in signature.outputs if entry.updates is None)
        reported = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC, Role.RATE)
        scalars = (entry for entry in results if entry.role in reported and entry.shape == ())
        self._scalars = {entry.name: Buffer.empty((), entry) for entry in scalars}
        # Row writes also have indices and rows, together with updates: these are returned as arrays.
        handed_on = () if any(entry.role is Role.STEP for entry in signature.outputs) else GRADIENT_ROLES
        self._gradients = tuple(entry for entry in results if entry.role in handed_on)
        self._other_results = tuple(
            entry for entry in results if entry.name not in self._scalars and entry not in self._gradients
        )
        self._read_gradients = signature.inputs_of(*GRADIENT_ROLES)
        self._bound_session: onnxruntime.InferenceSession | None = None
        self._bindings: tuple[Any, ...] = ()
        self._input_buffers: dict[str, Buffer] = {}
        self.bind()

    def bind(self) -> None:
        self._bind(self._opened.session)

    def _bind(self, session: onnxruntime.InferenceSession) -> None:
        self._bindings = tuple(self._binding(session, self._sets[index], self._sets[1 - index]) for index in (0, 1))
        self._bound_session = session
        self._input_buffers = {}

    def _binding(self, session: onnxruntime.InferenceSession, current: dict[str, Buffer], following: dict[str, Buffer]) -> Any:
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
        self._release_gradients(binding)
        return binding

    def _release_gradients(self, binding: Any) -> None:
        for entry in self._read_gradients:
            binding.bind_ortvalue_input(entry.name, NO_VALUE)
        for entry in self._gradients:
            binding.bind_output(entry.name, "cpu")

    def run(self, current: int, inputs: Mapping[str, np.ndarray], gradients: Values = NO_VALUES) -> tuple[Arrays, Values]:
        """Run on a state set; return the outputs that are not state, and the gradients in memory of ONNX Runtime.

        Args:
            current: number of the set.
            inputs: data, labels and hyperparameters.
            gradients: by name, the gradients that the graph reads.
        """
        opened = self._opened
        for name, buffer in self._hyperparameters.items():
            buffer.array[...] = inputs[name]
        try:
            opened.verify(lambda session: self._results(session, current, inputs))
            if self._takes_text:
                return opened.run(lambda session: self._run_plainly(session, current, inputs)), {}
            read = {entry.name: gradients[entry.name] for entry in self._read_gradients}
            if opened.exchanges is not None:
                return opened.run(lambda session: self._run(session, current, inputs, read))
            try:
                return self._run(opened.session, current, inputs, read)
            except Exception as error:
                return opened.run_with_fewer(lambda session: self._run(session, current, inputs, read), error)
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            self._bind(opened.session)
            if opened.exchanges is not None and opened.exchanges.raised(error):
                raise
            raise run_failure(self._graph, error, opened.model) from error

    def _run(
        self, session: onnxruntime.InferenceSession, current: int, inputs: Mapping[str, np.ndarray], gradients: Values
    ) -> tuple[Arrays, Values]:
        if session is not self._bound_session:
            self._bind(session)
        binding = self._bindings[current]
        for entry in self._batch_inputs:
            self._bind_input(binding, entry, inputs[entry.name])
        for name, value in gradients.items():
            binding.bind_ortvalue_input(name, value)
        for entry in self._other_results:
            binding.bind_output(entry.name, "cpu")
        if self._graph == "apply":  # it may overwrite the state
            session.run_with_iobinding(binding)
        else:
            stoppable(self._options, self._graph, session.run_with_iobinding, binding, self._options)
        outputs = {name: buffer.array.copy() for name, buffer in self._scalars.items()}
        computed = self._gradients + self._other_results  # in the order of their first binding
        values = (
            dict(zip((entry.name for entry in computed), binding.get_outputs()[-len(computed) :], strict=True))
            if computed
            else {}
        )
        outputs |= {entry.name: _copy(values.pop(entry.name), entry) for entry in self._other_results}
        self._release_gradients(binding)
        return outputs, values

    def _bind_input(self, binding: Any, entry: Entry, array: np.ndarray) -> None:
        if array.nbytes > LARGEST_COPIED_INPUT:
            self._input_buffers.pop(entry.name, None)
            binding.bind_ortvalue_input(entry.name, _ort_value(array, entry))
            return
        buffer = self._input_buffers.get(entry.name)
        if buffer is None or buffer.array.shape != array.shape:
            buffer = self._input_buffers[entry.name] = Buffer.empty(array.shape, entry)
            for each in self._bindings:
                each.bind_ortvalue_input(entry.name, buffer.value)
        np.copyto(buffer.array, array, casting="no")

    def _run_plainly(self, session: onnxruntime.InferenceSession, current: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run without a binding, for text: ONNX Runtime makes no OrtValues of it, and copies its results."""
        results = self._results(session, current, inputs)
        for name, output in self._updates.items():
            self._sets[1 - current][name].array[...] = results.pop(output)
        return {name: np.asarray(result) for name, result in results.items()}

    def _results(self, session: onnxruntime.InferenceSession, current: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
        present = self._sets[current]
        read = (entry.name for entry in self._signature.inputs if entry.is_state)
        buffers = {name: present[self._instead.get(name, name)] for name in read} | self._hyperparameters
        names = [entry.name for entry in self._signature.outputs]
        if self._takes_text:
            feeds = {name: buffer.array for name, buffer in buffers.items()}
            feeds |= {entry.name: inputs[entry.name] for entry in self._batch_inputs}
            return dict(zip(names, run_stoppably(self._graph, session.run, names, feeds), strict=True))
        values = {name: buffer.value for name, buffer in buffers.items()}
        values |= {entry.name: _ort_value(inputs[entry.name], entry) for entry in self._batch_inputs}
        results = run_stoppably(self._graph, session.run_with_ort_values, names, values)
        return {entry.name: _copy(value, entry) for entry, value in zip(self._signature.outputs, results, strict=True)}


def _ort_value(array: np.ndarray, entry: Entry) -> onnxruntime.OrtValue:
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


Result = TypeVar("Result")


def run_options() -> onnxruntime.RunOptions:
    """Return the options of a run, whose ``terminate`` stops it."""
    options = onnxruntime.RunOptions()
    # This is the default. If it is not set, ONNX Runtime takes ten times as long to look it up in each run.
    options.add_run_config_entry("gpu_graph_id", "0")
    return options


def run_stoppably(graph: str, run: Callable[..., Result], *arguments: Any) -> Result:
    """Run a method of a session that takes ``RunOptions`` as its last argument; return its result.

    Args:
        graph: name of the graph, for messages.
        run: the method; it changes no state.
        arguments: arguments of the method, without the options.

    Raises:
        RunStopped: it was stopped.
    """
    options = run_options()
    return stoppable(options, graph, run, *arguments, options)

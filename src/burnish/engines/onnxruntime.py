"""The default engine: stock ONNX Runtime on the CPU, with the state held in OrtValues and swapped each step.

Each state entry that a step updates has two buffers. A step reads the current set and writes the other through I/O binding;
then the sets change roles. No parameter is copied, and a step that fails leaves the current set untouched.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.engines.base import NOTHING, Arrays, LoadedModel, check_finite_loss
from burnish.errors import EngineError
from burnish.program.persistence import fits_one_file, model_bytes, save_model
from burnish.program.signature import Entry, GraphSignature, Role

if TYPE_CHECKING:
    from burnish.program import Program

Optimization = Literal["none", "basic", "extended", "all"]
ALIGNMENT = 64
SILENT = 4

_LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_ORDERS = {
    "default": onnxruntime.ExecutionOrder.DEFAULT,
    "priority": onnxruntime.ExecutionOrder.PRIORITY_BASED,
}
_ARENA_STRATEGIES = {"next_power_of_two": 0, "same_as_requested": 1}


class OnnxRuntimeEngine:
    """Runs programs on stock ONNX Runtime.

    Same program, state, batches and ``threads``: bitwise the same results on the same machine.

    Args:
        optimization: how far ONNX Runtime may rewrite the graphs when it loads them.
        arena: how its memory arena grows: by what is asked for (``same_as_requested``), or by regions that double
            (``next_power_of_two``); ``none`` returns every buffer to the operating system at once, which is slower. The arena
            is shared by all sessions of the process: the first engine that opens a session decides between the first two.
        memory_pattern: plan the buffers of a step as one block when shapes repeat; nearly twice the memory on a residual
            network, at the same speed.
        execution_order: order of independent nodes: ``default`` or ``priority``, whose peak memory was a fifth lower on a
            residual network, at the same speed.
        spinning: let idle threads wait actively; faster steps, at the cost of what else runs on the machine.
        config: further ONNX Runtime session configuration entries, by key.
    """

    name = "onnxruntime"

    def __init__(
        self,
        optimization: Optimization = "all",
        *,
        arena: Literal["same_as_requested", "next_power_of_two", "none"] = "same_as_requested",
        memory_pattern: bool = False,
        execution_order: Literal["default", "priority"] = "priority",
        spinning: bool = True,
        config: Mapping[str, str] | None = None,
    ):
        for option, value, choices in (
            ("optimization", optimization, [*_LEVELS]),
            ("arena", arena, [*_ARENA_STRATEGIES, "none"]),
            ("execution_order", execution_order, [*_ORDERS]),
        ):
            if value not in choices:
                raise EngineError(f"{option}={value!r} is not one of {', '.join(choices)}")
        self.optimization = optimization
        self.arena = arena
        self.memory_pattern = memory_pattern
        self.execution_order = execution_order
        self.spinning = spinning
        self.config = dict(config or {})

    def open(
        self, program: Program, state: Mapping[str, np.ndarray], *, device: str | None = None, threads: int | None = None
    ) -> OnnxRuntimeRunner:
        """Open a program with copies of ``state``; graphs are loaded when they are first run.

        Args:
            program: the program.
            state: every state entry by name.
            device: ``cpu`` or None.
            threads: threads used inside one operator; None leaves it to ONNX Runtime (the physical cores).

        Raises:
            EngineError: ``device`` is not ``cpu``, or ``threads`` is no whole number of at least one.
        """
        if device not in (None, "cpu"):
            raise EngineError(f"The onnxruntime engine runs on device 'cpu' only, not on '{device}': leave device out")
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise EngineError(f"threads={threads!r}: give a whole number of at least one, or leave it out for all cores")
        return OnnxRuntimeRunner(self, program, state, threads)

    def load(self, model: ir.Model) -> LoadedModel:
        """Load a model, to be run any number of times.

        Raises:
            EngineError: ONNX Runtime cannot load the model, or, from what is returned, cannot run it.
        """
        session = self.inference_session(model)
        names = [output.name for output in session.get_outputs()]

        def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
            try:
                results = session.run(names, dict(inputs))
            except Exception as error:  # ONNX Runtime's errors share no base class of their own
                raise _run_failure("model", error) from error
            return dict(zip(names, results, strict=True))

        return run

    def run(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run a model once; returns its outputs by name.

        Raises:
            EngineError: ONNX Runtime cannot load or run the model.
        """
        return self.load(model)(inputs)

    def inference_session(
        self, model: ir.Model, graph: str = "model", threads: int | None = None
    ) -> onnxruntime.InferenceSession:
        """Load a model into an ONNX Runtime session with this engine's options; ``graph`` names it in errors."""
        options = self._session_options(threads)
        try:
            if fits_one_file(model):
                return onnxruntime.InferenceSession(model_bytes(model), options, providers=["CPUExecutionProvider"])
            with tempfile.TemporaryDirectory(prefix="burnish-") as directory:
                path = Path(directory, f"{graph}.onnx")
                save_model(model, path)
                return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors share no base class of their own
            raise _load_failure(graph, error, model) from error

    def _session_options(self, threads: int | None) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = _LEVELS[self.optimization]
        options.execution_order = _ORDERS[self.execution_order]
        options.use_deterministic_compute = True
        options.intra_op_num_threads = threads or 0
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = self.memory_pattern
        options.enable_cpu_mem_arena = self.arena != "none"
        options.log_severity_level = SILENT
        if not self.spinning:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.arena != "none":
            _register_shared_arena(_ARENA_STRATEGIES[self.arena])
            options.add_session_config_entry("session.use_env_allocators", "1")
        for key, value in self.config.items():
            options.add_session_config_entry(key, value)
        return options


class OnnxRuntimeRunner:
    """A program opened on ONNX Runtime. Sessions are made when a graph is first run, and never again."""

    def __init__(self, engine: OnnxRuntimeEngine, program: Program, state: Mapping[str, np.ndarray], threads: int | None):
        self._engine = engine
        self._program = program
        self._threads = threads
        self._updates = program.signature["step"].updates
        entries = {entry.name: entry for entry in program.signature.state}
        current = {name: _Buffer.copy_of(state[name], entry) for name, entry in entries.items()}
        following = {
            name: _Buffer.empty(buffer.array.shape, entries[name]) if name in self._updates else buffer
            for name, buffer in current.items()
        }
        self._sets = (current, following)
        self._current = 0
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._graphs: dict[tuple[str, tuple[tuple[str, str], ...]], _BoundGraph] = {}

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        signature = self._program.signature["step"]
        outputs = self._graph("step").run(self._current, inputs)
        check_finite_loss(signature, outputs, self._arrays)
        self._current = 1 - self._current
        return outputs

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._graph("evaluate", instead).run(self._current, inputs)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._graph("predict", instead).run(self._current, inputs)

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self._arrays().items()}

    def state_entry(self, name: str) -> np.ndarray:
        return self._sets[self._current][name].array.copy()

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, array in self._arrays().items():
            np.copyto(array, state[name], casting="no")

    def _arrays(self) -> Arrays:
        return {name: buffer.array for name, buffer in self._sets[self._current].items()}

    def _graph(self, graph: str, instead: Mapping[str, str] = NOTHING) -> _BoundGraph:
        """The graph with its bindings; those that read other state entries instead share its session."""
        key = (graph, tuple(sorted(instead.items())))
        bound = self._graphs.get(key)
        if bound is None:
            session = self._sessions.get(graph)
            if session is None:
                session = self._sessions[graph] = self._engine.inference_session(
                    self._program.graphs[graph], graph, self._threads
                )
            updates = self._updates if graph == "step" else {}
            bound = _BoundGraph(graph, session, self._program.signature[graph], self._sets, updates, instead)
            self._graphs[key] = bound
        return bound


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
        buffer = cls.empty(array.shape, entry)
        np.copyto(buffer.array, array, casting="no")
        return buffer


class _BoundGraph:
    """A session with one binding per set of state buffers; a run rebinds only the batch and outputs that are not scalars."""

    def __init__(
        self,
        graph: str,
        session: onnxruntime.InferenceSession,
        signature: GraphSignature,
        sets: tuple[dict[str, _Buffer], dict[str, _Buffer]],
        updates: Mapping[str, str],
        instead: Mapping[str, str] = NOTHING,
    ):
        self._graph = graph
        self._session = session
        self._fed = signature.inputs_of(Role.DATA, Role.LABEL)
        self._hyperparameters = {entry.name: _Buffer.empty((), entry) for entry in signature.inputs_of(Role.HYPERPARAMETER)}
        results = tuple(entry for entry in signature.outputs if entry.updates is None)
        reported = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC, Role.RATE)
        scalars = (entry for entry in results if entry.role in reported and entry.shape == ())
        self._fixed = {entry.name: _Buffer.empty((), entry) for entry in scalars}
        self._varying = tuple(entry for entry in results if entry.name not in self._fixed)
        self._bindings = tuple(self._bind(signature, sets[index], sets[1 - index], updates, instead) for index in (0, 1))

    def _bind(
        self,
        signature: GraphSignature,
        held: dict[str, _Buffer],
        following: dict[str, _Buffer],
        updates: Mapping[str, str],
        instead: Mapping[str, str],
    ) -> Any:
        binding = self._session.io_binding()
        for entry in signature.inputs:
            if entry.is_state:
                binding.bind_ortvalue_input(entry.name, held[instead.get(entry.name, entry.name)].value)
        for name, buffer in self._hyperparameters.items():
            binding.bind_ortvalue_input(name, buffer.value)
        for name, output in updates.items():
            binding.bind_ortvalue_output(output, following[name].value)
        for name, buffer in self._fixed.items():
            binding.bind_ortvalue_output(name, buffer.value)
        return binding

    def run(self, current: int, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run on state set ``current``; returns the outputs that are not state."""
        binding = self._bindings[current]
        for name, buffer in self._hyperparameters.items():
            buffer.array[...] = inputs[name]
        fed = {entry.name: _ort_value(inputs[entry.name], entry) for entry in self._fed}
        try:
            for name, value in fed.items():
                binding.bind_ortvalue_input(name, value)
            for entry in self._varying:
                binding.bind_output(entry.name, "cpu")
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime's errors share no base class of their own
            raise _run_failure(self._graph, error) from error
        outputs = {name: buffer.array.copy() for name, buffer in self._fixed.items()}
        if self._varying:
            values = binding.get_outputs()[-len(self._varying) :]
            outputs |= {entry.name: _copy(value, entry) for entry, value in zip(self._varying, values, strict=True)}
        return outputs


def _ort_value(array: np.ndarray, entry: Entry) -> onnxruntime.OrtValue:
    """Wrap an array without copying it."""
    if array.dtype.isbuiltin == 1:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(entry.dtype))


def _copy(value: onnxruntime.OrtValue, entry: Entry) -> np.ndarray:
    """Return a copy that outlives the binding; through the address for types that numpy has no name for (bfloat16)."""
    if entry.numpy_dtype.isbuiltin == 1:
        return np.array(value.numpy())
    memory = (ctypes.c_char * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    return np.frombuffer(memory, dtype=entry.numpy_dtype).reshape(value.shape()).copy()


_arena_is_registered = False


def _register_shared_arena(strategy: int) -> None:
    """Register the arena that all sessions of the process share, once: the first strategy asked for is the one.

    A session's own arena doubles its regions, and each session has its own: evaluation would add its peak to training's.
    """
    global _arena_is_registered
    if _arena_is_registered:
        return
    information = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    with contextlib.suppress(Exception):  # it fails when the host program has registered its own: then that one serves
        onnxruntime.create_and_register_allocator(information, onnxruntime.OrtArenaCfg({"arena_extend_strategy": strategy}))
    _arena_is_registered = True


def _load_failure(graph: str, error: Exception, model: ir.Model) -> EngineError:
    remedy = "Update onnxruntime if the graph is newer than it, or try engine='reference', which is slow but complete"
    if re.search(r"NOT_IMPLEMENTED|Could not find an implementation", str(error)):
        if _has_bfloat16(model):
            found = re.search(r"implementation for (\w+)", str(error))
            operator = found[1] if found else "one of its operators"
            return EngineError(
                f"ONNX Runtime {onnxruntime.__version__} cannot load the {graph} graph{_node_of(error)}: on the CPU it has no "
                f"bfloat16 kernel of {operator}. Compile with precision='float16' or 'float32', or use engine='torch', or "
                "'reference', which is slow but complete"
            )
        remedy = (
            "It has no kernel of this operator for this dtype: use a float32 model, or engine='reference', which is slow but "
            "complete"
        )
    return EngineError(
        f"ONNX Runtime {onnxruntime.__version__} cannot load the {graph} graph{_node_of(error)}: {_reason(error)}. {remedy}"
    )


def _has_bfloat16(model: ir.Model) -> bool:
    outputs = (value for node in model.graph for value in node.outputs)
    return any(value.dtype == ir.DataType.BFLOAT16 for value in (*model.graph.inputs, *outputs))


def _run_failure(graph: str, error: Exception) -> EngineError:
    return EngineError(
        f"ONNX Runtime {onnxruntime.__version__} failed in the {graph} graph{_node_of(error)}: {_reason(error)}. "
        "No state has changed. If memory ran out, use a smaller batch; otherwise try "
        "OnnxRuntimeEngine(optimization='basic'), which rewrites less of the graph"
    )


def _reason(error: Exception) -> str:
    """Return ONNX Runtime's message without its prefix of codes, on one line."""
    message = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    return " ".join(message.split()).rstrip(".")


NODE_IN_MESSAGE = (
    r"running (?P<operator>\S+) node\. Name:'(?P<name>[^']*)'",
    r"implementation for (?P<operator>\w+)\(\d+\) node with name '(?P<name>[^']*)'",
    r"In Node, \(\"(?P<name>[^\"]*)\", (?P<operator>\w+),",
    r"of node \(?'?(?P<name>[^'():]+?)'? \((?:\w*::)?(?P<operator>\w+)",
    r"(?P<name>)\b(?P<operator>\w+:\w+)\(-?\d+\) is not a registered",
)


def _node_of(error: Exception) -> str:
    """Return `` at Conv 'name'`` when ONNX Runtime's message names a node."""
    for pattern in NODE_IN_MESSAGE:
        found = re.search(pattern, str(error))
        if found:
            return f" at {found['operator']}" + (f" '{found['name']}'" if found["name"] else "")
    return ""

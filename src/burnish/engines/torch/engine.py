"""The PyTorch engine: runs a program's graphs as PyTorch calls, without autograd, with the state in tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from burnish.engines.base import (
    NOTHING,
    Arrays,
    HandedOver,
    LoadedModel,
    ProgramRunner,
    RunsModels,
    check_threads,
    uninterrupted,
)
from burnish.engines.communicator import COLLECTIVES, Communicator
from burnish.engines.non_finite_loss import check_finite_loss
from burnish.engines.row_writes import RowChanges, RowWrite, RowWriter, take_row_writes, write_rows, written_by_rows
from burnish.engines.split_graph import keep_exchange_order
from burnish.engines.torch import native as kernels
from burnish.engines.torch import operators as _operators  # noqa: F401  # registers the translations
from burnish.engines.torch.bindings.embedding import RowUpdates, noted, take_row_updates
from burnish.engines.torch.bindings.precision import widened
from burnish.engines.torch.fusion import FUSED, Compilation, KernelChoice, prepared
from burnish.engines.torch.runtime import kernel_choice, memory
from burnish.engines.torch.runtime.capture import CudaRecorder, RecordedStep, Recorder
from burnish.engines.torch.runtime.devices import cuda_settings, device_of
from burnish.engines.torch.runtime.inductor import CompiledGraph, InPlaceStep, check_compiler, laid_out_as
from burnish.engines.torch.state_updates import (
    StateUpdate,
    Update,
    copied_entries,
    copy_out_of,
    lying_in_exchange_buffers,
    lying_in_inputs,
    run_taken,
    take_increments,
    take_updates,
)
from burnish.engines.torch.translate.dtypes import array_of, mapped_tensor_of, tensor_of, torch_dtype, view_of
from burnish.engines.torch.translate.failures import failure, place_of
from burnish.engines.torch.translate.rules import translated_operators
from burnish.engines.torch.translate.translation import translate
from burnish.errors import EngineError
from burnish.files.mapped_tables import adopted
from burnish.graph import BURNISH_DOMAIN, attribute_value, garbage_kept
from burnish.kernels.building import level_of
from burnish.operators.normalization.batch import BATCH_NORM_TRAINING
from burnish.stopping import PythonStop, in_python, stoppable
from burnish.targets import TARGETS, Target

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs
    from burnish.program.signature import Entry

Tensors = dict[str, torch.Tensor]
Runnable = Callable[..., tuple[torch.Tensor, ...]]
Result = TypeVar("Result")

_NULL_CONTEXT = nullcontext()

REFUSALS = (RuntimeError, ValueError, IndexError, TypeError, MemoryError)
"""The errors of PyTorch when it refuses to run a graph."""

FREED_AT_ONCE = 1 << 26
"""Bytes of a handed-over state after which freed memory is returned to the system."""


class TorchEngine(RunsModels):
    """The engine that runs programs on PyTorch's kernels.

    Args:
        device: default device: ``cpu``, ``cuda``, ``cuda:1``.
        compile: parts to compile. ``regions``: parts of a graph as the engine's own kernels, where a program has their form; they
            are built once (``kernels``), and without a compiler ATen's operators run instead. ``inductor``: each graph as a
            whole, by Inductor, when it is first run. ``none``: nothing, only ATen's operators.
        channels_last: True stores images and the kernels of convolutions with channels last, the fastest layout for PyTorch's
            convolutions.
        keep_pages: True keeps the memory of a step for the next, and refuses steps that do not fit (``memory``).
        winograd: True computes float32 convolutions of 3x3 and their gradients by Winograd's minimal filtering if that is faster,
            on a CPU, with ``compile="regions"`` and ``channels_last``; False leaves them to PyTorch's direct convolutions.
        kernel_choice: computation of float32 convolutions of unusual forms, on a CPU, with ``compile="regions"`` and
            ``channels_last``. ``measured``: the fastest of several ways, measured once for their sizes and remembered on this
            machine (``kernel_choice``). ``fixed``: always the same way, so that the bits of a result do not depend on
            measurements. On CUDA, ``measured`` lets cuDNN time its algorithms in the first steps.
        tf32: True multiplies float32 matrices and images in TensorFloat-32, with 10 bits of mantissa, on CUDA.
        capture: True records the step as one CUDA graph per shape of the batch, on CUDA (``capture``).

    Raises:
        EngineError: ``compile`` or ``kernel_choice`` has another value.
    """

    name = "torch"

    def __init__(
        self,
        device: str = "cpu",
        *,
        compile: Compilation = "regions",
        channels_last: bool = True,
        keep_pages: bool = True,
        winograd: bool = True,
        kernel_choice: KernelChoice = "measured",
        tf32: bool = False,
        capture: bool = True,
    ):
        if compile not in get_args(Compilation):
            choices = ", ".join(map(repr, get_args(Compilation)))
            raise EngineError(f"compile={compile!r}: the torch engine compiles one of {choices}; leave it out for 'regions'")
        if kernel_choice not in get_args(KernelChoice):
            choices = " or ".join(map(repr, get_args(KernelChoice)))
            raise EngineError(f"kernel_choice={kernel_choice!r}: the torch engine takes {choices}; leave it out for 'measured'")
        self.device = device
        self.compile = compile
        self.channels_last = channels_last
        self.keep_pages = keep_pages
        self.winograd = winograd
        self.kernel_choice = kernel_choice
        self.tf32 = tf32
        self.capture = capture
        if compile == "regions" and device == "cpu":
            kernels.expected()  # compiles in the background if an engine is made before its program

    @property
    def target(self) -> Target:
        """ATen's kernels, and the engine's own if it compiles regions."""
        operators = translated_operators(BURNISH_DOMAIN) | (FUSED if self.compile == "regions" else set())
        return replace(TARGETS["onnxruntime"], name=self.name, kernels=operators - COLLECTIVES, collectives=COLLECTIVES)

    def open(
        self,
        graphs: LoweredGraphs,
        state: Mapping[str, np.ndarray],
        *,
        device: str | None = None,
        threads: int | None = None,
        communicator: Communicator | None = None,
    ) -> TorchRunner:
        """Open a program with copies of ``state``; graphs are translated when they are first run.

        Args:
            graphs: graphs of the program, lowered to this engine's target; with collectives if there is a communicator.
            state: every state entry by name.
            device: device name of PyTorch; None is the engine's.
            threads: threads inside one operator, for the whole process; None keeps PyTorch's setting.
            communicator: connection to the other workers.

        Raises:
            EngineError: the device does not exist, ``threads`` is not an integer from 1 to 1024, or ``compile="inductor"`` finds
                no compiler, or is combined with a communicator.
        """
        check_threads(threads)
        place = device_of(self.device if device is None else device)
        if communicator is not None and self.compile == "inductor":
            raise EngineError(
                "compile='inductor' compiles a graph as a whole, and exchanges with other workers cannot be part of that: leave "
                "compile out for training with parallel=..."
            )
        if self.compile == "inductor":
            check_compiler(place, "compile='inductor'")
        return TorchRunner(self, graphs, state, place, threads, communicator)

    def describe(self, device: str | None = None, threads: int | None = None) -> dict[str, Any]:
        """Return a description of this engine's sessions (``burnish.engines.base.described``); wait for kernels being built."""
        found: dict[str, Any] = {"threads": threads or torch.get_num_threads()}
        if self.compile != "regions":
            return found | {"kernels_reason": f"compile='{self.compile}' goes without them"}
        if device_of(self.device if device is None else device).type != "cpu":
            return found | {"kernels_reason": "they are for the CPU"}
        path, reason = kernels.found()
        if path is None:
            return found | {"kernels_reason": reason}
        level = level_of(path, kernels.sources()[kernels.EARLY[0]])
        return found | {"kernels": str(path), "kernels_reason": None, "level": level}

    def load(self, model: ir.Model, threads: int | None = None) -> LoadedModel:
        """Translate a model, to be run repeatedly; ``threads`` is as for ``open``.

        Raises:
            EngineError: an operator or a dtype has no translation, ``threads`` is not an integer from 1 to 1024, or, from the
                returned callable, an operator fails.
        """
        check_threads(threads)
        device = device_of(self.device)
        graph_inputs = {value.name or "": value for value in model.graph.inputs}
        for name, value in graph_inputs.items():
            if value.dtype is not None:
                torch_dtype(value.dtype, f"The input '{name}'")
        module = _without_autograd(translate(widened(model, device), device))

        def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
            _use_threads(threads)
            tensors = [_placed(np.asarray(inputs[name]), value.dtype, device) for name, value in graph_inputs.items()]
            results = in_python("model", _guarded, "model", module, *tensors)
            outputs = {}
            for value, tensor in zip(model.graph.outputs, results, strict=True):
                assert value.dtype is not None
                outputs[value.name or ""] = array_of(tensor, value.dtype)
            return outputs

        return run


class _GraphInput(NamedTuple):
    name: str
    dtype: ir.DataType
    is_state: bool
    is_image: bool

    @classmethod
    def of(cls, entry: Entry) -> _GraphInput:
        return cls(entry.name, entry.dtype, entry.is_state, len(entry.extents) == 4)


class TorchRunner(ProgramRunner):
    """A program opened on PyTorch, with its state in tensors. A graph is rewritten and translated when it is first run."""

    def __init__(
        self,
        engine: TorchEngine,
        graphs: LoweredGraphs,
        state: Mapping[str, np.ndarray],
        device: torch.device,
        threads: int | None,
        communicator: Communicator | None = None,
    ):
        self._communicator = communicator
        self._engine = engine
        self._graphs = graphs
        self._device = device
        self._threads = threads
        self._entries = {entry.name: entry for entry in graphs.signature.state}
        self._runnables: dict[str, Runnable] = {}
        self._recorder: Recorder | None = None
        self._by_rows = written_by_rows(graphs.signature["step"])
        # The number of rows that a step writes depends on the batch: it cannot be recorded.
        if device.type == "cuda" and engine.capture and communicator is None and not self._by_rows:
            self._recorder = CudaRecorder(device)
        self._row_writes: list[RowWrite] = []
        self.row_changes = RowChanges()
        self._row_updates: RowUpdates | None = None
        self._chooses_convolutions = False
        self._updates: list[Update] = []
        self._increments: Tensors = {}
        self._lying_in_state: list[str] = []
        self._lying_in_exchange_buffers: list[str] = []
        signatures = graphs.signature.graphs
        self._inputs = {name: [_GraphInput.of(entry) for entry in graph.inputs] for name, graph in signatures.items()}
        self._output_names = {name: [entry.name for entry in graph.outputs] for name, graph in signatures.items()}
        self._reported = [(entry.name, entry.dtype) for entry in signatures["step"].outputs if entry.updates is None]
        self._memory: AbstractContextManager[None] = _NULL_CONTEXT
        if engine.keep_pages and device.type == "cpu":
            if self._has_kernels and any(map(kernels.is_awaited, kernels.EARLY)):
                kernels.request(*_kernels_of_layers(graphs))
            self._memory = memory.keep_pages(self)
        with self._memory:
            self._state = self._tensors_of(state)

    @property
    def route(self) -> str:
        recorded = "" if self._recorder is None else ", recorded as a CUDA graph"
        file = kernel_choice.file() if self._chooses_convolutions else None
        chosen = "" if file is None else f", some convolutions in the way that was the quickest here ('{file}')"
        return f"{self._engine.compile}{recorded}{chosen}"

    @property
    def row_writer(self) -> RowWriter:
        return self

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        signature = self._graphs.signature["step"]
        if self._recorder is not None:
            with self._settings():
                outputs = _guarded("step", lambda: self._recorded.run(inputs))
            check_finite_loss(signature, outputs, self.state)
            self._recorded.commit()
            return outputs
        with self._memory:
            results = self._run("step", inputs)
            outputs = {name: array_of(results[name], dtype) for name, dtype in self._reported}
            check_finite_loss(signature, outputs, self._present)
            self._move_on(results)
        return outputs

    def _present(self) -> Arrays:
        """A view of the state; do not keep it."""
        return {name: view_of(tensor, self._entries[name].dtype) for name, tensor in self._state.items()}

    def _move_on(self, results: Tensors) -> None:
        """Switch to the next state, given the outputs of the step's graph, and run the updates that were removed from it."""
        update, replaced = self._state_update
        # If the switch takes two calls, no interrupt may come between them.
        is_one_call = not self._row_writes and self._row_updates is None and (update is None or not replaced)
        with _inference_mode(), _NULL_CONTEXT if is_one_call else uninterrupted():
            if update is not None and self._lying_in_state:
                copy_out_of((self._state[entry] for entry in update.entries), results, self._lying_in_state)
            for name in self._lying_in_exchange_buffers:
                results[name] = results[name].clone()
            moved = {name: results[output] for name, output in replaced}
            if self._engine.compile == "inductor":
                moved = {name: laid_out_as(tensor, self._state[name]) for name, tensor in moved.items()}
            if self.row_changes.is_on:
                self.row_changes.note(*noted(self._row_writes, self._row_updates, self._state, results))
            for taken in (self._row_updates, update):
                if taken is not None:
                    run_taken(taken, self._state, results)
            write_rows(self._row_writes, results, self._put)
            if moved:
                self._state |= moved

    def _put(self, entry: str, indices: torch.Tensor, rows: torch.Tensor) -> None:
        self._state[entry].index_copy_(0, indices, rows)

    @cached_property
    def _state_update(self) -> tuple[StateUpdate | None, list[tuple[str, str]]]:
        """The in-place update of state entries; and the entries that get a new tensor instead, each with its output."""
        signature = self._graphs.signature["step"]
        updates = {name: output for name, output in signature.updates.items() if name not in self._by_rows}
        if not self._updates:
            return None, list(updates.items())
        written = {entry for update in self._updates for entry in update.entries} | self._increments.keys()
        copied = copied_entries((entry for name, entry in self._entries.items() if name not in written), updates)
        update = StateUpdate(self._updates, copied, self._increments)
        return update, [(name, output) for name, output in updates.items() if name not in update.entries]

    def evaluate(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._arrays("evaluate", inputs, instead)

    def predict(self, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        return self._arrays("predict", inputs, instead)

    def state(self) -> Arrays:
        return {name: self.state_entry(name) for name in self._state}

    def state_entry(self, name: str) -> np.ndarray:
        return array_of(self._state[name], self._entries[name].dtype)

    def state_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        table = self._state[name]
        return array_of(table.index_select(0, torch.from_numpy(rows).to(table.device)), self._entries[name].dtype)

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        with self._memory:
            tensors = self._tensors_of(state)
        for name, tensor in tensors.items():
            self._state[name] = self._state[name].copy_(tensor) if self._recorder is not None else tensor

    def _tensors_of(self, state: Mapping[str, np.ndarray]) -> Tensors:
        take = state.pop if isinstance(state, HandedOver) else state.__getitem__
        tensors = {}
        freed = 0
        for name, entry in self._entries.items():
            array = take(name)
            if (table := adopted(array)) is not None:
                tensors[name] = mapped_tensor_of(table, entry.dtype, self._device)
                continue
            tensors[name] = self._laid_out(tensor_of(array, entry.dtype).to(self._device))
            freed += array.nbytes
            if freed > FREED_AT_ONCE:
                memory.release_unused()
                freed = 0
        return tensors

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._engine.channels_last and tensor.dim() == 4 and tensor.is_floating_point():
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    @cached_property
    def _has_kernels(self) -> bool:
        wanted = self._engine.compile == "regions" and self._device.type == "cpu"
        return wanted and (kernels.expected() or kernels.available())

    def _translate(self, graph: str, fused: bool) -> fx.GraphModule:
        return translate(self._prepared(graph, fused), self._device, self._communicator)

    def _prepared(self, name: str, fused: bool) -> ir.Model:
        engine = self._engine
        model = prepared(
            self._graphs,
            name,
            self._device,
            fused,
            compilation=engine.compile,
            channels_last=engine.channels_last,
            winograd=engine.winograd,
            kernel_choice=engine.kernel_choice,
        )
        measured = (attribute_value(node, "measured", 0) for node in model.graph if node.domain == BURNISH_DOMAIN)
        self._chooses_convolutions |= any(measured)
        if name == "step":
            if self._communicator is not None:
                keep_exchange_order(model.graph)
            self._take_updates_out(model.graph, fused)
        return model

    def _take_updates_out(self, graph: ir.Graph, fused: bool) -> None:
        """Remove the state updates that kernels run from the step's graph, and record the results to copy."""
        signature = self._graphs.signature["step"]
        updates = {name: output for name, output in signature.updates.items() if name not in self._by_rows}
        names = [entry.name for entry in signature.outputs]
        self._updates, self._increments, self._lying_in_state = [], {}, []
        self._row_updates = None
        if self._by_rows:
            self._row_writes = take_row_writes(graph, names, signature)
            row_updates = take_row_updates(graph, names, self._row_writes) if fused else []
            self._row_updates = RowUpdates(row_updates) if row_updates else None
        if fused and self._recorder is None:
            self._updates = take_updates(graph, names, updates)
            self._increments = take_increments(graph, names, updates) if self._updates else {}
            self._lying_in_state = lying_in_inputs(graph, names, updates) if self._updates else []
        # Next values of state entries in a buffer of an exchange, which the next step overwrites: they are copied.
        self._lying_in_exchange_buffers = [
            name for name in lying_in_exchange_buffers(graph, names) if name in set(updates.values())
        ]
        self._output_names["step"] = names

    @cached_property
    def _recorded(self) -> RecordedStep:
        assert self._recorder is not None
        signature = self._graphs.signature["step"]
        in_place = None
        if self._engine.compile == "inductor":
            module = self.translated("step")
            in_place = CompiledGraph(module, signature.inputs, "step", InPlaceStep(module, signature))

        def step(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._runnable("step")(*inputs)

        return RecordedStep(step, signature, self._state, self._device, self._laid_out, self._recorder, in_place)

    def _arrays(self, graph: str, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Arrays:
        with self._memory:
            results = self._run(graph, inputs, instead)
        return {entry.name: array_of(results[entry.name], entry.dtype) for entry in self._graphs.signature[graph].outputs}

    def _run(self, graph: str, inputs: Mapping[str, np.ndarray], instead: Mapping[str, str] = NOTHING) -> Tensors:
        runnable = self._runnable(graph)
        state, device = self._state, self._device
        tensors = []
        for name, dtype, is_state, is_image in self._inputs[graph]:
            if is_state:
                tensors.append(state[instead.get(name, name) if instead else name])
            elif name not in inputs:
                raise EngineError(f"The graph '{graph}' reads '{name}', which the batch does not have: give it")
            else:
                tensor = _placed(inputs[name], dtype, device)
                tensors.append(self._laid_out(tensor) if is_image else tensor)
        with self._settings():
            try:
                results = stoppable(PythonStop(), graph, runnable, *tensors)
            except REFUSALS as error:
                raise failure(graph, error, place_of(error)) from error
        return dict(zip(self._output_names[graph], results, strict=True))

    def _runnable(self, graph: str) -> Runnable:
        return self._runnables.get(graph) or self._make_runnable(graph)

    @garbage_kept()
    def translated(self, graph: str) -> fx.GraphModule:
        """Return a graph of PyTorch calls and kernels, which are built before it returns: inputs -> tuple of outputs."""
        module = self._translate(graph, self._has_kernels)
        called = kernels.called(module)
        if graph == "step":
            called |= {"elementwise"} if self._updates else set()
            called |= {"rows"} if self._row_updates is not None else set()
        if self._has_kernels and called and not kernels.available(*called):
            module = self._translate(graph, fused=False)
        return module

    @garbage_kept()
    def _make_runnable(self, graph: str) -> Runnable:
        module = self.translated(graph)
        whole = self._engine.compile == "inductor"
        inputs = self._graphs.signature[graph].inputs
        runnable = CompiledGraph(module, inputs, graph) if whole else _without_autograd(module)
        self._runnables[graph] = runnable
        memory.release_unused()
        return runnable

    def _settings(self) -> AbstractContextManager[None]:
        _use_threads(self._threads)
        if self._device.type != "cuda":
            return _NULL_CONTEXT
        return cuda_settings(self._engine.tf32, self._engine.kernel_choice == "measured")


def _use_threads(threads: int | None) -> None:
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _kernels_of_layers(graphs: LoweredGraphs) -> tuple[str, ...]:
    """Return the slowest-compiling kernels that a program will call; its translated graphs determine all of them."""
    grad = graphs.semantic.get("grad")
    if grad is None or not any(BATCH_NORM_TRAINING.is_of(node) for node in grad.graph):
        return ()
    suffix = "_bfloat16" if graphs.options.get("precision") == "bfloat16" else ""
    return f"batch_norm_gradient{suffix}", f"batch_norm{suffix}"


def _inference_mode() -> AbstractContextManager[None]:
    """``torch.inference_mode()`` without its six Python calls."""
    return torch._C._InferenceMode(True)


def _without_autograd(module: fx.GraphModule) -> Runnable:
    forward = module.forward  # the module has no hooks

    def call(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _inference_mode():
            return forward(*inputs)

    return call


def _guarded(graph: str, run: Callable[..., Result], *inputs: Any) -> Result:
    try:
        return run(*inputs)
    except REFUSALS as error:
        raise failure(graph, error, place_of(error)) from error


def _placed(array: np.ndarray, dtype: ir.DataType | None, device: torch.device) -> torch.Tensor:
    assert dtype is not None
    if device.type == "cpu" and dtype != ir.DataType.BFLOAT16:
        flags = array.flags
        if flags.writeable and flags.c_contiguous:
            return torch.from_numpy(array)
    return tensor_of(array, dtype).to(device)

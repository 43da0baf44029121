"""The ONNX Runtime engine: its options and its sessions."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.engines.array_runner import ArrayRunner
from burnish.engines.base import Arrays, LoadedModel, RunsModels, check_threads
from burnish.engines.communicator import Communicator, array_of, buffer_of
from burnish.engines.onnxruntime.bound_graph import run_stoppably
from burnish.engines.onnxruntime.exchanges import Exchanges
from burnish.engines.onnxruntime.failures import has_bfloat16, load_failure, run_failure
from burnish.engines.onnxruntime.kernels import (
    OPERATORS,
    PARTS,
    Library,
    build_operators,
    call_kernels,
    find_library,
    tell_of_missing,
)
from burnish.engines.onnxruntime.optimizations import Level, OpenedGraph, Optimizations
from burnish.engines.onnxruntime.runner import OnnxRuntimeRunner
from burnish.engines.split_graph import BETWEEN_PARTS, SplitGraph, check_exchanges, is_exchange
from burnish.errors import BurnishError, EngineError
from burnish.files.model_file import fits_one_file, model_bytes, save_model
from burnish.graph import SIXTEEN_BIT, garbage_kept
from burnish.quantization.graph import simulates_quantization
from burnish.rewriting.change_dtypes import compute_in_float32
from burnish.rewriting.raise_scalar_ranks import has_low_scalars, raise_scalar_ranks
from burnish.targets import ANY_DOMAIN, TARGETS

if TYPE_CHECKING:
    from burnish.compiler.lowered_graphs import LoweredGraphs

SILENT = 4

TARGET = replace(
    TARGETS["onnxruntime"],
    domains=MappingProxyType({**TARGETS["onnxruntime"].domains, "com.microsoft": None}),
    collectives=BETWEEN_PARTS,
)
"""The target of programs for it: ONNX Runtime's operators beyond the standard, and exchanges between two parts of a graph."""

CPU_PROVIDER = "CPUExecutionProvider"
Provider = str | tuple[str, Mapping[str, Any]]
"""The name of an execution provider, with or without its options."""

_LEVELS: dict[Level, onnxruntime.GraphOptimizationLevel] = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_ORDERS = {
    "default": onnxruntime.ExecutionOrder.DEFAULT,
    "priority": onnxruntime.ExecutionOrder.PRIORITY_BASED,
}
SPINS_NO_LONGER = "session.force_spinning_stop"
"""The option of a session that makes threads sleep right after a run, instead of spinning for some 35 ms."""
_CONFIG = {"session.qdq_matmulnbits_accuracy_level": "1"}
"""Set for every session: products of float32 with weights of few bits after DequantizeLinear stay float32; ONNX Runtime would
round to eight bits.
"""
_ARENA_STRATEGIES = {"next_power_of_two": 0, "same_as_requested": 1}


class OnnxRuntimeEngine(RunsModels):
    """The engine that runs programs on stock ONNX Runtime.

    The same program, state, batches and ``threads`` give the same bits on the same machine.

    Args:
        optimization: how far ONNX Runtime may rewrite the graphs when it loads them; choose less if it breaks one
            (``optimizations``).
        arena: growth of its memory arena: by the requested size (``same_as_requested``), or by doubling regions
            (``next_power_of_two``); ``none`` returns every buffer to the operating system at once, which is slower. All sessions
            of the process share the arena: the first engine that opens a session decides between the first two.
        memory_pattern: True plans the buffers of a step as one block if shapes repeat; nearly twice the memory on a residual
            network, at the same speed.
        execution_order: order of independent nodes: ``default`` or ``priority``, with a fifth less peak memory on a residual
            network, at the same speed.
        spinning: True lets idle threads wait actively; faster steps, at the cost of other work on the machine.
        config: additional ONNX Runtime session configuration entries, by key.
        custom_op_library: a shared library of operators of other domains for ONNX Runtime. A program may contain them if it is
            compiled with ``target=engine.target``; gradients pass through those with a registered rule
            (``burnish.operators.gradient``).
        providers: ONNX Runtime's execution providers in order of preference, each by its name, or with its options. The CPU runs
            the nodes that no provider takes. The state stays in CPU memory: a provider with its own memory copies it in every
            step.
        kernels: True or None trains convolutions, normalization, chains of elementwise arithmetic and updates with burnish's own
            kernels. None uses them if they are built, but not with other providers than the CPU's, nor with
            ``optimization="none"``. True builds missing ones, once, which takes a C++ compiler and some seconds. False runs only
            standard operators, with the same bits as clients in other languages.
        verify: True compares the first run of each graph with a run without optimizations, and drops the optimizations that
            change its results (``OptimizationWarning``). Each graph is then loaded and run twice, once.

    Raises:
        EngineError: an option has an invalid value, this ONNX Runtime was built without a provider, the library cannot be loaded,
            or the kernels cannot be built.

    Attributes:
        target: the standard's operators and those of ONNX Runtime's own domain, ``com.microsoft``; with a library also those of
            any other domain.
        kernels: path of the kernel library; None if only standard operators run.
        profile_prefix: prefix of the files that ONNX Runtime's profiler writes; None without profiling.
    """

    name = "onnxruntime"

    def __init__(
        self,
        optimization: Level = "all",
        *,
        arena: Literal["same_as_requested", "next_power_of_two", "none"] = "same_as_requested",
        memory_pattern: bool = False,
        execution_order: Literal["default", "priority"] = "priority",
        spinning: bool = True,
        config: Mapping[str, str] | None = None,
        providers: Sequence[Provider] = (CPU_PROVIDER,),
        custom_op_library: str | Path | None = None,
        kernels: bool | None = None,
        verify: bool = False,
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
        self.verify = verify
        self.config = dict(config or {})
        self.profile_prefix: str | None = None
        self.providers = _checked_providers(providers)
        self.custom_op_library = None if custom_op_library is None else _checked_library(custom_op_library)
        self._library = self._library_of_kernels(kernels)
        self.kernels = self._library.path
        target = TARGET if custom_op_library is None else replace(TARGET, domains={**TARGET.domains, ANY_DOMAIN: None})
        self.target = target if self.kernels is None else target.with_kernels(OPERATORS)

    def _library_of_kernels(self, kernels: bool | None) -> Library:
        if kernels:
            return build_operators()
        if kernels is not None:
            return Library(None, "kernels=False goes without them")
        if self.optimization == "none":
            return Library(None, "optimization='none' runs the nodes of a graph as they are")
        # Data for another provider does not pass through CPU memory unless requested.
        others = [name for provider in self.providers if (name := _name_of(provider)) != CPU_PROVIDER]
        return Library(None, f"they are for the CPU, and {others[0]} comes first") if others else find_library()

    def describe(self, device: str | None = None, threads: int | None = None) -> dict[str, Any]:
        """Return a description of this engine's sessions (``burnish.engines.base.described``)."""
        return {
            "kernels": None if self.kernels is None else str(self.kernels),
            "kernels_reason": self._library.reason,
            "kernels_remedy": self._library.remedy,
            "level": self._library.level,
        }

    def open(
        self,
        graphs: LoweredGraphs,
        state: Mapping[str, np.ndarray],
        *,
        device: str | None = None,
        threads: int | None = None,
        communicator: Communicator | None = None,
    ) -> OnnxRuntimeRunner | ArrayRunner:
        """Open a program with copies of ``state``; graphs are loaded when they are first run.

        Args:
            graphs: graphs of the program, lowered to this engine's target.
            state: every state entry by name.
            device: ``cpu`` or None.
            threads: threads used inside one operator; None leaves it to ONNX Runtime (the physical cores).
            communicator: connection to other workers, which open the program together. Kernels make the exchanges inside the
                training graph (``exchanges``); if a worker has no kernels, the graph is cut at them (``split_graph``).

        Raises:
            EngineError: ``device`` is not ``cpu``, or ``threads`` is not an integer from 1 to 1024.
        """
        if device not in (None, "cpu"):
            raise EngineError(f"The onnxruntime engine runs on device 'cpu' only, not on '{device}': leave device out")
        check_threads(threads)
        if self._library.reason and self._library.remedy:
            tell_of_missing(self._library.reason, self._library.remedy)
        if communicator is None:
            return OnnxRuntimeRunner(self, graphs, state, threads)
        if self._exchanges_inside(communicator):
            return OnnxRuntimeRunner(_AmongWorkers(self, communicator, graphs.target.kernels), graphs, state, threads)

        # The number of samples is known before the logits: fused into one node, its exchange would wait for them.
        waiting = {operator.name for operator in PARTS}
        graphs = graphs.with_kernels(graphs.target.kernels - waiting)

        def load_part(model: ir.Model) -> LoadedModel:
            return self.load(model, threads)

        def load_split(model: ir.Model, graph: str) -> LoadedModel:
            # Operators that a kernel fuses but an exchange separates are lowered in each part.
            return SplitGraph(model, load_part, communicator, graphs.target.kernels) if graph == "step" else load_part(model)

        return ArrayRunner(graphs, state, lambda graph: load_split(graphs.copy_of(graph), graph), load_split)

    def _exchanges_inside(self, communicator: Communicator) -> bool:
        """Return True if all workers can make their exchanges inside the graph, with its kernels.

        ``verify`` rules it out: it would run the graph more often than other workers do.
        """
        can = np.array([self.kernels is not None and not self.verify], np.int64)
        return bool(array_of(communicator.all_gather(buffer_of(communicator, can))).all())

    def load(self, model: ir.Model, threads: int | None = None) -> LoadedModel:
        """Load a model, to be run repeatedly; ``threads`` is as for ``open``.

        A model with bfloat16 is computed in float32, with rounded outputs, because there are no kernels for it.

        Raises:
            EngineError: ONNX Runtime cannot load the model, or, from the returned callable, cannot run it.
        """
        declared = {value.name or "": value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
        is_widened = has_bfloat16(model)
        if is_widened:
            model = model.clone()
            compute_in_float32(model, keep_inputs=False)
        opened = self.open_graph(model, threads=threads)
        names = [output.name for output in opened.session.get_outputs()]

        def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
            feeds = dict(inputs)
            if is_widened:
                feeds = {
                    name: array.astype(np.float32) if declared.get(name) in SIXTEEN_BIT else array
                    for name, array in feeds.items()
                }
            try:
                opened.verify(lambda session: dict(zip(names, run_stoppably("model", session.run, names, feeds), strict=True)))
                results = opened.run(lambda session: run_stoppably("model", session.run, names, feeds))
            except Exception as error:  # the errors of ONNX Runtime have no common base class
                raise run_failure("model", error, opened.model) from error
            arrays = dict(zip(names, results, strict=True))
            if is_widened:
                rounded = {name: dtype for name in names if (dtype := declared[name]) in SIXTEEN_BIT}
                arrays |= {name: arrays[name].astype(dtype.numpy()) for name, dtype in rounded.items()}
            return arrays

        return run

    def open_graph(
        self,
        model: ir.Model,
        graph: str = "model",
        threads: int | None = None,
        *,
        rewrites: bool = True,
        in_turn: bool = False,
    ) -> OpenedGraph:
        """Load a model with as many of ONNX Runtime's optimizations as possible.

        Args:
            model: the model; do not modify it while it is open, because it may be loaded again.
            graph: name for errors.
            threads: as for ``open``.
            rewrites: False runs the nodes of ``OpenedGraph.model`` unchanged, each one's readers soon after it.
            in_turn: True if another graph with its own threads runs right after this one: the threads of this one then sleep
                after a run, instead of spinning on the cores that the other needs.

        Raises:
            EngineError: ONNX Runtime cannot load the model.
        """
        if in_turn:
            engine = copy.copy(self)
            engine.config = {SPINS_NO_LONGER: "1", **self.config}
            return engine.open_graph(model, graph, threads, rewrites=rewrites)
        if not rewrites:
            engine = copy.copy(self)
            engine.optimization, engine.execution_order, engine.verify = "none", "default", False
            return engine.open_graph(model, graph, threads)

        def load(optimizations: Optimizations | None) -> onnxruntime.InferenceSession:
            if optimizations is None:
                return self.inference_session(model, graph, threads)
            return self.inference_session(model, graph, threads, optimizations)

        if self.kernels is not None:
            model = model.clone()
            call_kernels(model, threads)
            raise_scalar_ranks(model)
        elif has_low_scalars(model):  # in graphs of several workers, and programs of earlier versions
            model = model.clone()
            raise_scalar_ranks(model)
        return OpenedGraph(graph, model, Optimizations.of(self.optimization, model), load, self.verify)

    @garbage_kept()
    def inference_session(
        self,
        model: ir.Model,
        graph: str = "model",
        threads: int | None = None,
        optimizations: Optimizations | None = None,
    ) -> onnxruntime.InferenceSession:
        """Load a model into an ONNX Runtime session with this engine's options.

        Args:
            model: the model.
            graph: name for errors.
            threads: threads used inside one operator; None leaves it to ONNX Runtime.
            optimizations: limit of rewriting; None is the engine's choice.

        Raises:
            EngineError: ONNX Runtime cannot load the model.
            ModelError: a file that holds a constant of the model was overwritten.
        """
        optimizations = optimizations or Optimizations.of(self.optimization, model)
        options = self._session_options(threads)
        options.graph_optimization_level = _LEVELS[optimizations.level]
        if simulates_quantization(model.graph):
            # Integer kernels saturate differently and reject some scales: training simulates only the rounding.
            options.add_session_config_entry("session.disable_quant_qdq", "1")

        def load(source: bytes | Path) -> onnxruntime.InferenceSession:
            disabled = [*optimizations.disabled]
            return onnxruntime.InferenceSession(source, options, providers=self.providers, disabled_optimizers=disabled)

        try:
            if fits_one_file(model):
                return load(model_bytes(model))
            with tempfile.TemporaryDirectory(prefix="burnish-") as directory:
                path = Path(directory, f"{graph}.onnx")
                save_model(model, path)
                return load(path)
        except BurnishError:  # a constant that is no longer readable
            raise
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            raise load_failure(graph, error, model) from error

    def _session_options(self, threads: int | None) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
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
        if self.profile_prefix is not None:
            options.enable_profiling, options.profile_file_prefix = True, self.profile_prefix
        for key, value in {**_CONFIG, **self.config}.items():
            options.add_session_config_entry(key, value)
        if self.custom_op_library is not None:
            options.register_custom_ops_library(self.custom_op_library)
        if self.kernels is not None:
            options.register_custom_ops_library(str(self.kernels))
        return options


@dataclass(frozen=True)
class _AmongWorkers:
    """An engine for graphs with exchanges between workers inside them.

    Attributes:
        loaded: names of burnish's own operators that the engine knows.
    """

    engine: OnnxRuntimeEngine
    communicator: Communicator
    loaded: frozenset[str]

    def open_graph(
        self, model: ir.Model, graph: str, threads: int | None, *, rewrites: bool = True, in_turn: bool = False
    ) -> OpenedGraph:
        if not any(map(is_exchange, model.graph.all_nodes())):
            check_exchanges(model.graph, self.loaded)
            return self.engine.open_graph(model, graph, threads, rewrites=rewrites, in_turn=in_turn)
        model = model.clone()
        assert self.engine.kernels is not None
        exchanges = Exchanges(model, self.engine.kernels, self.communicator, self.loaded)
        opened = self.engine.open_graph(model, graph, threads, rewrites=rewrites, in_turn=in_turn)
        opened.exchanges = exchanges
        return opened


def _checked_providers(providers: Sequence[Provider]) -> list[str | tuple[str, dict[str, Any]]]:
    available = onnxruntime.get_available_providers()
    checked: list[str | tuple[str, dict[str, Any]]] = []
    for provider in [providers] if isinstance(providers, str) else providers:
        name, options = (provider, None) if isinstance(provider, str) else provider
        if name not in available:
            raise EngineError(
                f"providers: this ONNX Runtime {onnxruntime.__version__} has no execution provider {name!r}; it has "
                f"{', '.join(available)}. Install the build of ONNX Runtime that has it, or choose among these"
            )
        checked.append(name if options is None else (name, dict(options)))
    return checked if CPU_PROVIDER in map(_name_of, checked) else [*checked, CPU_PROVIDER]


def _name_of(provider: Provider) -> str:
    return provider if isinstance(provider, str) else provider[0]


def _checked_library(library: str | Path) -> str:
    path = Path(library)
    problem = None
    if not path.is_file():
        problem = "there is no such file"
    else:
        try:
            onnxruntime.SessionOptions().register_custom_ops_library(str(path))
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            problem = " ".join(str(error).split()).rstrip(".")
    if problem is not None:
        raise EngineError(
            f"custom_op_library: ONNX Runtime {onnxruntime.__version__} cannot load '{path}': {problem}. Give a shared library "
            "that exports RegisterCustomOps, built for this system and this version"
        )
    return str(path)


_arena_is_registered = False


def _register_shared_arena(strategy: int) -> None:
    """Register the arena that all sessions of the process share, once: the first strategy wins.

    A session's own arena doubles its regions, and each session has one, so evaluation would add its peak to that of training.
    """
    global _arena_is_registered
    if _arena_is_registered:
        return
    information = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    with contextlib.suppress(Exception):  # fails if the host program has registered its own arena, which is then used
        onnxruntime.create_and_register_allocator(information, onnxruntime.OrtArenaCfg({"arena_extend_strategy": strategy}))
    _arena_is_registered = True

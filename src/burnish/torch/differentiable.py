"""A graph as a function that PyTorch's autograd can differentiate; the PyTorch engine runs both passes.

Each set of requested gradients is differentiated once. The graph of both passes is rewritten as a whole for the engine's kernels
and then split in two (``burnish.engines.torch.translate.splitting``). A call runs on the caller's tensors, without copies, and
saves values for the backward pass the way autograd does. Two forwards before a backward, a retained graph, checkpointing and
hooks on saved tensors therefore work as usual in PyTorch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from burnish.autodiff import differentiate
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.engines.torch.engine import TorchEngine
from burnish.engines.torch.runtime import memory
from burnish.engines.torch.runtime.autograd_node import graph_calls, request_graph_calls
from burnish.engines.torch.translate.failures import failure, place_of
from burnish.engines.torch.translate.splitting import emit_cotangents, split
from burnish.errors import GradientError
from burnish.graph import FLOATING, Builder, garbage_kept
from burnish.operators.semantic import reached_from
from burnish.optim.row_updates import HeldRows, without_rows
from burnish.rewriting.expand_gradients import lower_what_has_no_gradient
from burnish.rewriting.simulate_quantization import refuse_lost_gradients, simulate_quantization

REMEDY = "Wrap a part of the model that ends before it, or let PyTorch differentiate that part: wrap(..., partial=True)"

Tensors = tuple[torch.Tensor, ...]


class DifferentiableGraph:
    """A graph as a function of tensors that can be differentiated any number of times.

    Args:
        model: a model bound to a mode, with dtypes and ranks for its inputs; it may hold semantic operators and is not changed.
            No output is an input or a repeated output.
        engine: the engine that runs it.
        name: name of the graph in errors.
        held_rows: by input name, the rows of its gradient that are zero.
        written: names of inputs that the caller writes to after a call, such as running statistics. A gradient of a gradient
            reads their later values, except for inputs in ``kept``.
        aside: number of last outputs that have no gradient.
        kept: names among ``written`` that outputs depend on.
    """

    def __init__(
        self,
        model: ir.Model,
        engine: TorchEngine,
        name: str,
        held_rows: HeldRows = MappingProxyType({}),
        written: Collection[str] = (),
        aside: int = 0,
        kept: Collection[str] = (),
    ):
        self.name = name
        self._names_written = written
        self._aside = aside
        self.written = frozenset(index for index, value in enumerate(model.graph.inputs) if value.name in set(written))
        self.kept = frozenset(index for index, value in enumerate(model.graph.inputs) if value.name in set(kept))
        self._held_rows = held_rows
        self._model = model
        self._engine = engine
        ranks = [None if value.shape is None else len(value.shape) for value in model.graph.inputs]
        self._images = [index for index, rank in enumerate(ranks) if rank == 4] if engine.channels_last else []
        self._results = len(model.graph.outputs)
        self._passes: dict[tuple[tuple[bool, ...], torch.device], _Passes] = {}
        self._gradients: dict[tuple[bool, ...], _Gradients] = {}
        self._making = threading.RLock()
        self._pages = memory.keep_pages(self) if engine.keep_pages else nullcontext()
        request_graph_calls()

    def __deepcopy__(self, memo: dict[int, Any]) -> DifferentiableGraph:
        return self  # it holds no state

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Run the graph on its inputs, in order and all on one device; autograd continues from the outputs.

        Raises:
            GradientError: a gradient is requested through an operator without one, or by a transform of ``torch.func``.
            EngineError: the engine or PyTorch cannot run an operator of the graph.
        """
        device = inputs[0].device if inputs else torch.device(self._engine.device)
        recording = torch.is_grad_enabled()
        wanted = tuple([tensor.requires_grad for tensor in inputs]) if recording else (False,) * len(inputs)
        passes = self._passes.get((wanted, device)) or self.passes(wanted, device)
        if passes.backward is not None:
            if torch._C._are_functorch_transforms_active():
                raise GradientError(
                    f"transforms of torch.func do not go through the graph '{self.name}'",
                    "Differentiate by torch.autograd.grad, or give the transform what burnish.torch.unwrap returns",
                )
            if torch.compiler.is_exporting():
                results: Tensors = _Call.apply(self, passes, *inputs)  # type: ignore[no-untyped-call]
                return results
            return (passes.recorded or self._recorded(passes))(*inputs)
        if not recording:
            return self.run(passes, inputs)
        with torch.no_grad():
            return self.run(passes, inputs)

    def _recorded(self, passes: _Passes) -> Callable[..., Tensors]:
        """Return the autograd function of both passes: a C++ node once it is built, otherwise a Python function."""
        node = graph_calls()
        if node is None:
            return functools.partial(_apply_plainly, self, passes)
        assert passes.backward is not None
        passes.recorded = node(
            forward=passes.forward.forward,
            backward=passes.backward.forward,
            again=functools.partial(self.differentiate_again, passes),
            failed=self._refuse,
            inputs=len(passes.wanted),
            results=passes.results,
            differentiated=passes.differentiated,
            reached=passes.reached,
            images=self._images,
            written=self.written,
            kept=self.kept,
            channels_last=self._engine.channels_last,
            serve=getattr(self._pages, "address", 0),
        )
        return passes.recorded

    def run(self, passes: _Passes, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Run the forward pass without autograd; return the outputs, then the values saved for the backward pass."""
        return self._call(passes.forward, _all_laid_out(inputs, self._images), "forward")

    def run_back(self, passes: _Passes, saved: list[Any], cotangents: Sequence[torch.Tensor]) -> Tensors:
        """Run the backward pass without autograd; return the gradients of ``passes.reached``.

        It empties ``saved``, to free tensors that nobody else holds as early as possible.
        """
        assert passes.backward is not None
        images: Sequence[int] = ()
        if self._engine.channels_last:
            images = [index for index, tensor in enumerate(cotangents) if tensor.dim() == 4]
        saved.extend(_all_laid_out(cotangents, images))
        return self._call(passes.backward, [saved], "backward")

    def differentiate_again(self, passes: _Passes, inputs: Tensors, cotangents: Tensors) -> list[torch.Tensor | None]:
        """Return differentiable gradients of all inputs, None for inputs that outputs do not depend on."""
        again = self.gradient_graph(passes.wanted)
        gradients: list[torch.Tensor | None] = [None] * len(passes.wanted)
        for index, gradient in zip(again.reached, again.graph(*inputs, *cotangents), strict=True):
            gradients[index] = gradient
        return gradients

    def _call(self, module: fx.GraphModule, inputs: Sequence[Any], stage: str) -> Tensors:
        try:
            with self._pages:
                return module.forward(*inputs)
        except Exception as error:
            self._refuse(stage, error)
            raise

    def _refuse(self, stage: str, error: BaseException) -> None:
        """Raise an error that locates the failure, if PyTorch raised it."""
        if isinstance(error, RuntimeError | ValueError | IndexError | TypeError | MemoryError):
            raise failure(f"{stage} '{self.name}'", error, place_of(error)) from error

    def passes(self, wanted: tuple[bool, ...], device: torch.device) -> _Passes:
        """Return the passes for the gradients of some inputs, made on first use."""
        key = (wanted, device)
        if key not in self._passes:
            with self._making:
                if key not in self._passes:
                    self._passes[key] = self._made(wanted, device)
        return self._passes[key]

    def gradient_graph(self, wanted: tuple[bool, ...]) -> _Gradients:
        """Return the gradients as a differentiable graph of the inputs and the cotangents."""
        with self._making:
            if wanted not in self._gradients:
                model = self._model.clone()
                joint = _Joint.of(model, wanted, self._held_rows, self._aside)
                outputs = model.graph.outputs
                del outputs[: joint.results]
                separate_outputs(model.graph)
                lower_what_has_no_gradient(model)
                graph = DifferentiableGraph(model, self._engine, f"gradient of {self.name}", self._held_rows, self._names_written)
                self._gradients[wanted] = _Gradients(graph, joint.reached)
            return self._gradients[wanted]

    def check_gradients(self) -> None:
        """Differentiate with respect to all floating-point inputs, and discard the result.

        Raises:
            GradientError: an operator between an input and an output has no gradient.
        """
        model = self._model.clone()
        _Joint.of(model, [value.dtype in FLOATING for value in model.graph.inputs], self._held_rows, self._aside)

    @garbage_kept()
    def _made(self, wanted: tuple[bool, ...], device: torch.device) -> _Passes:
        model = self._model.clone()
        joint = _Joint.of(model, wanted, self._held_rows, self._aside, separate=True) if any(wanted) else None
        if joint is None or not joint.reached:
            return _Passes(self._translated(self._model.clone(), device), None, self._results, (), (), (), wanted)
        separate_outputs(model.graph)
        parts = split(self._translated(model, device), joint.results, len(joint.differentiated))
        constant = tuple(index for index in range(joint.results) if index not in set(joint.differentiated))
        return _Passes(parts.forward, parts.backward, joint.results, joint.differentiated, constant, joint.reached, wanted)

    def _translated(self, model: ir.Model, device: torch.device) -> fx.GraphModule:
        graphs = LoweredGraphs.of_model(model, self._engine.target)
        module = self._engine.open(graphs, {}, device=str(device)).translated("step")
        memory.release_unused()
        return module


@dataclass(eq=False)
class _Passes:
    """The passes of a graph for the gradients of some of its inputs.

    Attributes:
        forward, backward: the two modules of ``Split``; backward is None if nothing is differentiated.
        results: number of outputs.
        differentiated: positions of the outputs that have cotangents.
        constant: positions of the other outputs.
        reached: positions of the inputs with gradients from the backward pass.
        wanted: for each input, True if its gradient is requested.
        recorded: the C++ node that runs both passes; None until it is built, or if it cannot be.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    results: int
    differentiated: tuple[int, ...]
    constant: tuple[int, ...]
    reached: tuple[int, ...]
    wanted: tuple[bool, ...]
    recorded: Callable[..., Tensors] | None = None


@dataclass(frozen=True, eq=False)
class _Gradients:
    """A graph of inputs and cotangents, and the positions of the inputs whose gradients it outputs."""

    graph: DifferentiableGraph
    reached: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Joint:
    """The gradients added to a graph as additional outputs.

    Attributes:
        results: number of outputs before.
        differentiated: positions of the outputs that have cotangents.
        reached: positions of the inputs whose gradients were added, in order.
    """

    results: int
    differentiated: tuple[int, ...]
    reached: tuple[int, ...]

    @classmethod
    def of(cls, model: ir.Model, wanted: Sequence[bool], held_rows: HeldRows, aside: int, separate: bool = False) -> _Joint:
        """Add the gradients of the wanted inputs, in place.

        The cotangents become inputs after those of the graph, or, with ``separate``, the result of ``emit_cotangents``.
        """
        graph = model.graph
        wrt = {value: index for index, value in enumerate(graph.inputs) if wanted[index]}
        stopped = simulate_quantization(graph, list(wrt))
        results = list(graph.outputs)
        active = reached_from(graph, wrt)
        carrying = results[: len(results) - aside]
        differentiated = tuple(index for index, value in enumerate(carrying) if value in active and value.dtype in FLOATING)
        values = [results[index] for index in differentiated]
        if not values:
            return cls(len(results), (), ())
        for value in values:
            refuse_lost_gradients(stopped, list(wrt), value)
        builder = Builder(graph)
        if separate:
            cotangents = emit_cotangents(builder, results, values)
        else:
            added = [ir.Value(name=f"cotangent:{value.name}", type=value.type, shape=value.shape) for value in values]
            graph.inputs.extend(added)
            cotangents = [builder.tensor(value) for value in added]
        try:
            gradients = differentiate(builder, dict(zip(values, cotangents, strict=True)), list(wrt))
        except GradientError as error:
            raise GradientError(error.problem, REMEDY) from error
        reached = {index: gradient for value, index in wrt.items() if (gradient := gradients[value]) is not None}
        named = without_rows({graph.inputs[index].name or "": gradient for index, gradient in reached.items()}, held_rows)
        graph.outputs.extend(gradient.value for gradient in named.values())
        return cls(len(results), differentiated, tuple(reached))


class _Call(torch.autograd.Function):
    """One call of a graph as an autograd function, used for exports and without the C++ node."""

    @staticmethod
    def forward(ctx: Any, graph: DifferentiableGraph, passes: _Passes, *inputs: torch.Tensor) -> Tensors:
        results = graph.run(passes, inputs)
        count = passes.results
        outputs, saved = results[:count], results[count:]
        ctx.graph, ctx.passes, ctx.numbers, ctx.written = graph, passes, None, None
        if graph.written:
            # Autograd refuses saved tensors that were written to; a gradient of a gradient reads their later values.
            own = {id(inputs[index]) for index in graph.written}
            written = {index: inputs[index].clone() if index in graph.kept else inputs[index] for index in graph.written}
            saved = tuple([value.clone() if id(value) in own else value for value in saved])
            ctx.written = written
            inputs = tuple([tensor for index, tensor in enumerate(inputs) if index not in written])
        if all([isinstance(value, torch.Tensor) for value in saved]):
            ctx.save_for_backward(*saved, *inputs)
        else:
            # Values other than tensors, such as extents, keep their position.
            ctx.numbers = [None if isinstance(value, torch.Tensor) else value for value in saved]
            ctx.save_for_backward(*[value for value in saved if isinstance(value, torch.Tensor)], *inputs)
        ctx.saved_count = len(saved)
        if passes.constant:
            ctx.mark_non_differentiable(*[outputs[index] for index in passes.constant])
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graph, passes, tensors = ctx.graph, ctx.passes, ctx.saved_tensors
        count = ctx.saved_count
        if ctx.numbers is not None:
            waiting = iter(tensors)
            tensors = (*[next(waiting) if value is None else value for value in ctx.numbers], *waiting)
        incoming = [cotangents[index] for index in passes.differentiated] if passes.constant else cotangents
        if torch.is_grad_enabled():
            remaining = iter(tensors[count:])
            written = ctx.written or {}
            inputs = [written[index] if index in written else next(remaining) for index in range(len(passes.wanted))]
            return None, None, *graph.differentiate_again(passes, tuple(inputs), tuple(incoming))
        saved = list(tensors[:count])
        del tensors
        ctx.maybe_clear_saved_tensors()
        gradients: list[torch.Tensor | None] = [None] * (2 + len(passes.wanted))
        for index, gradient in zip(passes.reached, graph.run_back(passes, saved, incoming), strict=True):
            gradients[2 + index] = gradient
        return tuple(gradients)


_apply_plainly: Callable[..., Any] = super(torch.autograd.Function, _Call).apply
"""``_Call.apply`` without the part that only function transforms need, which takes half of its time."""


def _all_laid_out(tensors: Sequence[torch.Tensor], images: Sequence[int]) -> list[torch.Tensor]:
    """Return tensors in the memory layout of the engine's kernels: channels last at the positions ``images``."""
    if not images:
        return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    positions = set(images)
    return [laid_out(tensor) if index in positions else tensor.contiguous() for index, tensor in enumerate(tensors)]


def laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """Return an image or convolution kernel with channels last, without a copy if it already is."""
    return tensor.contiguous(memory_format=torch.channels_last if tensor.is_floating_point() else torch.contiguous_format)


def separate_outputs(graph: ir.Graph) -> None:
    """Give each output its own value, in place: no output is an input, an initializer or a repeated output."""
    builder = Builder(graph)
    earlier: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in earlier or value.is_graph_input() or value.is_initializer():
            copy = builder.op("Identity", builder.tensor(value), like=builder.tensor(value)).value
            graph.outputs[index] = copy
            value = copy
        earlier.add(value)

"""What an engine opens: a program, or a single graph, lowered to the engine's target.

A program's own graphs are in the operators of the target that it was compiled for. An engine with kernels of its own for semantic
operators gets graphs with these in them, made of what the program keeps from before it was lowered. They compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import onnx_ir as ir

from burnish.compiler.draft import lower_to_target, shape_of
from burnish.compiler.lowered_graphs import compute_again
from burnish.compiler.update import update_graphs
from burnish.errors import ConfigurationError
from burnish.graph import garbage_kept
from burnish.graph.names import separate_names
from burnish.operators.semantic import SemanticOperator
from burnish.optim import Optimizer
from burnish.program.program import Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature, outputs_in_place
from burnish.quantization.graph import simulates_quantization
from burnish.rewriting.compute_integers import compute_integers
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.multiply_depthwise_rows import has_depthwise_rows, multiply_depthwise_rows
from burnish.rewriting.recompute_request import Recompute
from burnish.rewriting.recompute_request import get as recompute_request
from burnish.rewriting.stages import UPDATING
from burnish.targets import Target, check_runs

Rewrite = Callable[[ir.Model], object]
"""Changes a lowered graph in place."""


@dataclass(frozen=True, eq=False)
class Executable:
    """A signature, and the graphs that it is of, each lowered when it is first asked for.

    ``lower`` makes one of a program, ``executable_of`` of a single model.

    Attributes:
        signature: every input and output of every graph.
        target: the runtime that the graphs are lowered for.
        semantic: graphs before they were lowered; left as they are.
        finished: graphs as they were lowered for ``finished_for``, which serve where nothing else can be made of ``semantic``, or
            where that target has the same kernels.
        finished_for: the runtime that the program was compiled for.
        options: what the program was compiled with.
        optimizer: what the step updates the parameters by; None where there is no step to be made of ``grad``.
        recompute: which activations the backward computes again. What fits a budget in standard operators need not with other
            kernels, or where workers exchange gradients: the graphs are then those of the least peak.
        rewrites: what changes a graph after it was lowered, by its name, in order.
        marks: names of semantic operators that these rewrites look for, which are not lowered before.
    """

    signature: Signature
    target: Target
    semantic: Mapping[str, ir.Model]
    finished: Mapping[str, ir.Model]
    finished_for: Target
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    recompute: Recompute | None = None
    rewrites: Mapping[str, tuple[Rewrite, ...]] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()
    _lowered_graphs: dict[str, ir.Model] = field(default_factory=dict, init=False, repr=False)

    def graph(self, name: str) -> ir.Model:
        """Return a graph, lowered when it is first asked for; not to be changed.

        Raises:
            UnsupportedOperatorError: it holds what the target does not run.
        """
        if self._is_finished(name) and name not in self.rewrites:
            return self._finished(name)
        if name not in self._lowered_graphs:
            self._lowered_graphs[name] = self.copy_of(name)
        return self._lowered_graphs[name]

    @garbage_kept()
    def copy_of(self, name: str) -> ir.Model:
        """Return a graph of the caller's own, to rewrite; lowered at each call.

        Raises:
            UnsupportedOperatorError: it holds what the target does not run.
        """
        model = self._finished(name).clone() if self._is_finished(name) else self._lowered(name)
        for rewrite in self.rewrites.get(name, ()):
            rewrite(model)
        separate_names(model.graph)
        return model

    def lowered_to(self, target: Target) -> Self:
        """Return the same, lowered to another target."""
        return replace(self, target=target)

    def rewritten(self, rewrite: Rewrite, *graphs: str, marks: Collection[SemanticOperator] = (), **changes: Any) -> Self:
        """Return the same with graphs that are rewritten, after the rewrites that there are already.

        Args:
            rewrite: changes a lowered graph in place.
            graphs: the names of those that it changes.
            marks: semantic operators that it looks for, which are not lowered before.
            changes: of other fields.
        """
        rewrites = {**self.rewrites, **{name: (*self.rewrites.get(name, ()), rewrite) for name in graphs}}
        return replace(self, rewrites=rewrites, marks=self.marks | {mark.name for mark in marks}, **changes)

    def _is_finished(self, name: str) -> bool:
        """Whether a graph of ``finished`` serves."""
        can_be_made = name in self.semantic or (name in UPDATING and self.optimizer is not None)
        if not can_be_made:
            return True
        return name in self.finished and self.target.kernels == self.finished_for.kernels and not self.marks

    def _finished(self, name: str) -> ir.Model:
        model = self.finished[name]
        if not self.target.covers(self.finished_for):
            check_runs(model, self.target)
        return model

    def _lowered(self, name: str) -> ir.Model:
        target = self.target.with_kernels(self.target.kernels | self.marks)
        if name in self.semantic:
            model = self.semantic[name].clone()
            if name == "predict":  # The others were folded when they were compiled; an export is made of this one.
                fold_constants(model)
            lower_to_target(model, target)
            if name == "grad" and self.recompute is not None:
                planned = self._update_of(model, target)
                in_place = outputs_in_place(self.graph("apply"), self.signature["apply"])
                compute_again(model, self.signature["grad"], self.recompute, planned, in_place, strict=False)
            return model
        # Lowered once, as a whole; what is computed again is chosen in a graph of the gradients that is lowered.
        grad = self.semantic["grad"] if self.recompute is None or name == "apply" else self._lowered("grad")
        return self._update_of(grad, target, name)

    def _update_of(self, grad: ir.Model, target: Target, name: str = "step") -> ir.Model:
        """The graph ``step`` or ``apply`` that follows from a graph of the gradients, lowered or not."""
        assert self.optimizer is not None
        forward = (self.finished["predict"], self.finished["evaluate"])  # which tell what the parameters are for
        updates, _ = update_graphs(grad, self.signature["grad"], forward, self.optimizer, target, (name,))
        return updates[name]


def lower(program: Program, target: Target) -> Executable:
    """Return a program as an engine of this target opens it; nothing is lowered yet.

    Raises:
        ConfigurationError: the target takes fixed shapes, and an input of the program has an open dimension.
    """
    check_extents(program.signature, target)
    if not program.target.float64:  # what its signature says is float32
        target = replace(target, float64=False)
    can_be_made = bool(program.semantic) and program.optimizer is not None
    executable = Executable(
        program.signature,
        target,
        program.semantic if can_be_made else {},
        program.graphs,
        program.target,
        program.options,
        program.optimizer if can_be_made else None,
        recompute_request(program.options.get("recompute")),
    )
    predict = (program.semantic.get("predict") or program.predict).graph
    is_quantized = simulates_quantization(predict)
    if is_quantized:
        executable = executable.rewritten(partial(compute_integers, float64=target.float64), "predict", "evaluate")
        # In floating-point numbers ``predict`` stays as it is saved: clients in other languages and exports have its bits.
        if target.prefers_products and not target.kernels and has_depthwise_rows(predict):
            executable = executable.rewritten(multiply_depthwise_rows, "predict", "evaluate")
    return executable


def executable_of(model: ir.Model, target: Target) -> Executable:
    """Return a single graph as a ``step`` without state: every input is data, every output is returned. Open it with no state.

    An engine then runs it as it runs a step, with its own kernels, dtypes and device.

    Args:
        model: inputs and outputs with dtypes, and inputs with ranks; may hold semantic operators; left as it is.
        target: the runtime that it is lowered for.

    Raises:
        ConfigurationError: the target takes fixed shapes, and an input has an open dimension.
    """
    graph = GraphSignature(
        tuple(_entry(value, Role.DATA) for value in model.graph.inputs),
        tuple(_entry(value, Role.OUTPUT) for value in model.graph.outputs),
    )
    signature = Signature({"step": graph})
    check_extents(signature, target)
    return Executable(signature, target, {"step": model}, {}, target)


def check_extents(signature: Signature, target: Target) -> None:
    """Raise ConfigurationError where a target takes fixed shapes, and an input has an open dimension."""
    if target.symbolic_shapes:
        return
    for name, graph in signature.graphs.items():
        for entry in graph.inputs:
            if not all(isinstance(extent, int) for extent in entry.extents):
                shape = ", ".join(str(extent or "?") for extent in entry.extents)
                raise ConfigurationError(
                    f"{target.name} takes fixed shapes, and the input '{entry.name}' of the {name} graph is [{shape}]: export "
                    "the model with a number for each dimension of its inputs, the batch among them, or choose another target"
                )


def _entry(value: ir.Value, role: Role) -> Entry:
    assert value.dtype is not None
    return Entry(value.name or "", role, value.dtype, shape_of(value))

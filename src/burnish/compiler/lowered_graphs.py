"""The graphs of a program by name, each lowered when it is first read. Programs hold them, and engines open them.

A program keeps ``grad``, ``evaluate`` and ``predict`` with their semantic operators. Its own graphs are lowered to its target; an
engine gets graphs that keep the semantic operators it has kernels for. Both compute the same. Recomputation in the backward pass
is chosen in the lowered step, so the kept graphs do not contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import onnx_ir as ir

from burnish import optim
from burnish.compiler.draft import lower_to_target, shape_of
from burnish.compiler.sparse_tables import check_optimizer
from burnish.compiler.update import (
    WEIGHS_ALIKE,
    joined_signature,
    layers_left_moving,
    update_graphs,
    warn_of_accumulation,
    warn_of_no_effect,
)
from burnish.errors import ConfigurationError, ObjectiveWarning
from burnish.graph import garbage_kept
from burnish.graph.names import separate_names
from burnish.operators.semantic import SemanticOperator
from burnish.optim import Optimizer
from burnish.optim.row_updates import hold_rows
from burnish.program.signature import FEATURES, GRAPH_NAMES, Entry, GraphSignature, Role, Signature, outputs_in_place
from burnish.quantization.graph import simulates_quantization
from burnish.rewriting import precision, recompute_request
from burnish.rewriting.compute_integers import compute_integers
from burnish.rewriting.fold_constants import fold_constants
from burnish.rewriting.multiply_depthwise_rows import has_depthwise_rows, multiply_depthwise_rows
from burnish.rewriting.recompute import recompute_activations
from burnish.rewriting.recompute_request import Recompute
from burnish.rewriting.stages import UPDATING
from burnish.targets import TARGETS, Target, check_runs, target_from_dict
from burnish.warn import warn

Rewrite = Callable[[ir.Model], object]
"""A function that changes a lowered graph in place."""


@dataclass(frozen=True, eq=False, repr=False)
class LoweredGraphs(Mapping[str, ir.Model]):
    """Graphs by name, each lowered when it is first read, and kept. Do not modify a graph that was read; see ``copy_of``.

    Attributes:
        signature: all inputs and outputs of every graph.
        options: options that the program was compiled with, as JSON-compatible values.
        target: runtime that the graphs are lowered for.
        semantic: graphs before lowering; not modified.
        given: graphs that consist of operators of the target already.
        base: the same graphs for another target or optimizer. They are used if they are made from the same graphs for the same
            kernels, or if nothing else can be made.
        for_engine: True if an engine opens the graphs. A step is then lowered as a whole, and ``predict`` is folded, although the
            program exports its own unfolded. A recomputation that fits a budget in standard operators need not fit with other
            kernels, or if workers exchange gradients, so the one with the lowest peak is used.
        rewrites: functions that change a lowered graph, in order, by the graph's name.
        marks: names of the semantic operators that these rewrites look for; they are not lowered before the rewrites.
    """

    signature: Signature
    options: dict[str, Any]
    target: Target
    semantic: Mapping[str, ir.Model] = field(default_factory=dict)
    given: Mapping[str, ir.Model] = field(default_factory=dict)
    base: LoweredGraphs | None = None
    for_engine: bool = False
    rewrites: Mapping[str, tuple[Rewrite, ...]] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()
    _kept: dict[str, ir.Model] = field(default_factory=dict, init=False)

    @classmethod
    def linked(
        cls,
        semantic: Mapping[str, ir.Model],
        signatures: Mapping[str, GraphSignature],
        optimizer: Optimizer,
        target: Target,
        options: dict[str, Any],
    ) -> Self:
        """Return the graphs of a compiled program; the ones that update the state follow from ``grad`` and the optimizer.

        An engine with its own kernels never reads the largest graphs, ``grad`` and ``step``, in standard operators, so they are
        lowered only when first read. With recomputation they are lowered here, so that a budget that is too small is refused at
        once.

        Args:
            semantic: ``grad``, ``evaluate`` and ``predict``, and ``features`` if there is one, before lowering.
            signatures: their signatures.
            optimizer: the optimizer; ``options`` hold it without the wrappers of mixed precision and held rows.
            target: runtime that the graphs are lowered for.
            options: options of the program.

        Raises:
            ConfigurationError: the optimizer does not fit the parameters, or leaves nothing to train; or the target takes fixed
                shapes and an input has an open dimension.
        """
        given = {name: _lowered_copy(semantic[name], target) for name in ("predict", "evaluate")}
        forward = tuple(given.values())
        if FEATURES in semantic:
            given[FEATURES] = _lowered_copy(semantic[FEATURES], target)
        updates, added = update_graphs(semantic["grad"], signatures["grad"], forward, optimizer, target, ("init", "apply"))
        added["step"] = joined_signature(signatures["grad"], added["apply"])
        signature = Signature.ordered({**signatures, **added})
        check_extents(signature, target)
        graphs = cls(signature, options, target, semantic, {**given, **updates})
        if graphs.recompute is not None:
            graphs["step"]
        return graphs

    @classmethod
    def read(
        cls,
        graphs: Mapping[str, ir.Model],
        signature: Signature,
        options: dict[str, Any],
        semantic: Mapping[str, ir.Model] | None = None,
    ) -> Self:
        """Return the graphs of a program that was read from files; its options name the target that they were lowered for."""
        target = options.get("target", "onnxruntime")
        runtime = TARGETS[target] if isinstance(target, str) else target_from_dict(target)
        return cls(signature, options, runtime, semantic or {}, graphs)

    @classmethod
    def of_model(cls, model: ir.Model, target: Target) -> Self:
        """Return a single graph as a ``step`` without state: every input is data, and every output is returned.

        An engine opens it like a step without state, and runs it with its own kernels, dtypes and device.

        Args:
            model: a model whose inputs and outputs have dtypes, and whose inputs have ranks; may hold semantic operators; not
                modified.
            target: runtime that it is lowered for.

        Raises:
            ConfigurationError: the target takes fixed shapes, and an input has an open dimension.
        """
        graph = GraphSignature(
            tuple(_entry(value, Role.DATA) for value in model.graph.inputs),
            tuple(_entry(value, Role.OUTPUT) for value in model.graph.outputs),
        )
        signature = Signature({"step": graph})
        check_extents(signature, target)
        return cls(signature, {}, target, {"step": model}, for_engine=True)

    def __getitem__(self, name: str) -> ir.Model:
        """Return a graph.

        Raises:
            KeyError: there is no graph of this name.
            UnsupportedOperatorError: the target does not run one of its operators.
        """
        ready = None if name in self.rewrites else self._ready(name)
        if ready is not None:
            return ready
        if name not in self._kept:
            self._kept[name] = self.copy_of(name)
        return self._kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self.signature.graphs

    def __iter__(self) -> Iterator[str]:
        return (name for name in (*GRAPH_NAMES, FEATURES) if name in self)

    def __len__(self) -> int:
        return len(self.signature.graphs)

    def __repr__(self) -> str:
        """Show the number of nodes of each graph: printed in full, graphs are pages of text. Nothing is lowered."""
        return ", ".join(f"{name}: {self._size(name)}" for name in self)

    @garbage_kept()
    def copy_of(self, name: str) -> ir.Model:
        """Return a new copy of a graph, which the caller may change.

        Raises:
            KeyError, UnsupportedOperatorError: as for reading it.
        """
        ready = self._ready(name)
        model = self._lowered(name) if ready is None else ready.clone()
        for rewrite in self.rewrites.get(name, ()):
            rewrite(model)
        separate_names(model.graph)
        return model

    def unlowered(self, name: str) -> ir.Model:
        """Return a graph in its form before lowering, or lowered if that form was not kept. Do not modify it."""
        return self.semantic[name] if name in self.semantic else self[name]

    def lowered_to(self, target: Target) -> Self:
        """Return the graphs of a program as an engine of this target opens them; nothing is lowered yet.

        Raises:
            ConfigurationError: the target takes fixed shapes, and an input of the program has an open dimension.
        """
        check_extents(self.signature, target)
        if not self.target.float64:  # the signature promises float32
            target = replace(target, float64=False)
        graphs = replace(self, target=target, given={}, base=self, for_engine=True)
        predict = self.unlowered("predict").graph
        if simulates_quantization(predict):
            graphs = graphs.rewritten(partial(compute_integers, float64=target.float64), "predict", "evaluate")
            # In floating-point models, ``predict`` keeps its saved form: exports and clients in other languages give the same
            # bits.
            if target.prefers_products and not target.kernels and has_depthwise_rows(predict):
                graphs = graphs.rewritten(multiply_depthwise_rows, "predict", "evaluate")
        return graphs

    def with_kernels(self, kernels: Collection[str]) -> Self:
        """Return the same graphs for a runtime with kernels for these semantic operators only."""
        return replace(self, target=self.target.with_kernels(kernels))

    def rewritten(self, rewrite: Rewrite, *graphs: str, marks: Collection[SemanticOperator] = (), **changes: Any) -> Self:
        """Return the same with graphs that are rewritten, after any existing rewrites.

        Args:
            rewrite: a function that changes a lowered graph in place.
            graphs: names of the graphs that it changes.
            marks: semantic operators that it looks for, which are not lowered before.
            changes: new values of other fields.
        """
        rewrites = {**self.rewrites, **{name: (*self.rewrites.get(name, ()), rewrite) for name in graphs}}
        return replace(self, rewrites=rewrites, marks=self.marks | {mark.name for mark in marks}, **changes)

    def with_optimizer(self, optimizer: str | Mapping[str, Any] | Optimizer) -> Self:
        """Return the graphs of the program with another optimizer; see ``Program.with_optimizer``."""
        resolved = optim.get(optimizer)
        moving = layers_left_moving(self.semantic.get("grad"), resolved) if self.options.get("norm") == "auto" else []
        if moving:
            warn(
                ObjectiveWarning(
                    f"the optimizer freezes the batch normalization '{moving[0]}'"
                    + (f" and {len(moving) - 1} more" if len(moving) > 1 else "")
                    + ", whose statistics still move, as the program was compiled for it to train: compile with this optimizer, "
                    "or with norm='frozen', to keep them; norm='train' says that this is meant"
                )
            )
        warn_of_accumulation(resolved, self.options.get(WEIGHS_ALIKE, ""))
        grad = self.signature["grad"]
        sparse = [entry.name.partition(":")[2] for entry in grad.outputs_of(Role.INDICES)]
        check_optimizer(sparse, resolved, self.options.get("sparse"))
        forward, bound = (self["predict"], self["evaluate"]), wrapped(resolved, self.options)
        updates, signatures = update_graphs(self.unlowered("grad"), grad, forward, bound, self.target, ("init", "apply"))
        signatures["step"] = joined_signature(grad, signatures["apply"])
        warn_of_no_effect(resolved, grad, forward)
        return replace(
            self,
            signature=Signature.ordered({**self.signature.graphs, **signatures}),
            options={**self.options, "optimizer": resolved.options()},
            given=updates,
            base=self if self.base is None else self.base,
        )

    @cached_property
    def optimizer(self) -> Optimizer | None:
        """The optimizer with the wrappers of mixed precision and held rows; None if it is unknown."""
        return wrapped(optim.get(self.options["optimizer"]), self.options) if "optimizer" in self.options else None

    @cached_property
    def recompute(self) -> Recompute | None:
        """The activations that the backward pass recomputes."""
        return recompute_request.get(self.options.get("recompute"))

    def _ready(self, name: str) -> ir.Model | None:
        if name not in self:
            raise KeyError(name)
        if name in self.given:
            return self.given[name]
        if self.base is None or not self._is_of_base(name):
            return None
        model = self.base[name]
        if not self.target.covers(self.base.target):
            check_runs(model, self.target)
        return model

    def _is_of_base(self, name: str) -> bool:
        base, semantic = self.base, self.semantic
        assert base is not None
        has_gradients = "grad" in semantic or not self.for_engine
        if name not in semantic and not (name in UPDATING and has_gradients and self.optimizer is not None):
            return True
        if self.marks or self.target.kernels != base.target.kernels:
            return False
        if name in semantic:
            return base.semantic.get(name) is semantic[name]
        has_same_gradients = base.semantic.get("grad") is semantic.get("grad")
        return has_same_gradients and base.options.get("optimizer") == self.options["optimizer"]

    def _lowered(self, name: str) -> ir.Model:
        target = self.target.with_kernels(self.target.kernels | self.marks)
        if name not in self.semantic:
            return self._updating(self._gradients(name), target, name)
        model = self.semantic[name].clone()
        if name == "predict" and self.for_engine:  # the other graphs were folded at compile time
            fold_constants(model)
        lower_to_target(model, target)
        if name == "grad" and self.recompute is not None:
            signature = self.signature["grad"]
            recompute_activations(
                model,
                self.recompute,
                loss=signature.outputs_of(Role.LOSS)[0].name,
                data=[entry.name for entry in signature.inputs_of(Role.DATA, Role.LABEL)],
                keys=[entry.name for entry in signature.inputs_of(Role.KEY)],
                planned=self._updating(model, target, "step"),
                in_place=outputs_in_place(self["apply"], self.signature["apply"]),
                strict=not self.for_engine,
            )
        return model

    def _gradients(self, name: str) -> ir.Model:
        if not self.for_engine:
            return self["grad"]
        # Lowered once, as a whole; recomputation is chosen in a lowered graph of the gradients.
        return self.semantic["grad"] if self.recompute is None or name == "apply" else self._lowered("grad")

    def _updating(self, grad: ir.Model, target: Target, name: str) -> ir.Model:
        assert self.optimizer is not None
        own = self if self.base is None else self.base
        forward = (own["predict"], own["evaluate"])  # they show how the parameters are used
        updates, _ = update_graphs(grad, self.signature["grad"], forward, self.optimizer, target, (name,))
        return updates[name]

    def _size(self, name: str) -> str:
        model = self.given.get(name, self._kept.get(name))
        if model is not None:
            return f"{sum(1 for _ in model.graph)} nodes"
        return "not lowered yet" if self.base is None or not self._is_of_base(name) else self.base._size(name)


def wrapped(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer with the wrappers of mixed precision and held rows that the options of a program ask for."""
    mixed = precision.get(options.get("precision", precision.FULL))
    return hold_rows(optimizer if mixed is None else mixed.scaled(optimizer), options.get("hold_rows", {}))


def check_extents(signature: Signature, target: Target) -> None:
    """Raise ConfigurationError if a target takes fixed shapes and an input has an open dimension."""
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


def _lowered_copy(semantic: ir.Model, target: Target) -> ir.Model:
    model = semantic.clone()
    lower_to_target(model, target)
    return model


def _entry(value: ir.Value, role: Role) -> Entry:
    assert value.dtype is not None
    return Entry(value.name or "", role, value.dtype, shape_of(value))

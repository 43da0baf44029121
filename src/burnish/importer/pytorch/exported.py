"""An exported module: its graph, the names of its open axes, and properties that ONNX does not keep.

A trace assumes properties of the input extents if ``forward`` branches on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import sympy  # type: ignore[import-untyped]
import torch
from torch.utils import _pytree as pytree

from burnish.importer.pytorch.layers import is_user_input

BATCH = "batch"


def symbol_names(program: torch.export.ExportedProgram, shapes: Any) -> dict[str, str]:
    """Return the names for the symbols of a graph: those given by the user, and ``batch``.

    Args:
        program: the graph.
        shapes: open axes of each parameter of ``forward``, as for ``torch.export.export``.
    """
    names: dict[str, str] = {}
    specs = pytree.tree_leaves(
        shapes, is_leaf=lambda node: node is None or (isinstance(node, dict) and all(isinstance(key, int) for key in node))
    )
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [placeholders[spec.arg.name] for spec in program.graph_signature.input_specs if is_user_input(spec)]
    for axes, node in zip(specs, inputs, strict=False):
        value = node.meta.get("val")
        for axis, dimension in axes.items() if isinstance(axes, dict) and isinstance(value, torch.Tensor) else ():
            size = value.shape[axis]
            if isinstance(size, torch.SymInt) and (symbol := str(size)).isidentifier():
                given = getattr(dimension, "__name__", None)
                if given is not None:
                    names[symbol] = given
                elif axis == 0:
                    names.setdefault(symbol, BATCH)
    return _apart(names)


def _apart(names: dict[str, str]) -> dict[str, str]:
    taken: dict[str, int] = {}
    result = {}
    for symbol, name in names.items():
        taken[name] = taken.get(name, 0) + 1
        result[symbol] = name if taken[name] == 1 else f"{name}_{taken[name]}"
    return result


Axis = tuple[str, int]
"""Input name and index of an axis."""


@dataclass(frozen=True)
class Extents:
    """Open extents of a trace and its assumptions about them.

    Attributes:
        sizes: symbolic extent of each open axis.
        conditions: conditions in the same symbols that ``forward`` or PyTorch checked and that held for the examples.
    """

    sizes: Mapping[Axis, Any] = field(default_factory=dict)
    conditions: Sequence[Any] = ()

    @classmethod
    def of(cls, program: torch.export.ExportedProgram) -> Extents:
        """Read the assumptions of a program."""
        names = {spec.arg.name for spec in program.graph_signature.input_specs if is_user_input(spec)}
        values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder") if node.name in names}
        extents: list[tuple[Axis, Any]] = [
            ((name, axis), size)
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
            for axis, size in enumerate(value.shape)
        ]
        open_extents = [(place, size) for place, size in extents if isinstance(size, torch.SymInt)]
        nodes: dict[Axis, Any] = {place: size.node for place, size in open_extents if not size.node.expr.is_number}
        if not nodes:
            return cls()
        traced = next(iter(nodes.values())).shape_env
        sizes = {place: _settled(node.expr, traced.replacements) for place, node in nodes.items()}
        known = set().union(*(size.free_symbols for size in sizes.values()))
        conditions = (_settled(guard.expr, traced.replacements) for guard in traced.guards)
        return cls(sizes, tuple(dict.fromkeys(each for each in conditions if each.free_symbols and each.free_symbols <= known)))

    def unequal(self, shapes: Mapping[str, Sequence[int]]) -> list[Axis]:
        """Return the axes whose extents the trace assumes to equal or follow from others, but do not in these shapes."""
        symbols = self._symbols(shapes)
        return [place for place, size, extent in self._given(shapes) if _value(size, symbols) not in (None, extent)]

    def doubtful(self, shapes: Mapping[str, Sequence[int]]) -> list[Axis]:
        """Return the axes for which the trace may differ.

        Their extent is 0 or 1, which a trace never examines, or occurs in a violated condition.
        """
        symbols = self._symbols(shapes)
        broken = [each for each in self.conditions if _value(each, symbols) is False]
        asked = set().union(*(each.free_symbols for each in broken))
        return [place for place, size, extent in self._given(shapes) if extent < 2 or size.free_symbols & asked]

    def _given(self, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[Axis, Any, int]]:
        for (name, axis), size in self.sizes.items():
            if name in shapes and axis < len(shapes[name]):
                yield (name, axis), size, shapes[name][axis]

    def _symbols(self, shapes: Mapping[str, Sequence[int]]) -> dict[Any, Any]:
        symbols: dict[Any, Any] = {}
        for _, size, extent in self._given(shapes):
            if size.is_symbol:
                symbols.setdefault(size, sympy.Integer(extent))
        return symbols


def _settled(expression: Any, replacements: Mapping[Any, Any]) -> Any:
    while (following := expression.xreplace(replacements)) != expression:
        expression = following
    return expression


def _value(expression: Any, symbols: Mapping[Any, Any]) -> int | bool | None:
    value = expression.xreplace(symbols)
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_number else None


@dataclass(frozen=True)
class Structure:
    """Mapping between user values in tuples, dictionaries and dataclasses and graph inputs or outputs.

    Attributes:
        spec: structure from ``torch.utils._pytree``; for inputs that of ``(args, kwargs)``.
        names: graph name of each leaf; None if it is no tensor.
        constants: value of each leaf at export if it is no tensor; else None.
        kinds: kind of leaves that are no real tensors, by graph name: ``complex``, as pairs of real numbers along a last axis in
            the graph, or ``number``.
    """

    spec: pytree.TreeSpec
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """Return the user's structure with these values, given by graph name."""
        if self.kinds:
            values = {name: _as_returned(value, self.kinds.get(name)) for name, value in values.items()}
        leaves = (constant if name is None else values[name] for name, constant in zip(self.names, self.constants, strict=True))
        return pytree.tree_unflatten(list(leaves), self.spec)

    def flatten(self, value: Any) -> dict[str, Any]:
        """Return the tensors in a value of this structure, by graph name.

        Raises:
            ValueError: the value has another structure.
        """
        leaves, spec = pytree.tree_flatten(value)
        if spec != self.spec:
            raise ValueError(f"the structure of the values is {spec}, and that of the export was {self.spec}")
        return {name: leaf for name, leaf in zip(self.names, leaves, strict=True) if name is not None}


def _as_returned(value: torch.Tensor, kind: str | None) -> Any:
    if kind == "complex":
        return torch.view_as_complex(value.contiguous())
    return value.item() if kind == "number" else value


@dataclass(frozen=True)
class ExportedModule:
    """A module as a graph, with its properties that ONNX does not keep.

    Attributes:
        model: training graph, not yet bound to a mode if the modes differ only in normalization and dropout. Initializers have
            their names in ``state_dict``; weights are copies.
        inference: graph of ``eval()`` if that differs in more than normalization and dropout; else None.
        inputs: mapping of ``(args, kwargs)`` to graph inputs.
        outputs: mapping of graph outputs to the result of ``forward``.
        outputs_in_evaluation: the same for ``eval()``, which may differ.
        constants: tensors from elsewhere that ``forward`` reads, with their values in the graphs.
        extents: the training trace's assumptions about input extents.
        extents_in_evaluation: the same for ``eval()``.
        failed: why there is no graph of training (True) or evaluation (False), if only the other was required.
        parameters: parameter, by its first name -> ``requires_grad``.
        buffers: buffer -> True if it is in ``state_dict``.
        shared: additional names of parameters and buffers, by their name in the model.
        moving: buffers that ``forward`` changes in training or evaluation, except running statistics and counts. Models that use
            them have them as inputs after those of ``forward``.
        written: buffers changed in training -> outputs of ``model`` with their next values, after the result of ``forward``.
        written_in_evaluation: the same for ``eval()``, in ``inference`` if it exists.
        written_inputs: inputs overwritten in training -> outputs with the new values, after the result and before the buffers.
            Only if requested.
        written_inputs_in_evaluation: the same for ``eval()``.
        norm_policies: batch normalization node -> policy: ``frozen`` for layers in evaluation mode.
        held_rows: embedding rows that are not trained, ``padding_idx``.
        counted_batches: current batch counts of normalization layers (``num_batches_tracked``).
        batches_per_call: batches added to each count per call: a layer that runs twice counts two.
        attributes: entries of ``buffers`` that are module attributes computed by hooks before each call.
        running_variance: kind of variance in running statistics.
    """

    model: ir.Model
    inference: ir.Model | None
    inputs: Structure
    outputs: Structure
    outputs_in_evaluation: Structure
    parameters: Mapping[str, bool]
    buffers: Mapping[str, bool]
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)
    moving: Sequence[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    written_in_evaluation: Mapping[str, str] = field(default_factory=dict)
    written_inputs: Mapping[str, str] = field(default_factory=dict)
    written_inputs_in_evaluation: Mapping[str, str] = field(default_factory=dict)
    norm_policies: Mapping[str, str] = field(default_factory=dict)
    held_rows: Mapping[str, list[int]] = field(default_factory=dict)
    counted_batches: Mapping[str, int] = field(default_factory=dict)
    batches_per_call: Mapping[str, int] = field(default_factory=dict)
    attributes: Sequence[str] = ()
    failed: Mapping[bool, Exception] = field(default_factory=dict)
    constants: Sequence[torch.Tensor] = ()
    extents: Extents = field(default_factory=Extents)
    extents_in_evaluation: Extents = field(default_factory=Extents)
    running_variance: str = "pytorch"

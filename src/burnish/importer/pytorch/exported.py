"""What an exported module is: its graph, the names of its open axes, and what ONNX does not keep of a module.

A trace takes something for granted of the extents of inputs: where ``forward`` asks for them, it went one way.
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
    """Return the names that the symbols of a graph are to have: those that the user gave, and ``batch``.

    Args:
        program: the graph.
        shapes: the open axes of each parameter of ``forward``, as ``torch.export.export`` takes them.
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
    """Number names that several symbols would have."""
    taken: dict[str, int] = {}
    result = {}
    for symbol, name in names.items():
        taken[name] = taken.get(name, 0) + 1
        result[symbol] = name if taken[name] == 1 else f"{name}_{taken[name]}"
    return result


Axis = tuple[str, int]
"""An axis of an input: its name, and the number of the axis."""


@dataclass(frozen=True)
class Extents:
    """The open extents of a trace, and what it takes for granted of them.

    Attributes:
        sizes: of each axis that is open its extent, in symbols.
        conditions: what held for the examples, where ``forward`` or PyTorch asked: in the same symbols.
    """

    sizes: Mapping[Axis, Any] = field(default_factory=dict)
    conditions: Sequence[Any] = ()

    @classmethod
    def of(cls, program: torch.export.ExportedProgram) -> Extents:
        """Read what a program takes for granted."""
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
        """The axes whose extents are equal to others in the trace, or follow from others, and are not so in these shapes."""
        symbols = self._symbols(shapes)
        return [place for place, size, extent in self._given(shapes) if _value(size, symbols) not in (None, extent)]

    def doubtful(self, shapes: Mapping[str, Sequence[int]]) -> list[Axis]:
        """The axes whose extents the trace may go another way for: of none or one, which it never looks at, or by a condition."""
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
    """An expression in the symbols that are left after those that turned out to be others were replaced."""
    while (following := expression.xreplace(replacements)) != expression:
        expression = following
    return expression


def _value(expression: Any, symbols: Mapping[Any, Any]) -> int | bool | None:
    """The value of an expression; None where that is open."""
    value = expression.xreplace(symbols)
    if value in (sympy.true, sympy.false):
        return bool(value)
    return int(value) if value.is_number else None


@dataclass(frozen=True)
class Structure:
    """How values of the user's, in tuples, dictionaries and dataclasses, are inputs or outputs of a graph.

    Attributes:
        spec: the structure, as ``torch.utils._pytree`` describes it; of inputs that of ``(args, kwargs)``.
        names: of each leaf the name in the graph; None where the leaf is no tensor.
        constants: of each leaf what it was at the export, where it is no tensor; else None.
        kinds: what leaves are that are no real tensors in PyTorch, by their names in the graph: ``complex``, where the graph has
            pairs of real numbers along a last axis, or ``number``.
    """

    spec: pytree.TreeSpec
    names: tuple[str | None, ...]
    constants: tuple[Any, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """Return the user's structure with these values, by their names in the graph."""
        if self.kinds:
            values = {name: _as_returned(value, self.kinds.get(name)) for name, value in values.items()}
        leaves = (constant if name is None else values[name] for name, constant in zip(self.names, self.constants, strict=True))
        return pytree.tree_unflatten(list(leaves), self.spec)

    def flatten(self, value: Any) -> dict[str, Any]:
        """Return the tensors of a value of this structure, by their names in the graph.

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
    """A module as a graph, and what ONNX does not keep of it.

    Attributes:
        model: the graph of training, not yet bound to a mode where normalization and dropout are all that differs. Initializers
            have their names in ``state_dict``; weights are copies.
        inference: the graph of ``eval()``, where that differs in more than normalization and dropout; else None.
        inputs: how ``(args, kwargs)`` are the inputs of the graph.
        outputs: how the outputs of the graph are what ``forward`` returns.
        outputs_in_evaluation: the same of ``eval()``, which may return something else.
        constants: the tensors that ``forward`` reads from elsewhere, whose values are in the graphs.
        extents: what the trace of training takes for granted of the extents of inputs.
        extents_in_evaluation: the same of ``eval()``.
        failed: why there is no graph of training (True) or evaluation (False), where only the other was asked for.
        parameters: of every parameter whether it trains (``requires_grad``), by the first of its names.
        buffers: of every buffer whether it is in ``state_dict``.
        shared: the other names of parameters and buffers that have several, by the name that the model has.
        moving: the buffers that ``forward`` changes in training or evaluation, other than running statistics and counts. They are
            inputs of the models, after those of ``forward``, where these read or write them.
        written: those that it changes in training, with the names of the outputs of ``model`` that are their next values, which
            come after what ``forward`` returns.
        written_in_evaluation: the same of ``eval()``, in ``inference`` where there is one.
        written_inputs: the inputs that ``forward`` writes over in training, with the names of the outputs that are what it leaves
            there: after what it returns, before the buffers. Such outputs are there where they were asked for.
        written_inputs_in_evaluation: the same of ``eval()``.
        norm_policies: the policy of each batch normalization, by the name of its node: ``frozen`` where the module has the layer
            in evaluation mode.
        held_rows: rows of embeddings that do not train, ``padding_idx``.
        counted_batches: the counts of batches that normalization layers keep (``num_batches_tracked``), as they stand.
        batches_per_call: how many batches a call adds to each of them: a layer that runs twice counts two.
        attributes: those of ``buffers`` that are attributes of the module, which its hooks compute before each call.
        running_variance: which variance running statistics hold.
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

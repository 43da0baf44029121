"""A graph under construction, with its inputs and outputs, before names and lowering are settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir

from burnish.analysis.parameter_roles import index_range
from burnish.errors import ConfigurationError
from burnish.graph import Builder, Names, Tensor
from burnish.graph.annotations import FIXED_BY, mark_sample_axis, marked_sample_axis
from burnish.norms import ExtentRule
from burnish.program.signature import Entry, GraphSignature, Role
from burnish.rewriting.stages import JOINED, LOWERED, Lowering
from burnish.targets import Target


@dataclass
class Draft:
    """A graph under construction: a copy of a model, and entries for its inputs and outputs."""

    model: ir.Model
    inputs: list[Entry] = field(default_factory=list)
    outputs: list[tuple[ir.Value, Entry]] = field(default_factory=list)
    extents: tuple[ExtentRule, ...] = ()

    def __post_init__(self) -> None:
        self.builder = Builder(self.model.graph)

    def values(self) -> dict[str, ir.Value]:
        """Every value of the graph, by name."""
        graph = self.model.graph
        values = {value.name or "": value for value in (*graph.inputs, *graph.initializers.values())}
        return values | {output.name or "": output for node in graph for output in node.outputs}

    @classmethod
    def reopened(cls, model: ir.Model, signature: GraphSignature) -> Draft:
        """Return a draft that continues from a copy of a finished graph."""
        draft = cls(model.clone(), list(signature.inputs), extents=signature.extents)
        outputs = draft.model.graph.outputs
        draft.outputs = list(zip(outputs, signature.outputs, strict=True))
        outputs.clear()
        return draft

    def take_gradients(self) -> dict[str, Tensor]:
        """Remove the gradients from the outputs and return them by initializer name; for a gradient of rows, the rows."""
        return self._taken(Role.GRADIENT, Role.ROWS)

    def take_indices(self) -> dict[str, Tensor]:
        """Remove the indices of gradients of rows from the outputs and return them by initializer name."""
        return self._taken(Role.INDICES)

    def take_weight(self) -> Tensor | None:
        """Remove the divisor of the loss from the outputs and return it; None if it is not an output."""
        return next(iter(self._taken(Role.WEIGHT).values()), None)

    def _taken(self, *roles: Role) -> dict[str, Tensor]:
        taken = {entry.name.partition(":")[2]: self.builder.tensor(value) for value, entry in self.outputs if entry.role in roles}
        self.outputs = [(value, entry) for value, entry in self.outputs if entry.role not in roles]
        return taken

    def add_input(self, entry: Entry) -> Tensor:
        """Add an input, or return the existing one if the draft has the same entry."""
        return self.add_inputs((entry,))[0]

    def add_inputs(self, entries: Iterable[Entry]) -> list[Tensor]:
        """Add inputs, or find those that the draft has already."""
        graph = self.model.graph
        entries_by_name = {entry.name: entry for entry in self.inputs}
        values = {value.name: value for value in graph.inputs}
        tensors = []
        for entry in entries:
            if entry.name not in values:
                entries_by_name[entry.name] = entry
                self.inputs.append(entry)
                value = ir.Value(name=entry.name, type=ir.TensorType(entry.dtype), shape=ir.Shape(entry.extents))
                if entry.sample_axis != 0:
                    mark_sample_axis(value, entry.sample_axis)
                values[entry.name] = value
                graph.inputs.append(value)
            elif entries_by_name.get(entry.name) != entry:
                raise name_taken(entry)
            tensors.append(self.builder.tensor(values[entry.name]))
        return tensors

    def add_output(self, tensor: Tensor, name: str, role: Role, **fields: Any) -> None:
        """Add a value as an output; it gets its name when the graph is finished (``set_outputs``)."""
        self.outputs.append((tensor.value, Entry(name, role, tensor.dtype, shape_of(tensor.value), **fields)))


def shape_of(value: ir.Value) -> tuple[int | str | None, ...] | None:
    """Return the extents of a value as a signature holds them; None if its rank is unknown."""
    if value.shape is None:
        return None
    return tuple(dimension if isinstance(dimension, int) else dimension.value for dimension in value.shape.dims)


def entry_of(value: ir.Value, role: Role) -> Entry:
    """Describe an input of the model; raise ConfigurationError if it declares no shape."""
    assert value.dtype is not None
    shape = shape_of(value)
    if shape is None:
        raise ConfigurationError(
            f"the model's input '{value.name}' declares no shape, not even its rank: give it one, in which any dimension may be "
            "symbolic"
        )
    if role is not Role.DATA:
        return Entry(value.name or "", role, value.dtype, shape)
    bounds: dict[str, Any] = dict(zip(("minimum", "maximum"), index_range(value), strict=True))
    fixed_by = tuple(sorted((FIXED_BY.get(value) or {}).items()))
    axis = marked_sample_axis(value)
    return Entry(value.name or "", role, value.dtype, shape, **bounds, fixed_by=fixed_by, sample_axis=axis)


def name_taken(entry: Entry) -> ConfigurationError:
    """Return the error for a model input that has the name of one of the program's own inputs."""
    own = "; or, where the model computes its loss of it itself, name that output (output='...') in place of the loss"
    return ConfigurationError(
        f"the model has an input '{entry.name}', a name the program needs for its {entry.role.value}: rename that input"
        + (own if entry.role is Role.LABEL else "")
    )


def name_taken_twice(name: str, graph: str | None) -> ConfigurationError:
    """Return the error for an output of a program that has the name of a different input."""
    return ConfigurationError(
        f"'{name}' would be both an input and an output of the program's {graph} graph: rename it in the model"
    )


def set_outputs(graph: ir.Graph, outputs: Sequence[tuple[ir.Value, str]]) -> None:
    """Make values the graph's outputs under given names; rename any other value that has such a name or that of an input.

    Raises:
        ConfigurationError: an input has the name of an output and is a different value.
    """
    inputs = {value.name: value for value in graph.inputs}
    names = {name for _, name in outputs} | inputs.keys()
    others = (*graph.initializers.values(), *(output for node in graph for output in node.outputs))
    if clashing := [value for value in others if value.name in names]:
        free = Names.of(graph)
        for value in clashing:
            value.name = free.take(f"{value.name}:source")
    builder = Builder(graph)
    for value, name in outputs:
        if inputs.get(name, value) is not value:
            raise name_taken_twice(name, graph.name)
        is_passed_through = name in inputs
        if not is_passed_through and (value.is_graph_input() or value.is_graph_output() or value.is_initializer()):
            value = builder.op("Identity", builder.tensor(value)).value
        value.name = name
        graph.outputs.append(value)


def finish(draft: Draft, name: str, target: Target) -> tuple[ir.Model, GraphSignature]:
    """Name the graph and the outputs of a draft, lower it to the target, and remove unused nodes, in place.

    Returns:
        The model and its signature.
    """
    model = draft.model
    model.graph.name = name
    set_outputs(model.graph, [(value, entry.name) for value, entry in draft.outputs])
    lower_to_target(model, target)
    JOINED.run(model, Lowering(target))
    dimensions = {extent for entry in draft.inputs for extent in entry.extents if isinstance(extent, str)}
    extents = tuple(rule for rule in draft.extents if rule.dimension in dimensions)
    inputs, outputs = tuple(draft.inputs), tuple(entry for _, entry in draft.outputs)
    if not target.float64:
        inputs, outputs = tuple(map(_in_float32, inputs)), tuple(map(_in_float32, outputs))
    return model, GraphSignature(inputs, outputs, extents)


def _in_float32(entry: Entry) -> Entry:
    return replace(entry, dtype=ir.DataType.FLOAT) if entry.dtype == ir.DataType.DOUBLE else entry


def lower_to_target(model: ir.Model, target: Target) -> None:
    """Lower a graph to the target and remove unused nodes, in place.

    Raises:
        UnsupportedOperatorError: the target does not run an operator of the graph.
    """
    LOWERED.run(model, Lowering(target))

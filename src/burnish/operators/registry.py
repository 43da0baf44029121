"""Records of operators, one per name and version, and the view that a rule has of a node.

A record is found by the name and version of an operator. A rule reads like the mathematics, and the family's list ``OPERATORS``
assigns it to operators::

    def tanh(op, dy):
        y = op.output
        return dy * (1 - y * y)


    OPERATORS = [Operator("Tanh", gradient=tanh, elementwise=Elementwise.UNARY, precision=Precision.WIDENED)]

A gradient rule gets the operation and one cotangent per output (None for an output that nothing depends on) and returns one
gradient per input: a tensor if the operator has a single input, otherwise a tuple, with None for an input without gradient. A
gradient may have the shape of the broadcast; the reverse pass sums it back to the shape of the input. A node with branches or a
loop body also reads values of the graph around it: its rule returns their gradients after those of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from importlib import import_module
from typing import Any, TypeVar

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, attribute_value, describe_node, operator_version
from burnish.graph.uses import captured_once
from burnish.operators.axes import AxesRule, MixesRule
from burnish.operators.reopening import ReopenRule

Gradients = Tensor | None | tuple[Tensor | None, ...]
GradientRule = Callable[..., Gradients]
Differentiate = Callable[[Builder, Mapping[ir.Value, Tensor], Sequence[ir.Value]], dict[ir.Value, Tensor | None]]
LoweringRule = Callable[..., Tensor | tuple[Tensor | None, ...]]
TrainingForm = Callable[..., Tensor | tuple[Tensor | None, ...] | None]
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


class Elementwise(Enum):
    """The operands of an operator that computes each element from the elements at the same place."""

    UNARY = "of its only tensor"
    BROADCAST = "of operands that are broadcast against each other"


class Precision(Enum):
    """The precision of an operator in mixed precision; without one it is computed in float32."""

    NARROW = "computed in sixteen bits whatever it reads: a product whose terms an engine sums in float32"
    FOLLOWS = "computed in what it reads: in sixteen bits where every activation has them; weights and constants give way"
    WIDENED = "computed in float32, with a result in sixteen bits where what comes in has them"


@dataclass(frozen=True, eq=False)
class Operator:
    """The record of an operator, valid from a version to the next version with a record.

    Attributes:
        name: its name in the domain.
        domain: the standard's by default.
        since: the first version it is valid for.
        gradient: the gradient rule: ``rule(op, *cotangents) -> gradients``.
        training_form: replaces an operator of the standard in a training graph: ``rule(op) -> outputs``, or None to keep it. For
            operators whose backward needs statistics that they do not return, or whose kernels lose digits.
        lowering: converts an operator of another domain to standard ONNX: ``rule(op) -> outputs``.
        axes: the axis of a result for each axis of an operand; not needed for elementwise operators.
        mixes: the axes of its operands that it works along, so that a result at one place depends on others.
        reopen: applies it to several samples in a model made for one; not needed for elementwise operators.
        elementwise: set if each element of the result depends only on elements at its place; tells the number of operands.
        precision: its mode in mixed precision.
    """

    name: str
    _: KW_ONLY
    domain: str = ""
    since: int = 1
    gradient: GradientRule | None = None
    training_form: TrainingForm | None = None
    lowering: LoweringRule | None = None
    axes: AxesRule | None = None
    mixes: MixesRule | None = None
    reopen: ReopenRule | None = None
    elementwise: Elementwise | None = None
    precision: Precision | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.domain, self.name

    def is_of(self, node: ir.Node | None) -> bool:
        return node is not None and node.op_type == self.name and node.domain == self.domain


def alike(*names: str, **fields: Any) -> list[Operator]:
    """Return records of standard operators that differ only in their names."""
    return [Operator(name, **fields) for name in names]


@functools.cache
def records() -> dict[tuple[str, str], list[Operator]]:
    """Return every record by domain and name, the newest version first.

    The first call loads every family; code that only emits an operator loads only that operator's file.
    """
    table: dict[tuple[str, str], list[Operator]] = {}
    families = import_module("burnish.operators.families")  # by name: the families import this file
    for operator in families.OPERATORS:
        _enter(table, operator)
    return table


def register(operator: Operator) -> None:
    """Add a record of an operator that burnish does not know.

    Raises:
        ValueError: there is already a record for this name and version.
    """
    _enter(records(), operator)


def _enter(table: dict[tuple[str, str], list[Operator]], operator: Operator) -> None:
    versions = table.setdefault(operator.key, [])
    if any(other.since == operator.since for other in versions):
        raise ValueError(
            f"the operator {'.'.join(filter(None, operator.key))} is declared twice from version {operator.since} on: give one "
            "of the two another name, or another since="
        )
    versions.append(operator)
    versions.sort(key=lambda each: -each.since)


def gradient(*names: str, domain: str = "", since: int = 1) -> Callable[[_Rule], _Rule]:
    """Register the gradient rule of operators that burnish does not know, from a version on; errors as for ``register``."""

    def enter(rule: _Rule) -> _Rule:
        for name in names:
            register(Operator(name, domain=domain, since=since, gradient=rule))
        return rule

    return enter


def lowering(*names: str, domain: str = BURNISH_DOMAIN) -> Callable[[_Rule], _Rule]:
    """Register the conversion of operators to standard ONNX, ``rule(op) -> outputs``; errors as for ``register``."""

    def enter(rule: _Rule) -> _Rule:
        for name in names:
            register(Operator(name, domain=domain, lowering=rule))
        return rule

    return enter


def find_record(node: ir.Node, opset: int | None = None) -> Operator | None:
    """Return the record of a node for an opset, by default the newest; None for an operator without one."""
    versions = records().get((node.domain, node.op_type), ())
    version = operator_version(node.op_type, opset) if versions and opset is not None and node.domain == "" else None
    return next((record for record in versions if version is None or version >= record.since), None)


def elementwise(node: ir.Node) -> Elementwise | None:
    """Return the elementwise kind of a node; None if it is not elementwise."""
    record = find_record(node)
    return None if record is None else record.elementwise


def find_gradient(node: ir.Node, opset: int) -> GradientRule | None:
    record = find_record(node, opset)
    return None if record is None else record.gradient


def find_training_form(node: ir.Node, opset: int) -> TrainingForm | None:
    """Return the training form of a node for an opset, or None if the node stays."""
    record = find_record(node, opset)
    return None if record is None else record.training_form


def find_lowering(node: ir.Node) -> LoweringRule | None:
    record = find_record(node)
    return None if record is None else record.lowering


def has_gradient(node: ir.Node, opset: int) -> bool:
    """True if a gradient rule is registered for this node, or for its training form."""
    record = find_record(node, opset)
    return record is not None and (record.gradient is not None or record.training_form is not None)


class Operation:
    """A node as seen by a rule: inputs and outputs are tensors of the builder that the rule emits into.

    Args:
        node: the node.
        builder: emits the rule's nodes.
        asked_for: for each input, then each captured value, True if its gradient is needed; a rule may skip the others.
        differentiate: the reverse pass, for rules of operators with bodies: they run it over a copy of a body.

    Attributes:
        captured: during differentiation, the outer values that the node's bodies read, each once.
    """

    def __init__(
        self,
        node: ir.Node,
        builder: Builder,
        asked_for: tuple[bool, ...] | None = None,
        differentiate: Differentiate | None = None,
    ):
        self.node = node
        self.builder = builder
        self.inputs = tuple(None if value is None else builder.tensor(value) for value in node.inputs)
        self.outputs = tuple(builder.tensor(value) for value in node.outputs)
        self._asked_for = asked_for
        self._differentiate = differentiate
        self.captured = () if differentiate is None else captured_once(node)

    def differentiate(
        self, builder: Builder, cotangents: Mapping[ir.Value, Tensor], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, Tensor | None]:
        assert self._differentiate is not None, "only a gradient rule differentiates"
        return self._differentiate(builder, cotangents, wrt)

    @property
    def input(self) -> Tensor:
        return self.required(0)

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    def required(self, index: int) -> Tensor:
        """Return an input that the standard requires."""
        tensor = self.optional(index)
        if tensor is None:
            raise AssertionError(f"{self}: input {index} is missing; the checker must have refused the model")
        return tensor

    def optional(self, index: int) -> Tensor | None:
        """Return an input, or None if it is omitted."""
        return self.inputs[index] if index < len(self.inputs) else None

    def second_output(self, dtype: ir.DataType, like: Tensor) -> Tensor:
        """Return the second output, added to the node if the model omits it (a mask, max-pool indices)."""
        if len(self.node.outputs) < 2:
            self.node.resize_outputs(2)
        value = self.node.outputs[1]
        # An omitted output has no name, and nodes already in a graph do not name new outputs.
        value.name = value.name or f"{self.output.name}:1"
        if value.type is None:
            value.dtype = dtype
        if value.shape is None and like.shape is not None:
            value.shape = ir.Shape(like.shape.dims)
        return self.builder.tensor(value)

    def wants(self, index: int) -> bool:
        """True if the gradient of input ``index`` is needed; captured values count on after the inputs."""
        return self._asked_for is None or (index < len(self._asked_for) and self._asked_for[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute (int, float, str, tuple of them, tensor, graph), or ``default``."""
        value = attribute_value(self.node, name, default)
        return tuple(value) if isinstance(value, list) else value

    def __str__(self) -> str:
        return describe_node(self.node)

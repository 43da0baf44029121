"""Records of operators, one for each name and version, and how a rule sees a node.

A record is found by the name and version of an operator. A rule reads like the mathematics, and the family's list ``OPERATORS``
says what it is for::

    def tanh(op, dy):
        y = op.output
        return dy * (1 - y * y)


    OPERATORS = [Operator("Tanh", gradient=tanh, elementwise=Elementwise.UNARY, precision=Precision.WIDENED)]

A gradient rule receives the operation and one cotangent per output (None for an output nothing depends on) and returns one
gradient per input: a tensor when the operator has a single input, else a tuple, with None for an input that has no gradient.
A gradient may have the shape of the broadcast; the reverse pass sums it back to the shape of the input. A node with branches or
a loop body also reads values of the graph around it: its rule returns their gradients after those of the inputs.
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
    """How an operator computes each element of its result from those at its place."""

    UNARY = "of its only tensor"
    BROADCAST = "of operands that are broadcast against each other"


class Precision(Enum):
    """What mixed precision does with an operator; one without a word on it is computed in float32."""

    NARROW = "computed in sixteen bits whatever it reads: a product whose terms an engine sums in float32"
    FOLLOWS = "computed in what it reads: in sixteen bits where every activation has them; weights and constants give way"
    WIDENED = "computed in float32, with a result in sixteen bits where what comes in has them"


@dataclass(frozen=True, eq=False)
class Operator:
    """What is known of an operator, from one of its versions on until the next that has a record.

    Attributes:
        name: its name in the domain.
        domain: the standard's by default.
        since: the first version that it holds for.
        gradient: the gradient rule: ``rule(op, *cotangents) -> gradients``.
        training_form: what an operator of the standard becomes in a training graph: ``rule(op) -> outputs``, or None for one that
            stays. For an operator whose backward needs statistics that it does not return, or whose kernels lose digits.
        lowering: how an operator of another domain becomes standard ONNX: ``rule(op) -> outputs``.
        axes: which axis of an operand is which axis of a result; nothing is said of elementwise operators.
        mixes: which axes of its operands it works along, so that what it computes at one place depends on others.
        reopen: how it takes several samples in a model that was made for one; nothing is said of elementwise operators.
        elementwise: whether each element of the result comes from those at its place, and of how many operands.
        precision: what mixed precision does with it.
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
        """Its domain and name, as a node has them."""
        return self.domain, self.name

    def is_of(self, node: ir.Node | None) -> bool:
        """Whether a node is one of this operator."""
        return node is not None and node.op_type == self.name and node.domain == self.domain


def alike(*names: str, **fields: Any) -> list[Operator]:
    """Return records of operators of the standard that differ in their names alone."""
    return [Operator(name, **fields) for name in names]


@functools.cache
def records() -> dict[tuple[str, str], list[Operator]]:
    """Return every record by domain and name, the newest version first.

    The first call loads every family; code that only emits an operator loads that operator's file and no other.
    """
    table: dict[tuple[str, str], list[Operator]] = {}
    families = import_module("burnish.operators.families")  # by name: the families import this file
    for operator in families.OPERATORS:
        _enter(table, operator)
    return table


def register(operator: Operator) -> None:
    """Enter a record of an operator that burnish does not know.

    Raises:
        ValueError: there is a record for this name and version.
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
    """Register how operators become standard ONNX, ``rule(op) -> outputs``; errors as for ``register``."""

    def enter(rule: _Rule) -> _Rule:
        for name in names:
            register(Operator(name, domain=domain, lowering=rule))
        return rule

    return enter


def find_record(node: ir.Node, opset: int | None = None) -> Operator | None:
    """Return the record of a node of a graph of this opset, by default the newest one; None for an operator without one."""
    versions = records().get((node.domain, node.op_type), ())
    version = operator_version(node.op_type, opset) if versions and opset is not None and node.domain == "" else None
    return next((record for record in versions if version is None or version >= record.since), None)


def elementwise(node: ir.Node) -> Elementwise | None:
    """Return how a node computes each element of its result from those at its place; None for one that does not."""
    record = find_record(node)
    return None if record is None else record.elementwise


def find_gradient(node: ir.Node, opset: int) -> GradientRule | None:
    """Return the rule for a node of a graph of this opset, or None."""
    record = find_record(node, opset)
    return None if record is None else record.gradient


def find_training_form(node: ir.Node, opset: int) -> TrainingForm | None:
    """Return what a node of a graph of this opset becomes in a training graph, or None when it stays."""
    record = find_record(node, opset)
    return None if record is None else record.training_form


def find_lowering(node: ir.Node) -> LoweringRule | None:
    """Return the lowering of an operator that is not of the standard, or None for one that has none."""
    record = find_record(node)
    return None if record is None else record.lowering


def has_gradient(node: ir.Node, opset: int) -> bool:
    """Whether a rule is registered for this node, or for what it becomes in a training graph."""
    record = find_record(node, opset)
    return record is not None and (record.gradient is not None or record.training_form is not None)


class Operation:
    """One node as a rule sees it: inputs and outputs as tensors of the builder that the rule's nodes go into.

    Args:
        node: the node.
        builder: where the rule emits.
        asked_for: for each input, and for each captured value after them, whether its gradient is asked for; a rule may skip
            work for the others.
        differentiate: the reverse pass, for the rules of operators with bodies: they run it over a copy of a body.

    Attributes:
        captured: where a gradient is emitted, the values of the graphs around the node that its bodies read, each once.
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
        """Emit the reverse pass of a body at its end (``burnish.autodiff.differentiate``)."""
        assert self._differentiate is not None, "only a gradient rule differentiates"
        return self._differentiate(builder, cotangents, wrt)

    @property
    def input(self) -> Tensor:
        """The first input."""
        return self.required(0)

    @property
    def output(self) -> Tensor:
        """The first output."""
        return self.outputs[0]

    def required(self, index: int) -> Tensor:
        """Input ``index``, which the standard says is there."""
        tensor = self.optional(index)
        if tensor is None:
            raise AssertionError(f"{self}: input {index} is missing; the checker must have refused the model")
        return tensor

    def optional(self, index: int) -> Tensor | None:
        """Input ``index``, or None when it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def second_output(self, dtype: ir.DataType, like: Tensor) -> Tensor:
        """The second output, added to the node when the model left it out (a mask, max-pool indices)."""
        if len(self.node.outputs) < 2:
            self.node.resize_outputs(2)
        value = self.node.outputs[1]
        # An output that was left out has no name, and a node that is in a graph already gives it none.
        value.name = value.name or f"{self.output.name}:1"
        if value.type is None:
            value.dtype = dtype
        if value.shape is None and like.shape is not None:
            value.shape = ir.Shape(like.shape.dims)
        return self.builder.tensor(value)

    def wants(self, index: int) -> bool:
        """Whether the gradient of input ``index`` is asked for; captured values are counted on after the inputs."""
        return self._asked_for is None or (index < len(self._asked_for) and self._asked_for[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute (int, float, str, tuple of them, tensor, graph), or ``default``."""
        value = attribute_value(self.node, name, default)
        return tuple(value) if isinstance(value, list) else value

    def __str__(self) -> str:
        return describe_node(self.node)

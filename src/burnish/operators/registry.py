"""The registry of gradient rules and lowerings, found by operator name and version.

A rule reads like the mathematics::

    @gradient("Tanh")
    def tanh(op, dy):
        y = op.output
        return dy * (1 - y * y)

It receives the operation and one cotangent per output (None for an output nothing depends on) and returns one gradient per
input: a tensor when the operator has a single input, else a tuple, with None for an input that has no gradient. A gradient
may have the shape of the broadcast; the reverse pass sums it back to the shape of the input. A node with branches or a loop
body also reads values of the graph around it: its rule returns their gradients after those of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, attribute_value, describe_node, operator_version
from burnish.graph.uses import captured_once

Gradients = Tensor | None | tuple[Tensor | None, ...]
GradientRule = Callable[..., Gradients]
Differentiate = Callable[[Builder, Mapping[ir.Value, Tensor], Sequence[ir.Value]], dict[ir.Value, Tensor | None]]
LoweringRule = Callable[..., Tensor | tuple[Tensor | None, ...]]
TrainingForm = Callable[..., Tensor | tuple[Tensor | None, ...] | None]
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


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


_Key = tuple[str, str]
_gradients: dict[_Key, tuple[GradientRule, int]] = {}
_training_forms: dict[_Key, tuple[TrainingForm, int]] = {}
_lowerings: dict[_Key, tuple[LoweringRule, int]] = {}


@functools.cache
def load_rules() -> None:
    """Register every rule. Each look-up calls this; code that only emits an operator loads that operator's file and no other."""
    import_module("burnish.operators.families")  # by name: the rules import this file


def gradient(*op_types: str, domain: str = "", since: int = 1) -> Callable[[_Rule], _Rule]:
    """Register the gradient rule of operators, from their version ``since`` on."""
    return _registered(_gradients, op_types, domain, since)


def lowering(*op_types: str, domain: str = BURNISH_DOMAIN) -> Callable[[_Rule], _Rule]:
    """Register the lowering of an operator to standard ONNX: ``rule(op) -> outputs``."""
    return _registered(_lowerings, op_types, domain, 1)


def training_form(*op_types: str, since: int = 1) -> Callable[[_Rule], _Rule]:
    """Register what a standard operator becomes in a training graph: ``rule(op) -> outputs``, or None for one that stays.

    For an operator whose backward needs statistics that the operator does not return, or whose kernels lose digits.
    """
    return _registered(_training_forms, op_types, "", since)


def find_gradient(node: ir.Node, opset: int) -> GradientRule | None:
    """Return the rule for a node of a graph of this opset, or None."""
    return _found(_gradients, node, opset)


def find_training_form(node: ir.Node, opset: int) -> TrainingForm | None:
    """Return what a node of a graph of this opset becomes in a training graph, or None when it stays."""
    return _found(_training_forms, node, opset)


def find_lowering(node: ir.Node) -> LoweringRule | None:
    """Return the lowering of a semantic operator, or None for an operator that has none."""
    load_rules()
    rule, _ = _lowerings.get((node.domain, node.op_type), (None, 1))
    return rule


def has_gradient(node: ir.Node, opset: int) -> bool:
    """Whether a rule is registered for this node, or for what it becomes in a training graph."""
    return find_gradient(node, opset) is not None or find_training_form(node, opset) is not None


def differentiable_operators() -> frozenset[str]:
    """Return the operators of the standard domain that have a gradient rule for some version."""
    load_rules()
    return frozenset(op_type for domain, op_type in _gradients if domain == "")


def semantic_operators() -> frozenset[str]:
    """Return the operators of the ``burnish`` domain that have a lowering."""
    load_rules()
    return frozenset(op_type for domain, op_type in _lowerings if domain == BURNISH_DOMAIN)


def _registered(
    rules: dict[_Key, tuple[Any, int]], op_types: tuple[str, ...], domain: str, since: int
) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        rules.update({(domain, op_type): (rule, since) for op_type in op_types})
        return rule

    return register


def _found(rules: dict[_Key, tuple[_Rule, int]], node: ir.Node, opset: int) -> _Rule | None:
    load_rules()
    rule, since = rules.get((node.domain, node.op_type), (None, 1))
    version = operator_version(node.op_type, opset) if node.domain == "" else None
    return rule if version is None or version >= since else None

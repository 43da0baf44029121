"""The registry of gradient rules and lowerings, found by operator name and version.

A rule reads like the mathematics::

    @gradient("Tanh")
    def tanh(op, dy):
        y = op.output
        return dy * (1 - y * y)

It receives the operation and one cotangent per output (None for an output nothing depends on) and returns one gradient per
input: a tensor when the operator has a single input, else a tuple, with None for an input that has no gradient. A gradient
may have the shape of the broadcast; the reverse pass sums it back to the shape of the input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, Tensor, describe_node, operator_version

Gradients = Tensor | None | tuple[Tensor | None, ...]
GradientRule = Callable[..., Gradients]
LoweringRule = Callable[..., Tensor | tuple[Tensor | None, ...]]
TrainingForm = Callable[..., Tensor | tuple[Tensor | None, ...] | None]
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


class Operation:
    """One node as a rule sees it: inputs and outputs as tensors of the builder that the rule's nodes go into.

    Args:
        node: the node.
        builder: where the rule emits.
        wanted: for each input, whether its gradient is asked for; a rule may skip work for the others.
    """

    def __init__(self, node: ir.Node, builder: Builder, wanted: tuple[bool, ...] | None = None):
        self.node = node
        self.builder = builder
        self.inputs = tuple(None if value is None else builder.tensor(value) for value in node.inputs)
        self.outputs = tuple(builder.tensor(value) for value in node.outputs)
        self._wanted = wanted

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

    def with_output(self, index: int, dtype: ir.DataType, like: Tensor) -> Tensor:
        """Output ``index``, added to the node when the model left this optional output out (a mask, max-pool indices)."""
        if index >= len(self.node.outputs):
            self.node.resize_outputs(index + 1)
        # An output that was left out has no name, and a node that is in a graph already gives it none.
        for position, output in enumerate(self.node.outputs):
            if output.name is None or (position == index and not output.name):
                output.name = f"{self.output.name}:{position}" if position == index else ""
        value = self.node.outputs[index]
        if value.type is None:
            value.dtype = dtype
        if value.shape is None and like.shape is not None:
            value.shape = ir.Shape(like.shape.dims)
        return self.builder.tensor(value)

    def wants(self, index: int) -> bool:
        """Whether the gradient of input ``index`` is asked for."""
        return self._wanted is None or (index < len(self._wanted) and self._wanted[index])

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value of an attribute (int, float, str, tuple of them, tensor, graph), or ``default``."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return default
        if attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS):
            return tuple(attribute.value)
        return attribute.value

    @property
    def version(self) -> int | None:
        """The operator version (``since_version``) this node follows; None outside the standard domain."""
        return node_version(self.node, self.builder.opset)

    def __str__(self) -> str:
        return describe_node(self.node)


@dataclass(frozen=True)
class _Entry:
    rule: Callable[..., Any]
    since: int
    until: int | None

    def covers(self, version: int | None) -> bool:
        return version is None or (self.since <= version and (self.until is None or version <= self.until))


_gradients: dict[tuple[str, str], list[_Entry]] = {}
_lowerings: dict[tuple[str, str], list[_Entry]] = {}
_training_forms: dict[tuple[str, str], list[_Entry]] = {}


def node_version(node: ir.Node, opset: int) -> int | None:
    """Return the version of a standard operator that a node follows in a graph of this opset."""
    return operator_version(node.op_type, opset) if node.domain in ("", "ai.onnx") else None


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def gradient(*op_types: str, domain: str = "", since: int = 1, until: int | None = None) -> Callable[[_Rule], _Rule]:
    """Register a gradient rule for operators, from version ``since`` to version ``until`` (both included)."""

    def register(rule: _Rule) -> _Rule:
        for op_type in op_types:
            _gradients.setdefault((domain, op_type), []).append(_Entry(rule, since, until))
        return rule

    return register


def lowering(*op_types: str, domain: str = "burnish") -> Callable[[_Rule], _Rule]:
    """Register the lowering of a semantic operator to standard ONNX: ``rule(op) -> outputs``."""

    def register(rule: _Rule) -> _Rule:
        for op_type in op_types:
            _lowerings.setdefault((domain, op_type), []).append(_Entry(rule, 1, None))
        return rule

    return register


def training_form(*op_types: str, since: int = 1, until: int | None = None) -> Callable[[_Rule], _Rule]:
    """Register what a standard operator becomes in a training graph: ``rule(op) -> outputs``, or None for one that stays.

    For an operator whose backward needs statistics that the operator does not return, or whose kernels lose digits.
    """

    def register(rule: _Rule) -> _Rule:
        for op_type in op_types:
            _training_forms.setdefault(("", op_type), []).append(_Entry(rule, since, until))
        return rule

    return register


def find_training_form(node: ir.Node, opset: int) -> TrainingForm | None:
    """Return what a node of a graph of this opset becomes in a training graph, or None when it stays."""
    version = node_version(node, opset)
    entries = _training_forms.get((_domain(node), node.op_type), ())
    return next((entry.rule for entry in entries if entry.covers(version)), None)


def find_gradient(node: ir.Node, opset: int) -> GradientRule | None:
    """Return the rule for a node of a graph of this opset, or None."""
    version = node_version(node, opset)
    return next((entry.rule for entry in _gradients.get((_domain(node), node.op_type), ()) if entry.covers(version)), None)


def find_lowering(node: ir.Node) -> LoweringRule | None:
    """Return the lowering of a semantic operator, or None for an operator that has none."""
    return next((entry.rule for entry in _lowerings.get((_domain(node), node.op_type), ())), None)


def differentiable_operators() -> frozenset[str]:
    """Return the operators of the standard domain that have a gradient rule for some version."""
    return frozenset(op_type for domain, op_type in _gradients if domain == "")


def semantic_operators() -> frozenset[str]:
    """Return the operators of the ``burnish`` domain that have a lowering."""
    return frozenset(op_type for domain, op_type in _lowerings if domain == BURNISH_DOMAIN)


def has_gradient(node: ir.Node, opset: int) -> bool:
    """Whether a rule is registered for this node, or for what it becomes in a training graph."""
    return find_gradient(node, opset) is not None or find_training_form(node, opset) is not None

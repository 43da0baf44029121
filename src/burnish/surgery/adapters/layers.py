"""Which layers of a model can be adapted, what they are called, and why others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, attribute_value, describe_node, output_axis, static_shape
from burnish.graph.evaluation import constant_result
from burnish.graph.integer_weights import NARROW_INTEGERS
from burnish.graph.uses import only_user
from burnish.importer.export_notes import module_of
from burnish.settings import matches_pattern, suggestion

OPERATORS = ("MatMul", "Gemm", "Conv", "Gather")
PASSING = frozenset({"Cast", "Identity", "Transpose"})
"""Operators that may stand between a weight and the node that reads it."""
SHOWN = 8


@dataclass(frozen=True)
class Layer:
    """A node with a weight that an adapter can stand beside.

    Attributes:
        node: ``MatMul``, ``Gemm``, ``Conv`` or ``Gather``.
        name: of the module that the weight belongs to, as far as names tell.
        weight: what the node reads: [inputs, outputs], for a Gemm with transB [outputs, inputs], for Conv
            [outputs, inputs / groups, *kernel], for Gather [rows, outputs].
        source: the initializer that it is, or that holds the integers that it is dequantized from.
        inputs, outputs: extents of one sample; for Gather rows and columns.
    """

    node: ir.Node
    name: str
    weight: ir.Value
    source: ir.Value
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, ...]:
        """What a pattern may call it: the layer, its node, its weight."""
        return (self.name, f"{self.name}.weight", self.node.name or "", self.source.name or "")

    @property
    def groups(self) -> int:
        """The groups of a Conv; else 1."""
        return int(attribute_value(self.node, "group", 1)) if self.node.op_type == "Conv" else 1

    @property
    def kernel(self) -> tuple[int, ...]:
        """The spatial extents of a Conv's weight."""
        shape = static_shape(self.weight)
        assert shape is not None
        return shape[2:] if self.node.op_type == "Conv" else ()

    @property
    def output_axis(self) -> int:
        """The axis of the weight that counts the outputs."""
        return output_axis(self.node)

    @property
    def factor(self) -> float:
        """What a Gemm multiplies its product by; else 1."""
        return float(attribute_value(self.node, "alpha", 1.0)) if self.node.op_type == "Gemm" else 1.0

    @property
    def dtype(self) -> ir.DataType:
        """That of the weight as the node reads it, which is its adapter's."""
        assert self.weight.dtype is not None
        return self.weight.dtype

    def array(self, opset: int) -> np.ndarray:
        """Return the weight as the node reads it.

        Raises:
            ConfigurationError: it cannot be computed.
        """
        array = constant_result(self.weight, opset)
        if array is None:
            raise ConfigurationError(
                f"lora: the weight '{self.source.name}' of {describe_node(self.node)} cannot be computed from its file: leave "
                "the layer out of the patterns"
            )
        return array


def find_layers(graph: ir.Graph) -> tuple[list[Layer], dict[ir.Node, str]]:
    """Return the layers of the main graph of a canonical model, and for the other nodes of these operators why they are none."""
    layers: list[Layer] = []
    refused: dict[ir.Node, str] = {}
    for node in graph:
        if node.domain == "" and node.op_type in OPERATORS:
            layer = _layer(node)
            if isinstance(layer, Layer):
                layers.append(layer)
            else:
                refused[node] = layer
    return _named_apart(layers), refused


def select(graph: ir.Graph, patterns: str | Sequence[str], option: str) -> list[Layer]:
    """Return the layers that a pattern matches, by the name of layer, node or initializer, in the order of the graph.

    Raises:
        ConfigurationError: a pattern matches nothing, or only what cannot be adapted, with the reason.
    """
    checked = [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Sequence) else []
    if not checked or not all(isinstance(pattern, str) for pattern in checked):
        raise ConfigurationError(f"{option} must be a name or pattern of layers, or a list of them, not {patterns!r}")
    layers, refused = find_layers(graph)
    for pattern in checked:
        if not any(_matches(layer.names, pattern) for layer in layers):
            raise ConfigurationError(f"{option}: {_no_match(graph, pattern, layers, refused)}")
    return [layer for layer in layers if any(_matches(layer.names, pattern) for pattern in checked)]


def added_bias(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a bias after a MatMul, and the bias [outputs]; None where no such node alone reads the product."""
    add = only_user(node.outputs[0], "Add") if node.op_type == "MatMul" else None
    if add is None:
        return None
    bias = next((value for value in add.inputs if value is not None and value is not node.outputs[0]), None)
    shape = None if bias is None or not bias.is_initializer() else static_shape(bias)
    product = node.outputs[0].shape
    fits = shape is not None and product is not None and len(shape) == 1 and shape[0] == product[-1]
    return (add, bias) if fits and bias is not None else None


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(name and matches_pattern(name, pattern) for name in names)


def _layer(node: ir.Node) -> Layer | str:
    """The layer that a node is, or why it is none."""
    place = 0 if node.op_type == "Gather" else 1
    weight = node.inputs[place]
    assert weight is not None
    source = _source(weight)
    if isinstance(source, str):
        return source
    shape = static_shape(weight)
    if weight.dtype not in FLOATING or shape is None or 0 in shape:
        return f"'{source.name}' is no floating-point weight of known extents"
    if node.op_type == "Gather" and (len(shape) != 2 or attribute_value(node, "axis", 0) not in (0, -2)):
        return f"'{source.name}' is no table of rows that are looked up on axis 0"
    if node.op_type == "Conv" and len(shape) < 3:
        return f"'{source.name}' has no axis of a kernel"
    if node.op_type in ("MatMul", "Gemm") and len(shape) != 2:
        return f"'{source.name}' has {len(shape)} axes, and not those of inputs and outputs"
    found = Layer(node, _name(node, source), weight, source, shape[0], shape[1])
    if node.op_type == "Conv":
        return replace(found, inputs=shape[1] * found.groups, outputs=shape[0])
    return replace(found, inputs=shape[1], outputs=shape[0]) if found.output_axis == 0 else found


def _source(weight: ir.Value) -> ir.Value | str:
    """The initializer that a weight is or is dequantized from, or why it is no weight of its own."""
    leaves: dict[ir.Value, None] = {}
    between: set[str] = set()
    pending, seen = [weight], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is None:
            if not value.is_initializer() or value.is_graph_input():
                return f"'{weight.name}', which it reads for a weight, is computed from the input '{value.name}'"
            leaves[value] = None
        elif producer.op_type != "Constant":
            between.add(producer.op_type)
            pending.extend(operand for operand in producer.inputs if operand is not None)
    integers = [value for value in leaves if value.dtype in NARROW_INTEGERS and value.shape is not None and len(value.shape) > 0]
    if integers:
        return max(integers, key=lambda value: 0 if value.const_value is None else value.const_value.size)
    if between <= PASSING and len(leaves) == 1:
        return next(iter(leaves))
    producer = weight.producer()
    if producer is None or not leaves:
        return f"'{weight.name}', which it reads for a weight, is no initializer"
    names = ", ".join(f"'{value.name}'" for value in list(leaves)[:3])
    return f"its weight '{weight.name}' is computed by {describe_node(producer)} from {names}, and is no initializer of its own"


def _name(node: ir.Node, source: ir.Value) -> str:
    """What a layer is called: the module of its weight, or of its node where PyTorch's exporter says so, else node or weight."""
    name = source.name or ""
    path = (node.name or "").strip("/").split("/")
    if "." in name and "::" not in name:
        return name.rsplit(".", 1)[0]
    if (node.name or "").startswith("/") and len(path) > 1:
        return ".".join(path[:-1])
    return module_of(node) or node.name or name


def _named_apart(layers: list[Layer]) -> list[Layer]:
    """Give layers other names than the first of the same name, unless they read the same weight in the same way."""
    taken: dict[str, tuple[ir.Value, bool]] = {}
    renamed = []
    for layer in layers:
        key = (layer.source, layer.node.op_type == "Gather")
        name, candidates = layer.name, [layer.node.name or "", *(f"{layer.name}_{number}" for number in range(1, len(layers)))]
        while taken.setdefault(name, key) != key:
            name = next(candidate for candidate in candidates if candidate and taken.get(candidate, key) == key)
        renamed.append(replace(layer, name=name))
    return renamed


def _no_match(graph: ir.Graph, pattern: str, layers: Sequence[Layer], refused: dict[ir.Node, str]) -> str:
    for node, why in refused.items():
        read = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        if _matches([node.name or "", _name(node, node.inputs[0 if node.op_type == "Gather" else 1]), *read], pattern):  # type: ignore[arg-type]
            return f"'{pattern}' matches {describe_node(node)}, which cannot be adapted: {why}. Choose layers with weights"
    for node in graph:
        if _matches([node.name or ""], pattern):
            return (
                f"'{pattern}' matches {describe_node(node)}, which cannot be adapted: adapters stand beside MatMul, Gemm, Conv "
                "and Gather"
            )
    for name, value in graph.initializers.items():
        if _matches([name], pattern):
            reader = next((f"{describe_node(node)} reads it" for node in value.consumers()), "nothing reads it")
            return (
                f"'{pattern}' matches the initializer '{name}', which is no weight of a MatMul, Gemm, Conv or Gather: {reader}. "
                "Train it beside the adapters with trainable=[...] of burnish.compile"
            )
    names = [layer.name for layer in layers]
    listed = ", ".join(f"'{name}'" for name in names[:SHOWN]) or "none"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"'{pattern}' matches no layer of the model{suggestion(pattern, names)}; those that can be adapted are: {listed}{more}"

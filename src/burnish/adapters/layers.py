"""Layers that can be adapted, with their names, and reasons why others cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from burnish.adapters.integer_products import PRODUCTS
from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, attribute_value, describe_node, output_axis, static_shape
from burnish.graph.constants import NARROW_INTEGERS, constant_result
from burnish.graph.names import PASSING, further_names, is_called_after_another, layer_name, plain_name
from burnish.graph.uses import only_user
from burnish.optim.parameters import WILDCARDS
from burnish.settings import matches_pattern, suggestion

OPERATORS = ("MatMul", "Gemm", "Conv", "Gather")
SHOWN = 8


@dataclass(frozen=True)
class Layer:
    """A node with a weight that can have an adapter.

    Attributes:
        node: ``MatMul``, ``Gemm``, ``Conv`` or ``Gather``.
        name: name of its module, as far as names and exporters' metadata tell.
        weight: the weight that the node reads: [inputs, outputs]; [outputs, inputs] for a Gemm with transB; [outputs, inputs /
            groups, *kernel] for Conv; [rows, outputs] for Gather.
        source: its initializer, perhaps with quantized integers.
        inputs, outputs: extents of one sample; rows and columns for Gather.
    """

    node: ir.Node
    name: str
    weight: ir.Value
    source: ir.Value
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names that patterns may match: of layer, node and weight, with and without suffixes of model builders."""
        return (self.name, f"{self.name}.weight", *further_names(self.node, self.source, self.name))

    @property
    def groups(self) -> int:
        """Groups of a Conv; else 1."""
        return int(attribute_value(self.node, "group", 1)) if self.node.op_type == "Conv" else 1

    @property
    def kernel(self) -> tuple[int, ...]:
        """Spatial extents of a Conv's weight."""
        shape = static_shape(self.weight)
        assert shape is not None
        return shape[2:] if self.node.op_type == "Conv" else ()

    @property
    def output_axis(self) -> int:
        """Axis of outputs in the weight."""
        return output_axis(self.node)

    @property
    def factor(self) -> float:
        """alpha of a Gemm; else 1."""
        return float(attribute_value(self.node, "alpha", 1.0)) if self.node.op_type == "Gemm" else 1.0

    @property
    def dtype(self) -> ir.DataType:
        """Dtype of the weight that the node reads, and of its adapter."""
        assert self.weight.dtype is not None
        return self.weight.dtype

    def array(self, opset: int) -> np.ndarray:
        """Return the weight that the node reads.

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
    """Return the adaptable layers of a canonical model, also in bodies, and reasons why similar nodes are not."""
    layers: list[Layer] = []
    refused: dict[ir.Node, str] = {}
    for node in graph.all_nodes():
        if node.domain == "" and node.op_type in OPERATORS:
            layer = _layer(node)
            if isinstance(layer, Layer):
                layers.append(layer)
            else:
                refused[node] = layer
        elif node.domain == "" and node.op_type in PRODUCTS:
            refused[node] = (
                "it multiplies integers, and what follows does not multiply by the scales of an activation and a weight, as it "
                "does after onnxruntime.quantization.quantize_dynamic"
            )
    return _named_apart(layers), refused


def select(graph: ir.Graph, patterns: str | Sequence[str], option: str) -> list[Layer]:
    """Return the layers that match a pattern by the name of layer, node or initializer, in graph order.

    Raises:
        ConfigurationError: a pattern matches nothing, or only nodes that cannot be adapted.
    """
    checked = [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Sequence) else []
    if not checked or not all(isinstance(pattern, str) for pattern in checked):
        raise ConfigurationError(f"{option} must be a name or pattern of layers, or a list of them, not {patterns!r}")
    layers, refused = find_layers(graph)
    chosen = {layer for pattern in checked for layer in _named(graph, pattern, layers, refused, option)}
    return [layer for layer in layers if layer in chosen]


def _named(graph: ir.Graph, pattern: str, layers: Sequence[Layer], refused: dict[ir.Node, str], option: str) -> list[Layer]:
    """Return the layers that match a pattern; a layer's own name takes precedence over its other names."""
    own = [layer for layer in layers if pattern in (layer.name, f"{layer.name}.weight")]
    matched = own or [layer for layer in layers if _matches(layer.names, pattern)]
    if not matched:
        raise ConfigurationError(f"{option}: {_no_match(graph, pattern, layers, refused)}")
    names = list(dict.fromkeys(layer.name for layer in matched))
    if len(names) > 1 and WILDCARDS.isdisjoint(pattern) and pattern not in graph.initializers:
        listed = ", ".join(f"'{name}'" for name in names[:SHOWN])
        raise ConfigurationError(f"{option}: '{pattern}' names {len(names)} layers: say which, of {listed}; or list them all")
    return matched


def added_bias(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the Add of a bias after a MatMul, and the bias [outputs]; None unless it is the product's only reader."""
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
    found = Layer(node, layer_name(node, source), weight, source, shape[0], shape[1])
    if node.op_type == "Conv":
        return replace(found, inputs=shape[1] * found.groups, outputs=shape[0])
    return replace(found, inputs=shape[1], outputs=shape[0]) if found.output_axis == 0 else found


def _source(weight: ir.Value) -> ir.Value | str:
    """Return the initializer of a weight, perhaps before dequantization, or the reason why there is none."""
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


def _named_apart(layers: list[Layer]) -> list[Layer]:
    """Give each layer a unique name, plain if possible; layers that use a weight in the same way share a name.

    A weight shared by two layers is usually named after one of them, which keeps the name.
    """
    keys = {layer.node: (layer.source, layer.node.op_type == "Gather", layer.name) for layer in layers}
    plain = Counter(plain_name(layer.name) for layer in {keys[layer.node]: layer for layer in layers}.values())
    taken: dict[str, tuple[ir.Value, bool, str]] = {}
    names: dict[ir.Node, str] = {}
    for layer in sorted(layers, key=lambda layer: is_called_after_another(layer.node, layer.source)):
        key, short = keys[layer.node], plain_name(layer.name)
        numbered = (f"{layer.name}_{number}" for number in range(1, len(layers) + 1))
        candidates = [*([short] if plain[short] == 1 else []), layer.name, layer.node.name or "", *numbered]
        names[layer.node] = name = next(each for each in candidates if each and taken.get(each, key) == key)
        taken[name] = key
    return [replace(layer, name=names[layer.node]) for layer in layers]


def _no_match(graph: ir.Graph, pattern: str, layers: Sequence[Layer], refused: dict[ir.Node, str]) -> str:
    for node, why in refused.items():
        read = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
        weight = node.inputs[0 if node.op_type == "Gather" else 1]
        assert weight is not None
        if _matches([node.name or "", layer_name(node, weight), *read], pattern):
            return f"'{pattern}' matches {describe_node(node)}, which cannot be adapted: {why}. Choose layers with weights"
    for node in graph.all_nodes():
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
    names = list(dict.fromkeys(layer.name for layer in layers))
    listed = ", ".join(f"'{name}'" for name in names[:SHOWN]) or "none"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"'{pattern}' matches no layer of the model{_near(pattern, names)}; those that can be adapted are: {listed}{more}"


def _near(pattern: str, names: Sequence[str]) -> str:
    ending = [name for name in names if name.endswith(f".{pattern}")]
    if len(ending) > 1:
        return f" (did you mean '*.{pattern}', which matches {len(ending)}, such as '{ending[0]}'?)"
    return f" (did you mean '{ending[0]}'?)" if ending else suggestion(pattern, names)

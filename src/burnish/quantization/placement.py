"""Placement of activation quantizers so that ONNX Runtime can fuse nodes into integer operators.

An operator runs with integers if all its inputs come from DequantizeLinear and its output goes into QuantizeLinear. Fused
activations, biases and batch normalization come before that QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from burnish.graph import FLOATING, attribute_value, constant_array, output_axis, replace_uses
from burnish.graph.uses import is_read_once, is_used, only_user, origin_of

LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators with weights."""
JOINING = frozenset({"Add", "Concat", "MatMul", "Mul"})
"""Operators on several activations."""
REDUCING = frozenset({"AveragePool", "GlobalAveragePool", "LeakyRelu", "Relu", "Sigmoid"})
"""Operators on one activation, with their own output scale."""
MOVING = frozenset("Flatten Identity MaxPool Reshape Squeeze Transpose Unsqueeze".split())
"""Operators whose outputs are some of their inputs' numbers, on the same scale."""
DROPPING = ("Dropout",)
PASSED = MOVING - {"MaxPool"} | {"Relu"}
"""Operators that commute with Dropout: they move numbers, or keep signs and zeros."""


@dataclass(frozen=True)
class Layer:
    """A linear layer with its own weights.

    Attributes:
        node: a Conv, ConvTranspose, Gemm or MatMul.
        weight: its initializer.
        axis: axis of output channels in the weight; None if there is no single one.
        input_axis: axis of inputs in a matrix; None for a convolution.
    """

    node: ir.Node
    weight: ir.Value
    axis: int | None
    input_axis: int | None


@dataclass(frozen=True)
class Place:
    """An activation to quantize.

    Attributes:
        value: the activation.
        grid: the activation that defines its scale and zero point, perhaps itself.
        low, high: bounds from a Clip before it, or None.
    """

    value: ir.Value
    grid: ir.Value
    low: float | None = None
    high: float | None = None


def layers_of(nodes: Iterable[ir.Node]) -> list[Layer]:
    """Return the linear layers among nodes whose weights are float32 initializers, in order."""
    return [layer for node in nodes if (layer := _layer(node)) is not None]


def _layer(node: ir.Node) -> Layer | None:
    if node.domain != "" or node.op_type not in LAYERS:
        return None
    x, weight = node.inputs[:2]
    if x is None or weight is None or not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT:
        return None
    array = constant_array(weight)
    if array is None or array.size == 0 or constant_array(x) is not None:
        return None
    if node.op_type == "Conv":
        return Layer(node, weight, 0, None)
    if node.op_type == "ConvTranspose":
        return Layer(node, weight, 1 if attribute_value(node, "group", 1) == 1 else None, None)
    factors = [attribute_value(node, name, 1.0) for name in ("alpha", "beta")] if node.op_type == "Gemm" else []
    # ONNX Runtime (1.32) computes a quantized Gemm wrong if alpha is not 1.
    if array.ndim != 2 or any(factor != 1.0 for factor in factors):
        return None
    axis = output_axis(node)
    return Layer(node, weight, axis, 1 - axis)


def put_dropout_last(graph: ir.Graph) -> None:
    """Move each Dropout after operators that move numbers and after a Relu, to the next layer; in place.

    Training scales the values that Dropout keeps, so ranges measured in inference do not hold after it. Activations are therefore
    quantized before Dropout, and nothing after it until the next layer.
    """
    for node in [node for node in graph if node.op_type == "Dropout" and node.domain == ""]:
        while (reader := only_user(node.outputs[0])) is not None and _passes(node, reader):
            before, dropped, moved = node.inputs[0], node.outputs[0], reader.outputs[0]
            reader.replace_input_with(0, before)
            replace_uses(moved, dropped)
            node.replace_input_with(0, moved)
            dropped.type, dropped.shape = moved.type, moved.shape
            moved.name, dropped.name = dropped.name, moved.name
            graph.remove(node)
            graph.insert_after(reader, node)


def _passes(dropout: ir.Node, reader: ir.Node) -> bool:
    is_plain = not any(map(is_used, dropout.outputs[1:]))
    fits = reader.domain == "" and reader.op_type in PASSED and reader.graph is dropout.graph
    return is_plain and fits and len(reader.outputs) == 1 and reader.inputs[0] is dropout.outputs[0]


def nodes_apart(graph: ir.Graph, layers: Collection[ir.Node], products: bool) -> set[ir.Node]:
    """Return the nodes that stay in floating point: other linear layers, Softmax, and nodes that only move numbers to them.

    They read unquantized activations. Otherwise ONNX Runtime (1.32) would also quantize a layer's weights, and compute Softmax
    from a table of exponentials and the integer part of its scale's reciprocal.

    Args:
        graph: graph of a canonical model.
        layers: linear layers that compute with integers.
        products: True if products of two activations do, too.
    """
    linear = {layer.node for layer in layers_of(graph)}
    apart = linear.difference(layers) | {node for node in graph if node.op_type == "Softmax" and node.domain == ""}
    if not products:
        apart |= {node for node in graph if node.op_type == "MatMul" and node.domain == "" and node not in linear}
    for node in reversed(graph):
        readers = [reader for output in node.outputs for reader, _ in output.uses()]
        is_output = any(output.is_graph_output() for output in node.outputs)
        moves = node.op_type in MOVING or node.op_type in DROPPING
        if moves and readers and not is_output and all(reader in apart for reader in readers):
            apart.add(node)
    return apart


def _is_read(value: ir.Value, apart: Collection[ir.Node], quantize_outputs: bool) -> bool:
    if value.is_graph_output():
        return quantize_outputs
    return any(reader not in apart for reader, _ in value.uses())


def places(graph: ir.Graph, layers: Collection[ir.Node], apart: Collection[ir.Node], quantize_outputs: bool) -> list[Place]:
    """Return the activations of a graph to quantize, in graph order.

    Args:
        graph: graph of a canonical model.
        layers: linear layers that compute with integers.
        apart: nodes that read unquantized activations.
        quantize_outputs: True to quantize model outputs, too.
    """
    walk = _Walk(frozenset(layers), apart)
    for node in graph:
        walk.visit(node)
    found = [place for place in walk.found.values() if _is_read(place.value, apart, quantize_outputs)]
    order = {value: index for index, value in enumerate(_values(graph))}
    return sorted(found, key=lambda place: order[place.value])


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


class _Walk:
    def __init__(self, layers: frozenset[ir.Node], apart: Collection[ir.Node]):
        self.found: dict[ir.Value, Place] = {}
        self._layers, self._apart = layers, apart

    def visit(self, node: ir.Node) -> None:
        if node.domain != "":
            return
        if node in self._layers:
            self._add(node.inputs[:1])
            self._add_result(node)
        elif node.op_type in JOINING and node not in self._apart and self._joins(node):
            self._add(node.inputs)
            self._add_result(node)
        elif node.inputs and node.inputs[0] in self.found and node.outputs[0] not in self.found:
            if node.op_type in MOVING and len(node.outputs) == 1:
                grid = self.found[node.inputs[0]]
                self.found[node.outputs[0]] = Place(node.outputs[0], grid.grid, grid.low, grid.high)
            elif node.op_type in REDUCING:
                self._add_result(node)

    def _joins(self, node: ir.Node) -> bool:
        operands = [value for value in node.inputs if value is not None]
        if not all(value.dtype in FLOATING and constant_array(value) is None for value in operands):
            return False
        return any(origin_of(value, DROPPING) in self.found for value in operands)

    def _add(self, values: Collection[ir.Value | None]) -> None:
        for value in values:
            if value is not None and value.dtype in FLOATING:
                activation = origin_of(value, DROPPING)
                self.found.setdefault(activation, Place(activation, activation))

    def _add_result(self, node: ir.Node) -> None:
        value, low, high = _end_of(node)
        self.found.setdefault(value, Place(value, value, low, high))


def _end_of(node: ir.Node) -> tuple[ir.Value, float | None, float | None]:
    """Return the value after the nodes that are fused into an integer operator, and the bounds of its Clip."""
    value = node.outputs[0]
    while is_read_once(value):
        reader = next(iter(value.uses()))[0]
        if reader.domain != "" or reader.graph is not node.graph:
            break
        if reader.op_type == "Relu":
            return reader.outputs[0], None, None
        if reader.op_type == "Clip" and reader.inputs[0] is value:
            bounds = (constant_array(bound) for bound in (*reader.inputs[1:3], None, None)[:2])
            low, high = (None if bound is None else float(bound.reshape(())) for bound in bounds)
            return reader.outputs[0], low, high
        is_normalization = reader.op_type == "BatchNormalization" and reader.inputs[0] is value
        if not (node.op_type in LAYERS and (is_normalization or _adds_bias(node, reader))):
            break
        value = reader.outputs[0]
    return value, None, None


def _adds_bias(node: ir.Node, reader: ir.Node) -> bool:
    if node.op_type != "MatMul" or reader.op_type != "Add":
        return False
    arrays = [constant_array(value) for value in reader.inputs]
    return any(array is not None and array.ndim <= 1 for array in arrays)

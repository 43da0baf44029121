"""Where activations are quantized: at the places around which ONNX Runtime makes one integer operator of several nodes.

An operator is computed with integers where each of its inputs comes from a DequantizeLinear and its output goes into a
QuantizeLinear. Activations, added biases and batch normalization that an operator takes in stand before that QuantizeLinear.
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
"""Operators of several activations."""
REDUCING = frozenset({"AveragePool", "GlobalAveragePool", "LeakyRelu", "Relu", "Sigmoid"})
"""Operators of one activation, whose results lie on a grid of their own."""
MOVING = frozenset("Flatten Identity MaxPool Reshape Squeeze Transpose Unsqueeze".split())
"""Operators whose results are some of the numbers that they read, and lie on the same grid."""
DROPPING = ("Dropout",)
PASSED = MOVING - {"MaxPool"} | {"Relu"}
"""Operators that give the same before a Dropout as after it: those that move numbers, and one that keeps signs and zeros."""


@dataclass(frozen=True)
class Layer:
    """A linear layer with weights of its own.

    Attributes:
        node: a Conv, ConvTranspose, Gemm or MatMul.
        weight: its initializer.
        axis: of the weight, that of the output channels; None where no single axis has them.
        input_axis: of a matrix, that of its inputs; None for a convolution.
    """

    node: ir.Node
    weight: ir.Value
    axis: int | None
    input_axis: int | None


@dataclass(frozen=True)
class Place:
    """An activation that is quantized.

    Attributes:
        value: the activation.
        grid: the activation whose scale and zero point it has; ``value`` itself where it has its own.
        low, high: what it is never less and never larger than, as a Clip before it says; None where nothing does.
    """

    value: ir.Value
    grid: ir.Value
    low: float | None = None
    high: float | None = None


def layers_of(nodes: Iterable[ir.Node]) -> list[Layer]:
    """Return the linear layers among nodes whose weights are floating-point initializers, in their order."""
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
    # ONNX Runtime (1.32) computes a quantized Gemm wrong where alpha is not 1.
    if array.ndim != 2 or any(factor != 1.0 for factor in factors):
        return None
    axis = output_axis(node)
    return Layer(node, weight, axis, 1 - axis)


def put_dropout_last(graph: ir.Graph) -> None:
    """Let each Dropout drop what reaches the next layer, behind what moves numbers and behind a Relu; in place.

    In training it multiplies what it keeps: no range that was measured in inference holds behind it. So an activation is
    quantized before its Dropout, and nothing behind that until the next layer.
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
    """Whether the one reader of a Dropout gives the same before it."""
    is_plain = not any(map(is_used, dropout.outputs[1:]))
    fits = reader.domain == "" and reader.op_type in PASSED and reader.graph is dropout.graph
    return is_plain and fits and len(reader.outputs) == 1 and reader.inputs[0] is dropout.outputs[0]


def nodes_apart(graph: ir.Graph, layers: Collection[ir.Node], products: bool) -> set[ir.Node]:
    """Return what stays in floating-point numbers: linear layers, Softmax, and what only moves numbers to them.

    They read activations as they are: where one came from a DequantizeLinear, ONNX Runtime (1.32) would quantize the weights of
    a layer too, and compute a Softmax with a table of exponentials and the whole part of the reciprocal of its scale.

    Args:
        graph: of a canonical model.
        layers: the linear layers that compute with integers.
        products: whether products of two activations do.
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
    """Whether anything reads a value as integers give it."""
    if value.is_graph_output():
        return quantize_outputs
    return any(reader not in apart for reader, _ in value.uses())


def places(graph: ir.Graph, layers: Collection[ir.Node], apart: Collection[ir.Node], quantize_outputs: bool) -> list[Place]:
    """Return the activations of a graph that are to be quantized, in its order.

    Args:
        graph: of a canonical model.
        layers: the linear layers that compute with integers.
        apart: the nodes that read activations as they are.
        quantize_outputs: whether outputs of the model are quantized as well.
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
    """The state of one walk over a graph, in its order."""

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
        """Whether a node reads activations alone, of which one at least is quantized."""
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
    """The value after what an integer operator takes in, and what it is never less and never larger than."""
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

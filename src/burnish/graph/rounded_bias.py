"""A bias that is rounded to what an integer operator adds: in inference, where an export has to give the same numbers.

A layer computes ``s * sum(x * w)`` with integers x and w, and adds its bias as an integer times s, the product of both scales. A
step of training does without: what is rounded off is half of s at most, which no activation of 8 bits shows.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph.edits import remove_node
from burnish.graph.uses import is_used

KEY = "burnish.quantization.bias"
INTEGERS, BIAS, PART = "integers", "bias", "part"
"""What the marked nodes give: the integers, and what the layer reads as its bias. An Add adds to the bias that the layer has;
another operator stands for one that it has not. Parts are what else is computed on the way."""


def mark(value: ir.Value, part: str) -> None:
    """Say of the node of a value which part of a rounded bias it gives."""
    producer = value.producer()
    assert producer is not None
    producer.metadata_props[KEY] = part


def readers_of(weight: ir.Value) -> list[ir.Node]:
    """Return the nodes that read a weight, each time they do, but for those that round a bias by it."""
    return [reader for reader, _ in weight.uses() if reader.metadata_props.get(KEY) is None or reader.metadata_props[KEY] == BIAS]


def rounded_biases(graph: ir.Graph) -> list[tuple[ir.Node, ir.Node]]:
    """Return the layers of a graph whose bias is rounded, each with the node that gives it."""
    biases = [node for node in graph if node.metadata_props.get(KEY) == BIAS]
    return [(reader, node) for node in biases for reader, index in tuple(node.outputs[0].uses()) if index == 2]


def integers_of(bias: ir.Node) -> ir.Value | None:
    """Return the integers that a bias is computed from."""
    pending = [bias]
    while pending:
        node = pending.pop()
        if node.metadata_props.get(KEY) == INTEGERS:
            return node.outputs[0]
        pending.extend(producer for value in node.inputs if value is not None and (producer := value.producer()) is not None)
    return None


def unround(graph: ir.Graph) -> None:
    """Give layers back the bias that was rounded, or none, in place."""
    for layer, bias in rounded_biases(graph):
        layer.replace_input_with(2, bias.inputs[0] if bias.op_type == "Add" else None)
        _remove_unread(bias)


def _remove_unread(node: ir.Node) -> None:
    pending = [node]
    while pending:
        node = pending.pop()
        if node.graph is None or any(map(is_used, node.outputs)):
            continue
        producers = [producer for value in node.inputs if value is not None and (producer := value.producer()) is not None]
        remove_node(node)
        pending.extend(producers)

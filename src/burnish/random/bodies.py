"""Keys in branches and loop bodies: one of its own for each iteration, a function of the number of that iteration."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, attribute_value, bodies, describe_node
from burnish.random.keys import KEY_DTYPE, mix

# The fraction of the root of 13.
_ITERATION = np.array([0x9B05688C], np.uint32)


def keys_in_bodies(graph: ir.Graph, key: ir.Value, draws: Collection[str]) -> Iterator[tuple[ir.Graph, ir.Value]]:
    """Give the bodies in a graph that draw at random, in themselves or in bodies of theirs, each with its key.

    A branch has the key of the graph around it. A loop makes one of that and of the number of the iteration: what draws from it
    draws the same when the backward pass computes that iteration again.

    Args:
        graph: the graph around them.
        key: its key: uint32, shape [2].
        draws: the operators that draw at random.

    Raises:
        ConfigurationError: a body of an operator draws that is neither If, Loop nor Scan.
    """
    for node in list(graph):
        for body in bodies(node):
            if not any(inside.op_type in draws and inside.domain == "" for inside in body.all_nodes()):
                continue
            body.opset_imports.update(graph.opset_imports)
            inside = key if node.op_type == "If" else _key_of_iteration(node, body, key)
            yield body, inside
            yield from keys_in_bodies(body, inside, draws)


def _key_of_iteration(node: ir.Node, body: ir.Graph, key: ir.Value) -> ir.Value:
    if node.domain != "" or node.op_type not in ("Loop", "Scan"):
        raise ConfigurationError(
            f"{describe_node(node)} has a body that draws random numbers, and a key cannot tell its runs apart: move what draws "
            "out of it, or write it as a Loop"
        )
    number = body.inputs[0] if node.op_type == "Loop" else _number_of_slice(node, body)
    builder = Builder(body, before=next(iter(body), None))
    word = builder.op("Reshape", builder.cast(builder.tensor(number), KEY_DTYPE), builder.integers([1]))
    return mix(builder.op("Add", mix(word + builder.constant(_ITERATION)), builder.tensor(key))).value


def _number_of_slice(node: ir.Node, body: ir.Graph) -> ir.Value:
    """Let a Scan give its body the number of the iteration: one more input that is sliced."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    count = int(attribute_value(node, "num_scan_inputs", 0))
    axes = list(attribute_value(node, "scan_input_axes", [0] * count))
    first = node.inputs[len(node.inputs) - count]
    assert first is not None
    builder = Builder(graph, before=node)
    extent = builder.op("Gather", builder.op("Shape", builder.tensor(first)), builder.scalar(axes[0], ir.DataType.INT64), axis=0)
    numbers = builder.op("Range", builder.scalar(0, extent), extent, builder.scalar(1, extent))
    node.resize_inputs(len(node.inputs) + 1)
    node.replace_input_with(len(node.inputs) - 1, numbers.value)
    node.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", count + 1)
    for name in ("scan_input_axes", "scan_input_directions"):
        if name in node.attributes:
            node.attributes[name] = ir.AttrInt64s(name, [*attribute_value(node, name, ()), 0])
    number = ir.Value(name=f"{numbers.name}:number", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    body.inputs.append(number)
    return number

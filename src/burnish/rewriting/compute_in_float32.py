"""A graph that computes in float32 what a file in float16 or bfloat16 computes in sixteen bits.

A step in sixteen bits loses most updates: a weight of float16 near 1 cannot move by less than 5e-4, and gradients below 6e-8 are
zero. Runtimes for CPUs have no fast kernels of sixteen bits either, and ONNX Runtime none at all of bfloat16.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.graph import SIXTEEN_BIT, Builder, Names, bodies, insert_behind, replace_output
from burnish.rewriting.wider_values import has_values_of, widen_initializers, widen_node, widen_values

SINGLE = ir.DataType.FLOAT


def has_sixteen_bit_values(model: ir.Model) -> bool:
    """Whether a model holds any value of float16 or bfloat16."""
    return has_values_of(model, SIXTEEN_BIT)


def compute_in_float32(model: ir.Model, *, keep_inputs: bool = True, keep_outputs: bool = False) -> bool:
    """Let a model compute in float32 whatever it computes in float16 or bfloat16, in place: as if its file were one of float32.

    Casts between the two pass values on as they are (Identity), and constants keep the numbers that they were rounded to. One
    thing stays: in a model whose weights are all wider, a value that is cast down and straight back is rounded on purpose, and
    goes on being rounded. Names stay.

    Args:
        model: a canonical model.
        keep_inputs: whether inputs keep their dtypes, and are cast where they are read.
        keep_outputs: whether outputs keep their dtypes, by a cast at the end.
    """
    if not has_sixteen_bit_values(model):
        return False
    graph = model.graph
    outputs = [value.dtype for value in graph.outputs]
    rounded = _rounded_on_purpose(graph)
    if keep_inputs:
        order = order_of(graph)
        for value in graph.inputs:
            if value.dtype in SIXTEEN_BIT and value.uses():
                cast_for_readers(graph, value, SINGLE, order)
    else:
        widen_values(graph.inputs, SIXTEEN_BIT, SINGLE)
    widen_initializers(graph, SIXTEEN_BIT, SINGLE)
    operands = {node: node.inputs[0].dtype for node in graph.all_nodes() if _copies_bits(node) and node.inputs[0] is not None}
    for node in list(graph.all_nodes()):
        if node in operands:
            _keep_bits(node, operands[node])
        elif not rounded.intersection(node.outputs):
            _widen(node)
    if keep_outputs:
        for index, dtype in enumerate(outputs):
            if dtype in SIXTEEN_BIT and graph.outputs[index].dtype != dtype:
                _round_output(graph, graph.outputs[index], dtype)
    return True


Order = dict[ir.Node, tuple[int, ir.Node]]
"""For each node of a graph, and of bodies in it, the place and the node of the graph that it is or is in."""


def order_of(graph: ir.Graph) -> Order:
    """Return where the nodes of a graph stand."""
    order: Order = {}
    for index, node in enumerate(graph):
        order[node] = index, node
        for body in bodies(node):
            order.update(dict.fromkeys(body.all_nodes(), (index, node)))
    return order


def cast_for_readers(
    graph: ir.Graph, value: ir.Value, dtype: ir.DataType, order: Order, besides: Collection[ir.Node] = ()
) -> None:
    """Put a cast of a value in front of the first node that reads it, and let all nodes ``besides`` some read that."""
    readers = [(node, index) for node, index in value.uses() if node not in besides]
    _, first = min((order[node] for node, _ in readers), key=lambda place: place[0])
    builder = Builder(graph, before=first)
    cast = builder.op("Cast", builder.tensor(value), to=int(dtype)).value
    for node, index in readers:
        node.replace_input_with(index, cast)


def _rounded_on_purpose(graph: ir.Graph) -> set[ir.Value]:
    """The values that are cast down and straight back, and nothing else, in a model whose weights are all wider."""
    if any(value.dtype in SIXTEEN_BIT and value.shape is not None and len(value.shape) for value in graph.initializers.values()):
        return set()
    return {
        node.outputs[0]
        for node in graph.all_nodes()
        if _is_cast(node)
        and node.outputs[0].dtype in SIXTEEN_BIT
        and node.inputs[0] is not None
        and node.inputs[0].dtype not in SIXTEEN_BIT
        and _is_cast_back(node.outputs[0])
    }


def _is_cast_back(value: ir.Value) -> bool:
    readers = [node for node, _ in value.uses()]
    wider = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return (
        bool(readers)
        and not value.is_graph_output()
        and all(_is_cast(node) and node.outputs[0].dtype in wider for node in readers)
    )


def _is_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.domain == ""


def _copies_bits(node: ir.Node) -> bool:
    """Whether a node gives the bits of its operand: a wider type has others."""
    return node.op_type == "BitCast" and node.domain == ""


def _widen(node: ir.Node) -> None:
    widen_node(node, SIXTEEN_BIT, SINGLE)
    source, result = node.inputs[0] if node.inputs else None, node.outputs[0] if node.outputs else None
    if _is_cast(node) and source is not None and result is not None and source.dtype == result.dtype == SINGLE:
        # The name stays for who asks for the value by it; what reads the value reads past it.
        node.op_type = "Identity"
        node.attributes.clear()
        for reader, index in tuple(result.uses()):
            reader.replace_input_with(index, source)


def _keep_bits(node: ir.Node, operand: ir.DataType | None) -> None:
    """Let a node that copies bits read its operand in the type that it had, and widen what it gives."""
    graph, source, result = node.graph, node.inputs[0], node.outputs[0]
    assert graph is not None
    assert source is not None
    if operand in SIXTEEN_BIT and source.dtype != operand:
        builder = Builder(graph, before=node)
        node.replace_input_with(0, builder.cast(builder.tensor(source), operand).value)
    if result.dtype in SIXTEEN_BIT:
        following = ir.node("Cast", [result], {"to": int(SINGLE)})
        insert_behind(node, following, Names.of(graph))
        following.outputs[0].type = ir.TensorType(SINGLE)


def _round_output(graph: ir.Graph, value: ir.Value, dtype: ir.DataType) -> None:
    """Put a cast before an output, which takes over its name."""
    builder, name = Builder(graph), value.name
    rounded = builder.cast(builder.tensor(value), dtype).value
    replace_output(value, rounded)
    value.name = Names.of(graph).take(f"{name}:float32")
    rounded.name = name

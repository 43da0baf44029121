"""Casts of mixed precision moved, without a change to any value, to where they cost least and products are recognized."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, remove_node, replace_node

WIDTHS = {ir.DataType.FLOAT16: 2, ir.DataType.BFLOAT16: 2, ir.DataType.FLOAT: 4, ir.DataType.DOUBLE: 8}


def read_shapes_before_casts(graph: ir.Graph) -> None:
    """Let every Shape read what a cast reads, in place: a cast that nothing else reads need not be computed."""
    for node in graph:
        if node.op_type != "Shape" or node.domain != "":
            continue
        while (source := _before_cast(node.inputs[0])) is not None:
            node.replace_input_with(0, source)


def transpose_narrow(graph: ir.Graph) -> None:
    """Let a matrix that is cast and transposed be transposed in its narrower dtype, in place: products read it so."""
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        other = None if source is None else source.producer()
        if other is None or source is None or source.shape is None or len(source.shape) != 2 or source.is_graph_output():
            continue
        kinds = (other.op_type, node.op_type)
        if kinds not in (("Cast", "Transpose"), ("Transpose", "Cast")) or other.domain != "" or node.domain != "":
            continue
        transposition = node if kinds[1] == "Transpose" else other
        if "perm" in transposition.attributes and list(transposition.attributes["perm"].as_ints()) != [1, 0]:
            continue
        before, after = other.inputs[0], node.outputs[0]
        if len(source.uses()) != 1 or before is None:
            continue
        if before.dtype not in WIDTHS or after.dtype not in WIDTHS:
            continue
        widens = WIDTHS[before.dtype] < WIDTHS[after.dtype]
        if kinds != (("Cast", "Transpose") if widens else ("Transpose", "Cast")) or before.dtype == after.dtype:
            continue
        builder = Builder(graph, before=node)
        operand = builder.tensor(before)
        if widens:
            exchanged = builder.cast(builder.op("Transpose", operand, perm=[1, 0]), after.dtype)
        else:
            exchanged = builder.op("Transpose", builder.cast(operand, after.dtype), perm=[1, 0])
        replace_node(node, exchanged)
        remove_node(other)


def _before_cast(value: ir.Value | None) -> ir.Value | None:
    producer = None if value is None else value.producer()
    return producer.inputs[0] if producer is not None and producer.op_type == "Cast" and producer.domain == "" else None

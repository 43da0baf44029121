"""A graph that computes in float64 what another computes in fewer digits."""

from __future__ import annotations

import onnx_ir as ir

from burnish.rewriting.wider_values import widen_initializers, widen_node, widen_values

NARROW = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def compute_in_float64(model: ir.Model) -> ir.Model:
    """Return a copy of a model in which every value of a narrower floating-point type is float64, inputs and constants too.

    It is for the reference engine, which runs every operator in every dtype. What else runs it may refuse operands that the
    standard declares as float32, such as the scales of Resize. Constants keep the values that they were rounded to.

    Args:
        model: a model of standard operators; left as it is.
    """
    copy = model.clone()
    widen_values(copy.graph.inputs, NARROW, ir.DataType.DOUBLE)
    widen_initializers(copy.graph, NARROW, ir.DataType.DOUBLE)
    for node in copy.graph.all_nodes():
        widen_node(node, NARROW, ir.DataType.DOUBLE)
    return copy

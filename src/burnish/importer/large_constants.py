"""Constants that a model makes of small ones: a file of a kilobyte may ask for more memory than any machine has."""

from __future__ import annotations

import math

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import describe_node, static_shape
from burnish.untrusted import memory_excess


def check_constant_sizes(model: ir.Model) -> None:
    """Refuse values that no input decides and that take more memory than reading the model may.

    Runtimes compute them before the first step, and so do some rewrites.

    Args:
        model: its shapes have been inferred.

    Raises:
        ModelError: there is such a value; the message names the node that computes it.
    """
    constants = {value for graph in model.graphs() for value in graph.initializers.values()}
    constants.difference_update(model.graph.inputs)
    size = sum(value.const_value.nbytes for value in constants if value.const_value is not None)
    for node in model.graph.all_nodes():
        is_constant = node.op_type in ("Shape", "Size") or all(value is None or value in constants for value in node.inputs)
        if node.domain != "" or not is_constant:
            continue
        constants.update(node.outputs)
        for value in node.outputs:
            shape = static_shape(value)
            if shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
                continue
            excess = memory_excess(math.ceil(math.prod(shape) * value.dtype.itemsize), size)
            if excess is not None:
                raise ModelError(f"'{value.name}', output of {describe_node(node)}, is a constant: {excess}")

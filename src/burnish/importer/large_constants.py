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
        ModelError: there is such a value, or all that other nodes read take more together; the message names the node that
            computes it, or the largest of them.
    """
    constants = {value for graph in model.graphs() for value in graph.initializers.values()}
    constants.difference_update(model.graph.inputs)
    size = sum(value.const_value.nbytes for value in constants if value.const_value is not None)
    computed: dict[ir.Value, tuple[int, ir.Node]] = {}
    folded: set[ir.Node] = set()
    for node in model.graph.all_nodes():
        is_constant = node.op_type in ("Shape", "Size") or all(value is None or value in constants for value in node.inputs)
        if node.domain != "" or not is_constant:
            continue
        folded.add(node)
        constants.update(node.outputs)
        for value in node.outputs:
            shape = static_shape(value)
            if shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
                continue
            needed = math.ceil(math.prod(shape) * value.dtype.itemsize)
            computed[value] = needed, node
            excess = memory_excess(needed, size)
            if excess is not None:
                raise ModelError(f"'{value.name}', output of {describe_node(node)}, is a constant: {excess}")
    kept = {value: made for value, made in computed.items() if any(use.node not in folded for use in value.uses())}
    excess = memory_excess(sum(needed for needed, _ in kept.values()), size)
    if excess is not None:
        value, (_, node) = max(kept.items(), key=lambda item: item[1][0])
        raise ModelError(
            f"the model keeps {len(kept)} values that it computes of constants, the largest '{value.name}', output of "
            f"{describe_node(node)}: {excess}"
        )

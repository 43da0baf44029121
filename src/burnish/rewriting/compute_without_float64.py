"""A graph that computes in float32 what another computes in float64, for runtimes that have no float64."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import bodies, replace_value
from burnish.graph.uses import remove_node
from burnish.rewriting.wider_values import has_values_of, widen_node, widen_values

DOUBLE, SINGLE = ir.DataType.DOUBLE, ir.DataType.FLOAT


def compute_without_float64(model: ir.Model) -> bool:
    """Let a model compute in float32 whatever it computes in float64, in place: inputs, constants and outputs too.

    What is not zero stays so: a constant too small or too large for float32 becomes the smallest or largest normal number.
    """
    if not has_values_of(model, (DOUBLE,)):
        return False
    widen_values(model.graph.inputs, (DOUBLE,), SINGLE)
    _round_initializers(model.graph)
    for node in list(model.graph.all_nodes()):
        for attribute in list(node.attributes.values()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == DOUBLE:
                node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _rounded(attribute.as_tensor()))
        for body in bodies(node):
            _round_initializers(body)
        widen_node(node, (DOUBLE,), SINGLE)
        _remove_cast_to_the_same(node)
    return True


def _round_initializers(graph: ir.Graph) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and value.dtype == DOUBLE:
            value.const_value = _rounded(value.const_value)
            value.type = ir.TensorType(SINGLE)


def _rounded(tensor: ir.TensorProtocol) -> ir.Tensor:
    array = tensor.numpy()
    limits = np.finfo(np.float32)
    size = np.clip(np.abs(array), float(limits.tiny), float(limits.max))
    kept = ~np.isfinite(array) | (array == 0)
    return ir.Tensor(np.where(kept, array, np.copysign(size, array)).astype(np.float32), name=tensor.name)


def _remove_cast_to_the_same(node: ir.Node) -> None:
    """Take out a cast between two dtypes that are one now; one that gives an output of the graph stays."""
    source = node.inputs[0] if node.inputs else None
    if node.op_type != "Cast" or node.domain != "" or source is None or source.dtype != SINGLE:
        return
    output = node.outputs[0]
    if output.dtype == SINGLE and not output.is_graph_output():
        replace_value(output, source)
        remove_node(node)

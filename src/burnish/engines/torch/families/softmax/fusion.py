"""Fusion of the gradient of a softmax, y (dy - sum(dy y)), which PyTorch has one kernel for."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, constant_array, remove_node, replace_node
from burnish.graph.uses import only_user


def fuse_softmax(graph: ir.Graph) -> None:
    """Replace the four operators of the gradient by ``burnish.FusedSoftmaxGrad``, in place; float32 alone."""
    for node in list(graph):
        if node.op_type == "Softmax" and node.domain == "" and node.outputs[0].dtype == ir.DataType.FLOAT:
            for user, _ in list(node.outputs[0].uses()):
                _fuse(graph, node, user)


def _fuse(graph: ir.Graph, softmax: ir.Node, product: ir.Node) -> None:
    y = softmax.outputs[0]
    if product.graph is not graph or not _is(product, "Mul") or y.shape is None:
        return
    flow = product.inputs[1] if product.inputs[0] is y else product.inputs[0]
    if flow is None or flow is y or flow.shape != y.shape:
        return
    total = only_user(product.outputs[0], "ReduceSum")
    difference = None if total is None else only_user(total.outputs[0], "Sub")
    result = None if difference is None else only_user(difference.outputs[0], "Mul")
    if total is None or difference is None or result is None or y not in result.inputs:
        return
    axis = int(attribute_value(softmax, "axis", -1)) % len(y.shape)
    axes = constant_array(total.inputs[1]) if len(total.inputs) > 1 else None
    summed = None if axes is None else [int(number) % len(y.shape) for number in axes]
    if summed != [axis] or not attribute_value(total, "keepdims", 1):
        return
    if difference.inputs[0] is not flow or difference.inputs[1] is not total.outputs[0]:
        return
    builder = Builder(graph, before=result)
    operands = [builder.tensor(value) for value in (flow, y)]
    replace_node(result, builder.op("FusedSoftmaxGrad", *operands, domain=BURNISH_DOMAIN, like=operands[0], axis=axis))
    for node in (difference, total, product):
        remove_node(node)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""

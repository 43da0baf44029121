"""Operators of a model in the forms that ONNX Runtime has integer operators for; they compute the same."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, remove_node, replace_node
from burnish.graph.uses import is_read_once
from burnish.surgery.quantization.placement import layers_of


def put_integer_forms(graph: ir.Graph) -> None:
    """Let a graph use Gemm for a product with a bias, and GlobalAveragePool for a mean over all pixels, in place."""
    _join_biases(graph)
    for node in list(graph):
        if node.op_type == "ReduceMean" and node.domain == "":
            _pool(graph, node)


def _join_biases(graph: ir.Graph) -> None:
    """Make one Gemm of each MatMul of two matrices and the Add of a bias after it.

    An integer operator adds the bias of a Gemm as integers; a bias apart is added in floating-point numbers.
    """
    for layer in layers_of(graph):
        node, weight = layer.node, constant_array(layer.weight)
        x, product = node.inputs[0], node.outputs[0]
        if node.op_type != "MatMul" or weight is None or not is_read_once(product) or x is None or x.shape is None:
            continue
        addition = next(iter(product.uses()))[0]
        if len(x.shape) != 2 or addition.op_type != "Add" or addition.domain != "":
            continue
        bias = addition.inputs[1 if addition.inputs[0] is product else 0]
        array = None if bias is None else constant_array(bias)
        if bias is not None and array is not None and array.shape == weight.shape[1:]:
            builder = Builder(graph, before=addition)
            replace_node(addition, builder.op("Gemm", *(builder.tensor(value) for value in (x, layer.weight, bias))))
            remove_node(node)


def _pool(graph: ir.Graph, node: ir.Node) -> None:
    """Make a GlobalAveragePool of a mean over all axes behind the channels."""
    x = node.inputs[0]
    listed = attribute_value(node, "axes", None)
    array = constant_array(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else listed
    if x is None or x.shape is None or len(x.shape) < 3 or array is None:
        return
    rank = len(x.shape)
    if sorted(int(axis) % rank for axis in array) != list(range(2, rank)):
        return
    builder = Builder(graph, before=node)
    pooled = builder.op("GlobalAveragePool", builder.tensor(x))
    if not attribute_value(node, "keepdims", 1):
        pooled = builder.op("Flatten", pooled, axis=1)
    replace_node(node, pooled)

"""Which initializers of a converted pipeline are no weights: what its steps were fitted to, and constants of arithmetic."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import FLOATING, constant_array

CONVERTERS = frozenset({"skl2onnx", "OnnxMLTools"})
"""Producers of files in which fitted steps stand beside each other, and which write every number as an initializer."""
PRODUCTS = frozenset({"Gemm", "MatMul"})


def hold_preprocessing(model: ir.Model) -> None:
    """Make, in place, Constant nodes of the initializers of a converter that are no weights.

    In such a file the weights are the matrices of products, and what is added to a product. Every other number is what a step of
    the pipeline was fitted to, such as the means of a scaler or the quantiles of a table, or a constant such as the 1 of
    ``1 - p``. Files of other producers stay as they are.
    """
    if model.producer_name not in CONVERTERS:
        return
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if value.dtype not in FLOATING or not value.uses() or value.is_graph_output():
            continue
        array = constant_array(value)
        if array is None or any(_trains(node, value) for node, _ in value.uses()):
            continue
        constant = ir.node("Constant", [], {"value": ir.AttrTensor("value", ir.Tensor(array))})
        output = constant.outputs[0]
        output.type, output.shape = value.type, value.shape
        graph.insert_before(graph[0], constant)
        value.replace_all_uses_with(output)
        del graph.initializers[name]
        value.name, output.name = None, name


def _trains(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node multiplies by a value, or adds it to such a product."""
    if node.domain != "" or node.op_type in PRODUCTS:
        return node.domain == ""
    others = [operand.producer() for operand in node.inputs if operand is not None and operand is not value]
    return node.op_type == "Add" and any(other is not None and other.op_type in PRODUCTS for other in others)

"""The step of a momentum becomes a part of the product that makes the gradient: ``Gemm`` adds to what it is given.

Of ``momentum * velocity + Gemm(a, b)`` the multiplication and the addition each read and write a tensor as large as the weight.
The standard's ``Gemm(a, b, velocity, beta=momentum)`` adds the product while it writes it.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, constant_array, replace_node, same_shape
from burnish.graph.uses import is_read_once, producer_of, remove_unread


def accumulate_gradients(model: ir.Model) -> ir.Model:
    """Add products of matrices to what is multiplied by a constant, in place; in the main graph alone.

    The operands are float32, as the attribute that holds the constant is, and nothing else reads the product or the multiple. A
    Gemm that adds a bias or multiplies already stays as it is.

    Returns:
        The same model, for the same inputs and outputs.
    """
    for node in list(model.graph):
        if node.op_type == "Add" and node.domain == "" and node.outputs[0].dtype == ir.DataType.FLOAT:
            _accumulate(model.graph, node)
    return model


def _accumulate(graph: ir.Graph, addition: ir.Node) -> None:
    for product, multiple in (addition.inputs, addition.inputs[::-1]):
        gemm, scaled = producer_of(product, "Gemm"), producer_of(multiple, "Mul")
        if gemm is None or scaled is None or not _only_multiplies(gemm):
            continue
        if not all(value is not None and is_read_once(value) for value in (product, multiple)):
            continue
        for tensor, factor in (scaled.inputs, scaled.inputs[::-1]):
            constant = None if factor is None else constant_array(factor)
            if (
                tensor is None
                or constant is None
                or constant.size != 1
                or not same_shape(tensor.shape, addition.outputs[0].shape)
            ):
                continue
            b = Builder(graph, before=addition)
            operands = [b.tensor(value) for value in (*gemm.inputs[:2], tensor) if value is not None]
            turned = {name: attribute_value(gemm, name, 0) for name in ("transA", "transB")}
            replace_node(addition, b.op("Gemm", *operands, beta=float(constant.item()), **turned))
            remove_unread(graph, gemm, scaled)
            return


def _only_multiplies(gemm: ir.Node) -> bool:
    return len([value for value in gemm.inputs if value is not None]) == 2 and attribute_value(gemm, "alpha", 1.0) == 1.0

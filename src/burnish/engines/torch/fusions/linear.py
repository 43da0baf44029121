"""Fusion of products with a weight: the weight's transposition and the bias go into the product, and so do their gradients.

A linear layer reaches the graph as ``MatMul(x, Transpose(weight)) + bias`` or as a ``Gemm``; the gradient of its weight as a
``Gemm`` whose result is transposed. Each becomes one product, of the operands as they lie in memory.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, replace_node

SWAPPED = [1, 0]
DTYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def fuse_linear(graph: ir.Graph) -> None:
    """Replace products with a matrix by ``burnish.FusedLinear`` and ``burnish.FusedLinearWeightGrad``, in place.

    Of float32 and bfloat16; the latter adds a bias before it rounds.
    """
    for node in list(graph):
        if node.domain != "" or node.op_type not in ("MatMul", "Gemm") or node.outputs[0].dtype not in DTYPES:
            continue
        if node.op_type == "Gemm" and attribute_value(node, "transA", 0):
            _fuse_weight_gradient(graph, node)
        else:
            _fuse_product(graph, node)


def _fuse_product(graph: ir.Graph, node: ir.Node) -> None:
    """x W or x W' with or without a bias: [..., K] and [K, N] or [N, K] to [..., N]."""
    x, matrix = node.inputs[:2]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or matrix is None or _rank(matrix) != 2 or (_rank(x) or 0) < 2 or attribute_value(node, "alpha", 1.0) != 1.0:
        return
    if bias is not None and (attribute_value(node, "beta", 1.0) != 1.0 or not _is_per_column(bias, node.outputs[0])):
        return
    transposed = bool(attribute_value(node, "transB", 0)) if node.op_type == "Gemm" else False
    swapped = matrix.producer()
    if swapped is not None and _swaps(swapped):
        matrix, transposed = swapped.inputs[0], not transposed
    else:
        swapped = None
    assert matrix is not None
    last = node
    addition = _only_user(node.outputs[0], "Add") if bias is None else None
    if addition is not None:
        other = addition.inputs[1] if addition.inputs[0] is node.outputs[0] else addition.inputs[0]
        if other is not None and _is_per_column(other, node.outputs[0]):
            last, bias = addition, other
    builder = Builder(graph, before=last)
    operands = [builder.tensor(x), builder.tensor(matrix), None if bias is None else builder.tensor(bias)]
    like = builder.tensor(last.outputs[0])
    replace_node(last, builder.op("FusedLinear", *operands, domain=BURNISH_DOMAIN, like=like, transposed=int(transposed)))
    if last is not node:
        graph.remove(node, safe=True)
    _remove_unread(graph, swapped)


def _fuse_weight_gradient(graph: ir.Graph, node: ir.Node) -> None:
    """A'B, transposed where the graph transposes it: a transposed product is the product of the operands exchanged."""
    left, right = node.inputs[:2]
    if left is None or right is None or len(node.inputs) > 2 or attribute_value(node, "alpha", 1.0) != 1.0:
        return
    if attribute_value(node, "transB", 0):
        return
    last = node
    users = {user for user, _ in node.outputs[0].uses()}
    if len(users) == 1 and not node.outputs[0].is_graph_output():
        user = users.pop()
        if _swaps(user):
            last, left, right = user, right, left
    builder = Builder(graph, before=last)
    operands = [builder.tensor(left), builder.tensor(right)]
    like = builder.tensor(last.outputs[0])
    replace_node(last, builder.op("FusedLinearWeightGrad", *operands, domain=BURNISH_DOMAIN, like=like))
    if last is not node:
        graph.remove(node, safe=True)


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _is_per_column(value: ir.Value, product: ir.Value) -> bool:
    """Whether a value holds one element per column of a product."""
    if value.shape is None or product.shape is None or len(value.shape) != 1 or value.dtype != product.dtype:
        return False
    return isinstance(value.shape[0], int) and value.shape[0] == product.shape[-1]


def _swaps(node: ir.Node) -> bool:
    """Whether a node transposes a matrix."""
    if node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None or _rank(node.inputs[0]) != 2:
        return False
    return list(attribute_value(node, "perm", SWAPPED)) == SWAPPED


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = list(value.uses())
    if value.is_graph_output() or len(users) != 1:
        return None
    user = users[0][0]
    return user if user.op_type == op_type and user.domain == "" and user.graph is not None else None


def _remove_unread(graph: ir.Graph, node: ir.Node | None) -> None:
    if node is not None and node.graph is graph and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
        graph.remove(node, safe=True)

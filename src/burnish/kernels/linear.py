"""Products with a weight, their gradients and batched products: operators, and the graph passes that insert them.

The weight's transposition, the bias and a ReLU are part of the product, and all gradients are one call. A head of attention is a
slice of every row of a layer's output. The operands of its products are therefore strided views, and its results are transposed
back before the next layer reads them. These products read views in place and write results in the order of their reader, so that
the transpositions are free.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, attribute_value, constant_array, replace_node
from burnish.graph.matching import Either, Match, Node, Variable, find_match
from burnish.graph.uses import only_user, remove_unread
from burnish.kernels.engine_operator import EngineOperator
from burnish.kernels.replacements import fuses
from burnish.operators.activation import RELU_GRAD
from burnish.operators.matmul import LINEAR_GRAD

FUSED_LINEAR = EngineOperator("FusedLinear", ("x", "w", "b"), ("y",))
FUSED_LINEAR_GRAD = EngineOperator("FusedLinearGrad", ("dy", "x", "w"), ("dx", "dw", "db"))
FUSED_BATCHED_PRODUCT = EngineOperator("FusedBatchedProduct", ("left", "right"), ("y",))


SWAPPED = [1, 0]
DTYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)


def _reads_plain_gemm(node: ir.Node) -> dict[str, Any] | None:
    """Return the attribute ``transposed`` of a Gemm; None if it has factors, or its left operand is transposed."""
    factors = (attribute_value(node, "alpha", 1.0), attribute_value(node, "beta", 1.0) if len(node.inputs) > 2 else 1.0)
    if attribute_value(node, "transA", 0) or factors != (1.0, 1.0):
        return None
    return {"transposed": bool(attribute_value(node, "transB", 0))}


def _reads_unbiased_gemm(node: ir.Node) -> dict[str, Any] | None:
    return None if any(value is not None for value in node.inputs[2:]) else _reads_plain_gemm(node)


def _layer() -> Either:
    x, matrix, bias = Variable("x"), Variable("matrix"), Variable("bias")
    product = Either(
        Node("MatMul", x, matrix, reads=lambda node: {"transposed": False}),
        Node("Gemm", x, matrix, reads=_reads_unbiased_gemm),
    )
    layer = Either(Node("Add", product, bias), Node("Gemm", x, matrix, bias, reads=_reads_plain_gemm), product)
    return Either(Node("Relu", layer), layer)


_LAYER = _layer()


def fuse_linear(graph: ir.Graph) -> bool:
    """Replace products with a matrix, x W or x W' with or without a bias and a ReLU, by ``burnish.FusedLinear``, in place.

    This applies to float32 and bfloat16, which adds a bias before rounding.
    """
    changed = False
    for node in reversed(list(graph)):
        if node.graph is None or node.domain != "" or node.op_type not in ("Relu", "Add", "Gemm", "MatMul"):
            continue
        match = find_match(_LAYER, node.outputs[0], partial(_is_layer, node.outputs[0]))
        if match is None:
            continue
        matrix, swapped = _as_it_lies(match["matrix"])
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in (match["x"], matrix, match.get("bias"))]
        settings: dict[str, Any] = {"transposed": int(match["transposed"] != swapped), "relu": int(node.op_type == "Relu")}
        like = builder.tensor(node.outputs[0])
        result = FUSED_LINEAR(*operands, like=like, **settings)
        makers = [value.producer() for value in node.inputs if value is not None]
        replace_node(node, result)
        remove_unread(graph, *makers, match["matrix"].producer())
        changed = True
    return changed


@fuses(LINEAR_GRAD)
def use_linear_gradients(graph: ir.Graph) -> bool:
    """Replace gradients of layers by ``burnish.FusedLinearGrad``, in place; float32 and bfloat16.

    It includes the gradient of a ReLU that returned x, a matrix of float32, if nothing else reads dx, and the transposition of
    dw.
    """
    changed = False
    for node in list(graph):
        if not LINEAR_GRAD.is_of(node) or node.outputs[0].dtype not in DTYPES:
            continue
        dy, x, weight = (*node.inputs, None)[:3]
        assert dy is not None
        if x is None:
            assert weight is not None
            _use_product(graph, node, dy, weight)
        else:
            _use_linear_gradient(graph, node, dy, x, weight)
        changed = True
    return changed


def _use_product(graph: ir.Graph, node: ir.Node, dy: ir.Value, weight: ir.Value) -> None:
    matrix, swapped = _as_it_lies(weight)
    builder = Builder(graph, before=node)
    operands, like = [builder.tensor(dy), builder.tensor(matrix)], builder.tensor(node.outputs[0])
    transposed = int(bool(attribute_value(node, "transposed", 0)) == swapped)
    replace_node(node, FUSED_LINEAR(*operands, like=like, transposed=transposed, relu=0))
    remove_unread(graph, weight.producer())


def _use_linear_gradient(graph: ir.Graph, node: ir.Node, dy: ir.Value, x: ir.Value, weight: ir.Value | None) -> None:
    replaced = list(node.outputs)
    relu = only_user(replaced[0], RELU_GRAD.name, BURNISH_DOMAIN)
    of_small_layer = x.dtype == ir.DataType.FLOAT and _rank(x) == 2
    if relu is not None and relu.inputs[0] is replaced[0] and relu.inputs[1] is x and of_small_layer:
        replaced[0] = relu.outputs[0]
    else:
        relu = None
    turned = only_user(replaced[1], "Transpose")
    if turned is not None and _swaps(turned):
        replaced[1] = turned.outputs[0]
    else:
        turned = None
    is_transposed = bool(attribute_value(node, "transposed", 0))
    matrix, swapped = (None, False) if weight is None else _as_it_lies(weight)
    settings = {
        "transposed": int(is_transposed == swapped),
        "swapped": int(is_transposed == (turned is not None)),
        "relu": int(relu is not None),
        "bias": attribute_value(node, "bias", 0),
    }
    builder = Builder(graph, before=node)
    operands = [None if value is None else builder.tensor(value) for value in (dy, x, matrix)]
    results = FUSED_LINEAR_GRAD.emit(*operands, **settings)
    for result, value in zip(results, replaced, strict=True):
        result.value.type, result.value.shape = value.type, value.shape
    for last, result in ((relu, results[0]), (turned, results[1])):
        if last is not None:
            replace_node(last, result)
    replace_node(node, results)
    if weight is not None:
        remove_unread(graph, weight.producer())


def _is_layer(y: ir.Value, match: Match) -> bool:
    x, matrix, bias = match["x"], match["matrix"], match.get("bias")
    if y.dtype not in DTYPES or _rank(matrix) != 2 or (_rank(x) or 0) < 2:
        return False
    return bias is None or (bias.dtype == y.dtype and _is_per_column(bias, y))


def _as_it_lies(matrix: ir.Value) -> tuple[ir.Value, bool]:
    """Return the source of a transposed matrix and True, or the matrix and False."""
    node = matrix.producer()
    if node is None or not _swaps(node):
        return matrix, False
    source = node.inputs[0]
    assert source is not None
    return source, True


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _is_per_column(value: ir.Value, product: ir.Value) -> bool:
    if value.shape is None or product.shape is None or len(value.shape) != 1:
        return False
    return isinstance(value.shape[0], int) and value.shape[0] == product.shape[-1]


def _swaps(node: ir.Node) -> bool:
    if node.op_type != "Transpose" or node.domain != "" or node.inputs[0] is None or _rank(node.inputs[0]) != 2:
        return False
    return list(attribute_value(node, "perm", SWAPPED)) == SWAPPED


RANK = 4


def fuse_batched_products(graph: ir.Graph) -> bool:
    """Replace ``MatMul`` of two values of four axes by ``burnish.FusedBatchedProduct``, in place; float32 and bfloat16."""
    changed = False
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain != "" or node.outputs[0].dtype not in DTYPES:
            continue
        left, right = node.inputs
        if left is None or right is None or not (_has_rank(left) and _has_rank(right)) or not _same_batch(left, right):
            continue
        order = _order(node.outputs[0])
        builder = Builder(graph, before=node)
        operands = [builder.tensor(value) for value in (left, right)]
        like = builder.tensor(node.outputs[0])
        replace_node(node, FUSED_BATCHED_PRODUCT(*operands, like=like, perm=order))
        changed = True
    return changed


def _order(value: ir.Value) -> list[int]:
    """Return the memory order of axes for which the transposition after a value is a view; scaling may come between."""
    while (user := only_user(value)) is not None and user.domain == "":
        if user.op_type == "Transpose":
            order = [int(axis) for axis in attribute_value(user, "perm", list(range(RANK))[::-1])]
            if order[-1] >= RANK - 2:  # an axis of the matrices is innermost
                return order
            break
        if user.op_type not in ("Mul", "Cast") or (user.op_type == "Mul" and not _scales(user)):
            break
        value = user.outputs[0]
    return list(range(RANK))


def _scales(node: ir.Node) -> bool:
    arrays = [constant_array(value) for value in node.inputs if value is not None]
    return any(array is not None and array.size == 1 for array in arrays)


def _has_rank(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == RANK


def _same_batch(left: ir.Value, right: ir.Value) -> bool:
    batches = [None if value.shape is None else list(value.shape)[:2] for value in (left, right)]
    return batches[0] == batches[1]

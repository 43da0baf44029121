"""Products of batches of matrices, as in attention: their results lie in memory as the transposition behind them reads them.

A head of attention is a slice of every row of a layer's output. The operands of its products are therefore views, transposed and
strided, and their results are transposed back before the next layer reads them. A product that reads views as they lie and writes
its result in the order that is read makes the transpositions free.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.linear.translation import FUSED_BATCHED_PRODUCT
from burnish.graph import Builder, attribute_value, constant_array, replace_node
from burnish.graph.uses import only_user

DTYPES = (ir.DataType.FLOAT, ir.DataType.BFLOAT16)
RANK = 4


def fuse_batched_products(graph: ir.Graph) -> None:
    """Replace ``MatMul`` of two values of four axes by ``burnish.FusedBatchedProduct``, in place; float32 and bfloat16."""
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


def _order(value: ir.Value) -> list[int]:
    """The order of axes in memory that the transposition behind a value makes a view of; scaling may come between."""
    while (user := only_user(value)) is not None and user.domain == "":
        if user.op_type == "Transpose":
            order = [int(axis) for axis in attribute_value(user, "perm", list(range(RANK))[::-1])]
            if order[-1] >= RANK - 2:  # an axis of the matrices lies innermost
                return order
            break
        if user.op_type not in ("Mul", "Cast") or (user.op_type == "Mul" and not _scales(user)):
            break
        value = user.outputs[0]
    return list(range(RANK))


def _scales(node: ir.Node) -> bool:
    """Whether a node multiplies by one number."""
    arrays = [constant_array(value) for value in node.inputs if value is not None]
    return any(array is not None and array.size == 1 for array in arrays)


def _has_rank(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == RANK


def _same_batch(left: ir.Value, right: ir.Value) -> bool:
    batches = [None if value.shape is None else list(value.shape)[:2] for value in (left, right)]
    return batches[0] == batches[1]

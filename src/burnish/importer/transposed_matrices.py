"""Matrices of a batch that are transposed with all leading axes taken for one: a transposition of the last two axes alone.

PyTorch's exporter writes so what transposes the keys of ``scaled_dot_product_attention``: Reshape to [samples * heads, keys,
extent], Transpose, and Reshape back. As one Transpose it is read in place by the product behind it, the samples keep their name,
and attention is recognized.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value, replace_node, same_dimension
from burnish.graph.uses import remove_unread

_OF_MATRICES = [0, 2, 1]


def join_transpositions(model: ir.Model) -> bool:
    """Replace, in place, every such Reshape, Transpose and Reshape in the main graph by a Transpose; whether any was.

    For a model whose shapes are inferred; where extents are not known to be the same, nodes stay as they are.
    """
    model.graph.opset_imports.setdefault("", model.opset_imports[""])
    joined = False
    for node in list(model.graph):
        given = _transposed(node)
        if given is None or given.shape is None:
            continue
        rank = len(given.shape)
        builder = Builder(model.graph, before=node)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        makers = [value.producer() for value in node.inputs if value is not None]
        replace_node(node, builder.op("Transpose", builder.tensor(given), perm=perm))
        remove_unread(model.graph, *makers)
        joined = True
    return joined


def _transposed(reshape: ir.Node) -> ir.Value | None:
    """The matrices that the last one of the three nodes gives transposed; None for any other node."""
    transpose = _maker(reshape, "Reshape", "Transpose")
    first = None if transpose is None else _maker(transpose, "Transpose", "Reshape")
    if transpose is None or first is None or list(attribute_value(transpose, "perm", ())) != _OF_MATRICES:
        return None
    given, result = first.inputs[0], reshape.outputs[0]
    batch = first.outputs[0].shape
    if given is None or given.shape is None or batch is None or result.shape is None:
        return None
    rank = len(given.shape)
    if rank < 3 or len(batch) != 3 or len(result.shape) != rank:
        return None
    matrix = given.shape.dims[-2:]
    expected = [*given.shape.dims[1:-2], *reversed(matrix)]
    # The first extent follows from the others: no element is lost.
    pairs = [*zip(matrix, batch.dims[1:], strict=True), *zip(expected, result.shape.dims[1:], strict=True)]
    return given if all(same_dimension(one, other) for one, other in pairs) else None


def _maker(node: ir.Node, op_type: str, maker: str) -> ir.Node | None:
    """What makes the first operand of a node of one type, where it is of another."""
    if node.op_type != op_type or node.domain != "" or not node.inputs or node.inputs[0] is None:
        return None
    made = node.inputs[0].producer()
    return made if made is not None and made.op_type == maker and made.domain == "" else None

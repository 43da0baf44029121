"""Matrices of a batch that are transposed with all leading axes taken for one: a transposition of the last two axes alone.

PyTorch's exporter writes so what transposes the keys of ``scaled_dot_product_attention``: Reshape to [samples * heads, keys,
extent], Transpose, and Reshape back. The product after it reads one Transpose in place, the samples keep their name,
and attention is recognized.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, replace_node, same_dimension
from burnish.graph.matching import Node, Variable
from burnish.graph.uses import remove_unread

_JOINED = Node(
    "Reshape",
    Node(
        "Transpose",
        Node("Reshape", Variable("matrices"), reads=lambda node: {"batch": node.outputs[0].shape}),
        attributes={"perm": (0, 2, 1)},
    ),
    reads=lambda node: {},
)


def join_transpositions(model: ir.Model) -> bool:
    """Replace, in place, every such Reshape, Transpose and Reshape in the main graph by a Transpose; return whether any was.

    For a model whose shapes are inferred; where extents are not known to be the same, nodes stay as they are.
    """
    joined = False
    for node in list(model.graph):
        match = next(_JOINED.match(node.outputs[0]), None) if node.op_type == "Reshape" else None
        if match is None or not _transposes(match["matrices"].shape, match["batch"], node.outputs[0].shape):
            continue
        builder, matrices = Builder(model.graph, before=node), match["matrices"]
        rank = len(matrices.shape)
        makers = [value.producer() for value in node.inputs if value is not None]
        replace_node(node, builder.op("Transpose", builder.tensor(matrices), perm=[*range(rank - 2), rank - 1, rank - 2]))
        remove_unread(model.graph, *makers)
        joined = True
    return joined


def _transposes(matrices: ir.Shape | None, batch: ir.Shape | None, result: ir.Shape | None) -> bool:
    """Whether matrices of one shape, taken for one batch of them and transposed, come out in the shape ``result``."""
    if matrices is None or batch is None or result is None:
        return False
    if len(matrices) < 3 or len(batch) != 3 or len(result) != len(matrices):
        return False
    *leading, rows, columns = matrices.dims
    # The first extent follows from the others: no element is lost.
    pairs = zip((rows, columns, *leading[1:], columns, rows), (*batch.dims[1:], *result.dims[1:]), strict=True)
    return all(same_dimension(one, other) for one, other in pairs)

"""Scalars take the rank of a tensor whose last extents are 1, such as the weight of a 1×1 convolution.

ONNX Runtime (1.32) broadcasts in spans of the axes that both operands have, from the last on. A scalar beside [160, 960, 1, 1]
has none of them but a 1, so that each span is one element: 1.9 ms in place of 0.03. A scalar of shape [1, 1, 1, 1] is broadcast
over one span of all elements.
"""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, constant_array, static_shape

BROADCASTING = frozenset(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or "
    "Pow PRelu Sub Sum Where Xor".split()
)


def raise_scalar_ranks(model: ir.Model) -> ir.Model:
    """Give a scalar that is broadcast over such a tensor the tensor's rank, in place; in the main graph alone.

    A constant becomes another constant; what is computed is reshaped, once for each rank. Results, their dtypes and their
    shapes stay as they are.

    Returns:
        The same model, for the same inputs and outputs.
    """
    raised: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in list(model.graph):
        if node.op_type in BROADCASTING and node.domain == "":
            rank, ones = _widest(node)
            for index, value in enumerate(node.inputs):
                if ones and value is not None and _is_single(value) and len(value.shape or ()) <= ones < rank:
                    if (value, rank) not in raised:
                        raised[value, rank] = _of_rank(Builder(model.graph, before=node), value, rank)
                    node.replace_input_with(index, raised[value, rank])
    return model


def _widest(node: ir.Node) -> tuple[int, int]:
    """The highest rank of the operands, and how many extents at the end of an operand of that rank are 1; zeros if unknown."""
    shapes = [value.shape for value in node.inputs if value is not None]
    known = [shape for shape in shapes if shape is not None]
    if not known or len(known) < len(shapes):
        return 0, 0
    rank = max(map(len, known))
    widest = [shape for shape in known if len(shape) == rank]
    return rank, max(sum(1 for _ in takewhile(lambda extent: extent == 1, reversed(shape.dims))) for shape in widest)


def _is_single(value: ir.Value) -> bool:
    shape = static_shape(value)
    return shape is not None and all(extent == 1 for extent in shape)


def _of_rank(builder: Builder, value: ir.Value, rank: int) -> ir.Value:
    array = constant_array(value)
    if array is not None:
        return builder.constant(np.reshape(array, [1] * rank)).value
    return builder.op("Reshape", builder.tensor(value), builder.integers([1] * rank), shape=[1] * rank, dtype=value.dtype).value

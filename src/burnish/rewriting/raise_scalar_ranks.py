"""Scalars take the rank of a tensor whose last extents are 1, such as the weight of a 1×1 convolution.

ONNX Runtime (1.32) broadcasts in spans of the axes that both operands have, from the last on. A scalar beside [160, 960, 1, 1]
has none of them but a 1, so that each span is one element: 1.9 ms in place of 0.03. A scalar of shape [1, 1, 1, 1] is broadcast
over one span of all elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, constant_array, static_shape
from burnish.operators.registry import Elementwise, elementwise


def raise_scalar_ranks(model: ir.Model) -> bool:
    """Give a scalar that is broadcast over such a tensor the tensor's rank, in place; in the main graph alone.

    A constant becomes another constant; what is computed is reshaped, once for each rank. Results, their dtypes and their
    shapes stay as they are.
    """
    raised: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in list(model.graph):
        for index, value, rank in _low_scalars(node):
            if (value, rank) not in raised:
                raised[value, rank] = _of_rank(Builder(model.graph, before=node), value, rank)
            node.replace_input_with(index, raised[value, rank])
    return bool(raised)


def has_low_scalars(model: ir.Model) -> bool:
    """Whether ``raise_scalar_ranks`` would change a model."""
    return any(True for node in model.graph for _ in _low_scalars(node))


def _low_scalars(node: ir.Node) -> Iterator[tuple[int, ir.Value, int]]:
    """The operands of a node that are scalars of a rank too low: which operand, its value, and the rank that it is to have."""
    if elementwise(node) is not Elementwise.BROADCAST:
        return
    rank, ones = _widest(node)
    for index, value in enumerate(node.inputs):
        if ones and value is not None and _is_single(value) and len(value.shape or ()) <= ones < rank:
            yield index, value, rank


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

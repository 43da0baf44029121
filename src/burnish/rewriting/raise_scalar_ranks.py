"""Raise the rank of scalars that broadcast to tensors with trailing extents of 1, such as 1×1 convolution weights.

ONNX Runtime (1.32) broadcasts in spans of the trailing axes that both operands share. With [160, 960, 1, 1] a scalar shares only
a 1, so each span is one element: 1.9 ms instead of 0.03. A scalar of shape [1, 1, 1, 1] is broadcast over one span of all
elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, constant_array, static_shape
from burnish.operators.registry import Elementwise, elementwise


def raise_scalar_ranks(model: ir.Model) -> bool:
    """Give such scalars the rank of the tensor, in place, in the main graph only.

    Constants are replaced; computed scalars are reshaped once per rank. Results, dtypes and shapes stay the same.
    """
    raised: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in list(model.graph):
        for index, value, rank in _low_scalars(node):
            if (value, rank) not in raised:
                raised[value, rank] = _of_rank(Builder(model.graph, before=node), value, rank)
            node.replace_input_with(index, raised[value, rank])
    return bool(raised)


def has_low_scalars(model: ir.Model) -> bool:
    """True if ``raise_scalar_ranks`` would change a model."""
    return any(True for node in model.graph for _ in _low_scalars(node))


def _low_scalars(node: ir.Node) -> Iterator[tuple[int, ir.Value, int]]:
    if elementwise(node) is not Elementwise.BROADCAST:
        return
    rank, ones = _widest(node)
    for index, value in enumerate(node.inputs):
        if ones and value is not None and _is_single(value) and len(value.shape or ()) <= ones < rank:
            yield index, value, rank


def _widest(node: ir.Node) -> tuple[int, int]:
    """Return the highest rank of the operands and the number of trailing ones in an operand of that rank; zeros if unknown."""
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

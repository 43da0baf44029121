"""Operators that read elements by index, and their gradients: adding where was read. Those that write are in ``scatter.py``."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor, zeros_like
from burnish.operators.positions import add_at_positions, count, extent, flat_positions, scatter_add
from burnish.operators.registry import Operation, gradient
from burnish.operators.semantic import SemanticOperator, like

GATHER_GRAD = SemanticOperator("GatherGrad", ("dy", "indices", "data"), ("d_data",), like("data"))


@gradient("Gather")
def gather(op: Operation, dy: Tensor) -> tuple[Tensor]:
    data, indices = op.required(0), op.required(1)
    axis = op.attribute("axis", 0)
    return (GATHER_GRAD(dy, indices, data, axis=axis),)


@GATHER_GRAD.lowering
def lower_gather_grad(op: Operation) -> Tensor:
    """Zeros like data, with dy added at the slices the indices name; a repeated index adds up.

    Inputs: dy [outer, indices' shape, inner], indices, data [outer, axis, inner]. A single constant index needs no addition:
    dy is padded. Otherwise every element of dy is added at position (outer * extent + index) * inner + offset.
    """
    dy, indices, data = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    axis = int(op.attribute("axis", 0))
    if data.rank is not None:
        axis %= data.rank
    constant = indices.array
    size = data.dimension(axis)
    if constant is not None and constant.ndim <= 1 and constant.size == 1 and size is not None:
        index = int(constant.reshape(-1)[0]) % size
        row = builder.op("Unsqueeze", dy, builder.integers([axis])) if constant.ndim == 0 else dy
        return builder.op("Pad", row, builder.integers([index, size - 1 - index]), None, builder.integers([axis]), like=data)
    positions = from_the_front(indices, extent(data, axis))
    has_inner = axis != -1 and (data.rank is None or axis + 1 < data.rank)
    if has_inner:
        inner = count(data, axis + 1)
        positions = builder.op("Unsqueeze", positions, builder.integers([1])) * inner + _range(inner)
    if axis != 0:
        block = count(data, axis)
        steps = builder.op("Reshape", _range(count(data, 0, axis)), builder.integers([-1] + [1] * (2 if has_inner else 1)))
        positions = positions + steps * block
    return add_at_positions(dy, positions, data)


@gradient("GatherElements")
def gather_elements(op: Operation, dy: Tensor) -> tuple[Tensor]:
    data, indices = op.required(0), op.required(1)
    axis = op.attribute("axis", 0)
    return (scatter_add(zeros_like(data), indices, dy, axis, like=data),)


@gradient("GatherND", "Compress")
def gather_positions(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """What the operator reads from data's flat positions is where dy is added."""
    data, chooser = op.required(0), op.required(1)
    if _reads_rows(op):
        return (GATHER_GRAD(dy, op.builder.op("Squeeze", chooser, op.builder.integers([-1])), data, axis=0),)
    attributes = {name: op.attribute(name) for name in ("batch_dims", "axis")}
    return (add_at_positions(dy, op.builder.op(op.node.op_type, flat_positions(data), chooser, **attributes), data),)


def _reads_rows(op: Operation) -> bool:
    """Whether a GatherND reads whole rows of axis 0: as Gather does."""
    chooser = op.required(1)
    if op.node.op_type != "GatherND" or op.attribute("batch_dims"):
        return False
    return chooser.rank is not None and chooser.dimension(-1) == 1


@gradient("TopK")
def top_k(op: Operation, dy: Tensor, *_: Tensor | None) -> tuple[Tensor]:
    """dy goes to the elements that were chosen."""
    x = op.required(0)
    axis = op.attribute("axis", -1)
    indices = op.second_output(ir.DataType.INT64, op.output)
    return (op.builder.op("ScatterElements", zeros_like(x), indices, dy, axis=axis, like=x),)


@gradient("OneHot")
def one_hot(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """values = [off, on]: each receives the sum of dy where it was written."""
    indices, depth, values = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    indicator = builder.constant(np.array([0, 1], values.dtype.numpy()))
    on_places = builder.op("OneHot", indices, depth, indicator, axis=op.attribute("axis", -1), like=dy)
    on = builder.op("ReduceSum", dy * on_places, keepdims=0)
    off = builder.op("ReduceSum", dy * (1 - on_places), keepdims=0)
    first = builder.integers([0])
    pair = [builder.op("Unsqueeze", total, first) for total in (off, on)]
    return None, None, builder.op("Concat", *pair, axis=0, like=values)


@gradient("Unique")
def unique(op: Operation, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None]:
    """Of equal elements the first is the one that is returned, and that dy goes to."""
    if dy is None:
        return (None,)
    x, axis = op.input, op.attribute("axis")
    indices = op.second_output(ir.DataType.INT64, op.output)
    if axis is None:
        return (add_at_positions(dy, indices, x),)
    indices.value.shape = ir.Shape([None])
    return (GATHER_GRAD(dy, indices, x, axis=axis),)


def from_the_front(indices: Tensor, size: Tensor) -> Tensor:
    """Indices as a vector, with those that count from the end made to count from the front."""
    builder = indices.builder
    constant = indices.array
    if constant is not None and constant.size and int(constant.min()) >= 0:
        return builder.constant(constant.reshape(-1).astype(np.int64))
    vector = builder.cast(builder.op("Reshape", indices, builder.integers([-1])), ir.DataType.INT64)
    return builder.op("Where", builder.op("Less", vector, 0), vector + size, vector)


def _range(number: Tensor) -> Tensor:
    index = ir.DataType.INT64
    return number.builder.op("Range", number.builder.scalar(0, index), number, number.builder.scalar(1, index))

"""Operators that read or write elements by index, and their gradients: add at the positions read, read at those written."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Tensor, zeros_like
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.positions import add_at_positions, count, extent, flat_positions, known_rank, reshape_as, scatter_add
from burnish.operators.reduction import slope_of_product, without_zeros, zeros_alone
from burnish.operators.registry import Operation, Operator, Precision
from burnish.operators.semantic import SemanticOperator, like


def gather(op: Operation, dy: Tensor) -> tuple[Tensor]:
    data, indices = op.required(0), op.required(1)
    axis = op.attribute("axis", 0)
    return (GATHER_GRAD(dy, indices, data, axis=axis),)


def lower_gather_grad(op: Operation) -> Tensor:
    """Zeros like data, with dy added at the slices of the indices; repeated indices add up.

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


def gather_elements(op: Operation, dy: Tensor) -> tuple[Tensor]:
    data, indices = op.required(0), op.required(1)
    axis = op.attribute("axis", 0)
    return (scatter_add(zeros_like(data), indices, dy, axis, like=data),)


def gather_positions(op: Operation, dy: Tensor) -> tuple[Tensor]:
    """The gradient of a gather: dy is added at the flat positions of data that the operator reads."""
    data, chooser = op.required(0), op.required(1)
    if _reads_rows(op):
        return (GATHER_GRAD(dy, op.builder.op("Squeeze", chooser, op.builder.integers([-1])), data, axis=0),)
    attributes = {name: op.attribute(name) for name in ("batch_dims", "axis")}
    return (add_at_positions(dy, op.builder.op(op.node.op_type, flat_positions(data), chooser, **attributes), data),)


def _reads_rows(op: Operation) -> bool:
    """True if a GatherND reads whole rows of axis 0, like Gather."""
    chooser = op.required(1)
    if op.node.op_type != "GatherND" or op.attribute("batch_dims"):
        return False
    return chooser.rank is not None and chooser.dimension(-1) == 1


def top_k(op: Operation, dy: Tensor, *_: Tensor | None) -> tuple[Tensor]:
    """The gradient of TopK: dy goes to the chosen elements."""
    x = op.required(0)
    axis = op.attribute("axis", -1)
    indices = op.second_output(ir.DataType.INT64, op.output)
    return (op.builder.op("ScatterElements", zeros_like(x), indices, dy, axis=axis, like=x),)


def one_hot(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of OneHot for values = [off, on]: each gets the sum of dy at its positions."""
    indices, depth, values = op.required(0), op.required(1), op.required(2)
    builder = op.builder
    indicator = builder.constant(np.array([0, 1], values.dtype.numpy()))
    on_places = builder.op("OneHot", indices, depth, indicator, axis=op.attribute("axis", -1), like=dy)
    on = builder.op("ReduceSum", dy * on_places, keepdims=0)
    off = builder.op("ReduceSum", dy * (1 - on_places), keepdims=0)
    first = builder.integers([0])
    pair = [builder.op("Unsqueeze", total, first) for total in (off, on)]
    return None, None, builder.op("Concat", *pair, axis=0, like=values)


def unique(op: Operation, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None]:
    """The gradient of Unique: among equal elements, the first is returned and gets dy."""
    if dy is None:
        return (None,)
    x, axis = op.input, op.attribute("axis")
    indices = op.second_output(ir.DataType.INT64, op.output)
    if axis is None:
        return (add_at_positions(dy, indices, x),)
    indices.value.shape = ir.Shape([None])
    return (GATHER_GRAD(dy, indices, x, axis=axis),)


def from_the_front(indices: Tensor, size: Tensor) -> Tensor:
    """Return indices as a vector, with negative ones counted from the front."""
    builder = indices.builder
    constant = indices.array
    if constant is not None and constant.size and int(constant.min()) >= 0:
        return builder.constant(constant.reshape(-1).astype(np.int64))
    vector = builder.cast(builder.op("Reshape", indices, builder.integers([-1])), ir.DataType.INT64)
    return builder.op("Where", builder.op("Less", vector, 0), vector + size, vector)


def _range(number: Tensor) -> Tensor:
    index = ir.DataType.INT64
    return number.builder.op("Range", number.builder.scalar(0, index), number, number.builder.scalar(1, index))


def scatter_elements(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of ScatterElements: without a reduction, overwritten elements of data get nothing; add keeps them."""
    indices, updates, axis = op.required(1), op.required(2), op.attribute("axis", 0)
    if _reduces(op):
        return _reduced(op, dy, op.builder.op("GatherElements", flat_positions(op.input), indices, axis=axis))
    ddata = dupdates = None
    if op.wants(0):
        ddata = dy if _adds(op) else op.builder.op("ScatterElements", dy, indices, zeros_like(updates), axis=axis, like=dy)
    if op.wants(2):
        dupdates = op.builder.op("GatherElements", dy, indices, axis=axis, like=updates)
    return ddata, None, dupdates


def scatter_nd(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of ScatterND: the same as ScatterElements, by rows."""
    indices, updates = op.required(1), op.required(2)
    if _reduces(op):
        return _reduced(op, dy, op.builder.op("GatherND", flat_positions(op.input), indices))
    ddata = dupdates = None
    if op.wants(0):
        ddata = dy if _adds(op) else op.builder.op("ScatterND", dy, indices, zeros_like(updates), like=dy)
    if op.wants(2):
        dupdates = op.builder.op("GatherND", dy, indices, like=updates)
    return ddata, None, dupdates


def tensor_scatter(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of TensorScatter: overwritten rows of the cache get nothing; their gradient goes to the update.

    Sample b is written from its start on, row after row; with the mode ``circular`` the first row follows the last.
    """
    builder, update, starts = op.builder, op.required(1), op.optional(2)
    axis, mode = op.attribute("axis", -2), op.attribute("mode", "linear")
    dpast = dupdate = None
    if op.wants(0):
        dpast = builder.op("TensorScatter", dy, zeros_like(update), starts, axis=axis, mode=mode, like=dy)
    if op.wants(1) and starts is None:
        dupdate = builder.op("Slice", dy, builder.integers([0]), extent(update, axis), builder.integers([axis]), like=update)
    elif op.wants(1) and starts is not None:
        rank = known_rank(op, update)
        steps = builder.op(
            "Range", builder.scalar(0, ir.DataType.INT64), _number(update, axis), builder.scalar(1, ir.DataType.INT64)
        )
        rows = builder.op("Reshape", steps, builder.integers([-1] + [1] * (rank - 1 - axis % rank)))
        rows = builder.op("Reshape", starts, builder.integers([-1] + [1] * (rank - 1))) + rows
        if mode == "circular":
            rows = builder.op("Mod", rows, _number(dy, axis))
        rows = builder.op("Expand", rows, builder.op("Shape", update))
        dupdate = builder.op("GatherElements", dy, rows, axis=axis, like=update)
    return dpast, dupdate, None


def _number(tensor: Tensor, axis: int) -> Tensor:
    return tensor.builder.op("Squeeze", extent(tensor, axis), tensor.builder.integers([0]))


def _reduced(op: Operation, dy: Tensor, places: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a reduction over an element of data and all its updates.

    Args:
        op: the scatter node.
        dy: the cotangent of its output.
        places: for each update its position in the flat data, int64 of the shape of updates.
    """
    rule = _product if op.attribute("reduction") == "mul" else _extremum
    return rule(op, dy, _Places(places, op.input))


class _Places:
    def __init__(self, places: Tensor, data: Tensor):
        self._places, self._data = places, data

    def read(self, tensor: Tensor) -> Tensor:
        """Return, for each update, the element of a tensor like data at its position."""
        flat = tensor.builder.op("Reshape", tensor, tensor.builder.integers([-1]))
        return tensor.builder.op("Gather", flat, self._places)

    def add(self, updates: Tensor) -> Tensor:
        return add_at_positions(updates, self._places, self._data)

    def multiply(self, data: Tensor, updates: Tensor) -> Tensor:
        builder = data.builder
        flat = (builder.op("Reshape", tensor, builder.integers([-1])) for tensor in (data, self._places, updates))
        return reshape_as(builder.op("ScatterElements", *flat, axis=0, reduction="mul"), data)


def _extremum(op: Operation, dy: Tensor, places: _Places) -> tuple[Tensor | None, ...]:
    """The gradient goes to the chosen element; ties share it evenly, like PyTorch's scatter_reduce."""
    builder, data, updates, y = op.builder, op.required(0), op.required(2), op.output
    data_taken, update_taken = builder.op("Equal", data, y), builder.op("Equal", updates, places.read(y))
    share = dy / (builder.cast(data_taken, y.dtype) + places.add(builder.cast(update_taken, y.dtype)))
    zero = builder.scalar(0, dy)
    ddata = builder.op("Where", data_taken, share, zero) if op.wants(0) else None
    dupdates = builder.op("Where", update_taken, places.read(share), zero) if op.wants(2) else None
    return ddata, None, dupdates


def _product(op: Operation, dy: Tensor, places: _Places) -> tuple[Tensor | None, ...]:
    """The slope for each factor is the product of the other factors at its position."""
    data, updates, y = op.required(0), op.required(2), op.output
    (data_is_zero, data_factor), (update_is_zero, update_factor) = without_zeros(data), without_zeros(updates)
    rest = places.multiply(data_factor, update_factor)
    zeros, sum_of_zeros = (
        of_data + places.add(of_updates)
        for of_data, of_updates in (
            (op.builder.cast(data_is_zero, y.dtype), op.builder.cast(update_is_zero, y.dtype)),
            (zeros_alone(data, data_is_zero), zeros_alone(updates, update_is_zero)),
        )
    )
    ddata = dupdates = None
    if op.wants(0):
        ddata = dy * slope_of_product(data, y, rest, zeros, sum_of_zeros)
    if op.wants(2):
        there = (places.read(tensor) for tensor in (y, rest, zeros, sum_of_zeros))
        dupdates = places.read(dy) * slope_of_product(updates, *there)
    return ddata, None, dupdates


def _adds(op: Operation) -> bool:
    return bool(op.attribute("reduction", "none") == "add")


def _reduces(op: Operation) -> bool:
    reduction = op.attribute("reduction", "none")
    if reduction not in ("none", "add", "mul", "max", "min"):
        raise GradientError(
            f"{op} has the reduction '{reduction}', which the standard does not know: it may be none, add, mul, max or min. "
            "Export the model again"
        )
    return reduction not in ("none", "add")


GATHER_GRAD = SemanticOperator("GatherGrad", ("dy", "indices", "data"), ("d_data",), like("data"), lowering=lower_gather_grad)

OPERATORS = [
    Operator("Gather", gradient=gather, axes=axis_rules.gather, precision=Precision.FOLLOWS, reopen=reopen_rules.gather),
    Operator(
        "GatherElements",
        gradient=gather_elements,
        axes=axis_rules.gather_elements,
        precision=Precision.FOLLOWS,
        reopen=reopen_rules.by_element,
    ),
    Operator(
        "GatherND",
        gradient=gather_positions,
        axes=axis_rules.gather_slices,
        precision=Precision.FOLLOWS,
        reopen=reopen_rules.gather_nd,
    ),
    Operator("Compress", gradient=gather_positions, axes=axis_rules.compressed),
    Operator("TopK", gradient=top_k, axes=axis_rules.largest, mixes=axis_rules.named_axis, reopen=reopen_rules.along_axis),
    Operator("OneHot", gradient=one_hot, axes=axis_rules.one_hot, reopen=reopen_rules.one_hot),
    Operator("Unique", gradient=unique),
    Operator("ScatterElements", gradient=scatter_elements, axes=axis_rules.scatter_elements, reopen=reopen_rules.by_element),
    Operator("ScatterND", gradient=scatter_nd, axes=axis_rules.scatter_slices, reopen=reopen_rules.scatter_nd),
    Operator("TensorScatter", gradient=tensor_scatter, reopen=reopen_rules.tensor_scatter),
    GATHER_GRAD,
    Operator("NonZero", axes=axis_rules.non_zero),
    Operator("Scatter", axes=axis_rules.scatter_elements),
]

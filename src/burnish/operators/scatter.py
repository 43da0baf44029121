"""Operators that write elements by index, over what is there or combined with it."""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import GradientError
from burnish.graph import Tensor, zeros_like
from burnish.operators.positions import add_at_positions, extent, flat_positions, known_rank, reshape_as
from burnish.operators.products import slope_of_product, without_zeros, zeros_alone
from burnish.operators.registry import Operation, gradient


@gradient("ScatterElements")
def scatter_elements(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Reduction none overwrites data, whose elements then receive nothing; add keeps it."""
    indices, updates, axis = op.required(1), op.required(2), op.attribute("axis", 0)
    if _reduces(op):
        return _reduced(op, dy, op.builder.op("GatherElements", flat_positions(op.input), indices, axis=axis))
    ddata = dupdates = None
    if op.wants(0):
        ddata = dy if _adds(op) else op.builder.op("ScatterElements", dy, indices, zeros_like(updates), axis=axis, like=dy)
    if op.wants(2):
        dupdates = op.builder.op("GatherElements", dy, indices, axis=axis, like=updates)
    return ddata, None, dupdates


@gradient("ScatterND")
def scatter_nd(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same as ScatterElements, by rows."""
    indices, updates = op.required(1), op.required(2)
    if _reduces(op):
        return _reduced(op, dy, op.builder.op("GatherND", flat_positions(op.input), indices))
    ddata = dupdates = None
    if op.wants(0):
        ddata = dy if _adds(op) else op.builder.op("ScatterND", dy, indices, zeros_like(updates), like=dy)
    if op.wants(2):
        dupdates = op.builder.op("GatherND", dy, indices, like=updates)
    return ddata, None, dupdates


@gradient("TensorScatter")
def tensor_scatter(op: Operation, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The rows of a cache that were written anew receive nothing; what was written there receives theirs.

    Sample b is written from its start on, one row after another; with the mode ``circular`` the first row follows the last.
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
    """The extent along ``axis``, an int64 scalar."""
    return tensor.builder.op("Squeeze", extent(tensor, axis), tensor.builder.integers([0]))


def _reduced(op: Operation, dy: Tensor, places: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of a reduction among what data holds at a place and all updates of it.

    Args:
        places: for each update its position in the flat data, int64 of the shape of updates.
    """
    rule = _product if op.attribute("reduction") == "mul" else _extremum
    return rule(op, dy, _Places(places, op.input))


class _Places:
    """Where each update stands in data."""

    def __init__(self, places: Tensor, data: Tensor):
        self._places, self._data = places, data

    def read(self, tensor: Tensor) -> Tensor:
        """For each update, what a tensor of the shape of data holds at its place."""
        flat = tensor.builder.op("Reshape", tensor, tensor.builder.integers([-1]))
        return tensor.builder.op("Gather", flat, self._places)

    def add(self, updates: Tensor) -> Tensor:
        """For each element of data the sum of its updates."""
        return add_at_positions(updates, self._places, self._data)

    def multiply(self, data: Tensor, updates: Tensor) -> Tensor:
        """Each element of data times its updates."""
        builder = data.builder
        flat = (builder.op("Reshape", tensor, builder.integers([-1])) for tensor in (data, self._places, updates))
        return reshape_as(builder.op("ScatterElements", *flat, axis=0, reduction="mul"), data)


def _extremum(op: Operation, dy: Tensor, places: _Places) -> tuple[Tensor | None, ...]:
    """The cotangent goes to whatever was taken; those that tie share it evenly, as in PyTorch's scatter_reduce."""
    builder, data, updates, y = op.builder, op.required(0), op.required(2), op.output
    data_taken, update_taken = builder.op("Equal", data, y), builder.op("Equal", updates, places.read(y))
    share = dy / (builder.cast(data_taken, y.dtype) + places.add(builder.cast(update_taken, y.dtype)))
    zero = builder.scalar(0, dy)
    ddata = builder.op("Where", data_taken, share, zero) if op.wants(0) else None
    dupdates = builder.op("Where", update_taken, places.read(share), zero) if op.wants(2) else None
    return ddata, None, dupdates


def _product(op: Operation, dy: Tensor, places: _Places) -> tuple[Tensor | None, ...]:
    """The slope by each factor is the product of the others at its place."""
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
    """Whether what is there and what is written are combined other than by a sum."""
    reduction = op.attribute("reduction", "none")
    if reduction not in ("none", "add", "mul", "max", "min"):
        raise GradientError(
            f"{op} has the reduction '{reduction}', which the standard does not know: it may be none, add, mul, max or min. "
            "Export the model again"
        )
    return reduction not in ("none", "add")

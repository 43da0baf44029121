"""Reading and writing at computed positions."""

from __future__ import annotations

import math
from typing import Any

import torch

from burnish.engines.torch.translate.rules import Call, NotKnownYet, translates
from burnish.operators.indexing import GATHER_GRAD
from burnish.operators.row_gradients import COALESCE_ROWS


def wrapped(indices: Any, extent: Any, known: Any) -> Any:
    """Return nonnegative indices: ONNX's negative ones count from the end."""
    if known is not None and (known >= 0).all():
        return indices
    return torch.where(indices < 0, indices + extent, indices)


@translates("Gather")
def gather(op: Call) -> Any:
    data, axis = op.tensor(0), op.attribute("axis", 0) % op.rank()
    known = op.known(1)
    if known is not None and known.ndim == 0:
        return torch.select(data, axis, int(known))
    indices = op.tensor(1)
    source = op.node.inputs[1]
    if source is None or not COALESCE_ROWS.is_of(source.producer()):  # its indices count from the start
        indices = wrapped(indices.to(torch.int64), op.extents()[axis], known)
    if op.rank(1) == 1:
        return torch.index_select(data, axis, indices)
    rows = torch.index_select(data, axis, torch.reshape(indices, [-1]))
    extents = op.extents()
    return torch.reshape(rows, [*extents[:axis], *op.extents(1), *extents[axis + 1 :]])


@translates(GATHER_GRAD)
def gather_gradient(op: Call) -> Any:
    """The sum of the rows of dy that were read from each place of x along the axis."""
    dy, axis = op.tensor(0), op.attribute("axis", 0) % op.rank(2)
    indices = wrapped(op.tensor(1).to(torch.int64), op.extents(2)[axis], op.known(1))
    rank = op.rank(1)
    rows = torch.flatten(dy, axis, axis + rank - 1) if rank else torch.unsqueeze(dy, axis)
    # In place: the gradient of an embedding is as large as its table.
    return torch.zeros_like(op.tensor(2)).index_add_(axis, torch.reshape(indices, [-1]), rows)


@translates("GatherElements")
def gather_elements(op: Call) -> Any:
    axis = op.attribute("axis", 0) % op.rank()
    return torch.gather(op.tensor(0), axis, wrapped(op.tensor(1).to(torch.int64), op.extents()[axis], op.known(1)))


REDUCES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@translates("ScatterElements", since=11)
def scatter_elements(op: Call) -> Any:
    axis, reduction = op.attribute("axis", 0) % op.rank(), op.attribute("reduction", "none")
    indices = wrapped(op.tensor(1).to(torch.int64), op.extents()[axis], op.known(1))
    data, updates = op.tensor(0), op.tensor(2)
    if reduction == "none":
        return torch.scatter(data, axis, indices, updates)
    if reduction == "add":
        return torch.scatter_add(data, axis, indices, updates)
    return torch.scatter_reduce(data, axis, indices, updates, REDUCES[reduction])


@translates("GatherND")
def gather_nd(op: Call) -> Any:
    return op.tensor(0)[_places(op)]


@translates("ScatterND")
def scatter_nd(op: Call) -> Any:
    reduction = op.attribute("reduction", "none")
    data, places, updates = op.tensor(0), _places(op), op.tensor(2)
    if reduction in ("none", "add"):
        return torch.index_put(data, places, updates, accumulate=reduction == "add")
    # One row of data per place, so that updates are reduced by rows.
    depth = len(places)
    extents = op.extents()
    flat = torch.zeros_like(places[0])
    for extent, place in zip(extents[:depth], places, strict=True):
        flat = flat * extent + place
    rows = torch.reshape(data, [-1, *extents[depth:]])
    where = torch.reshape(flat, [-1, *[1] * (len(extents) - depth)])
    updates = torch.reshape(updates, [-1, *extents[depth:]])
    reduced = torch.scatter_reduce(rows, 0, torch.broadcast_to(where, updates.shape), updates, REDUCES[reduction])
    return torch.reshape(reduced, extents)


def _places(op: Call) -> tuple[Any, ...]:
    batched, last = op.attribute("batch_dims", 0), op.extents(1)[-1]
    if not isinstance(last, int):
        raise NotKnownYet
    indices, extents = op.tensor(1).to(torch.int64), op.extents()
    known = op.known(1)
    rank = op.rank(1) - 1
    leading = tuple(
        torch.reshape(torch.arange(extents[axis], device=op.device), [-1 if place == axis else 1 for place in range(rank)])
        for axis in range(batched)
    )
    return leading + tuple(
        wrapped(torch.select(indices, -1, axis), extents[batched + axis], None if known is None else known[..., axis])
        for axis in range(last)
    )


@translates("OneHot")
def one_hot(op: Call) -> Any:
    (depth,) = op.integers(1)
    indices, rank = wrapped(op.tensor(0).to(torch.int64), depth, op.known(0)), op.rank() + 1
    axis = op.attribute("axis", -1) % rank
    classes = torch.reshape(torch.arange(depth, device=op.device), [-1 if position == axis else 1 for position in range(rank)])
    off, on = torch.select(op.tensor(2), 0, 0), torch.select(op.tensor(2), 0, 1)
    return torch.where(torch.eq(torch.unsqueeze(indices, axis), classes), on, off)


@translates("NonZero")
def non_zero(op: Call) -> Any:
    return torch.nonzero(op.tensor()).t()


@translates("Compress")
def compress(op: Call) -> Any:
    axis = op.attribute("axis")
    data = op.tensor(0)
    data = torch.reshape(data, [-1]) if axis is None else data
    chosen = torch.squeeze(torch.nonzero(op.tensor(1)), 1)
    return torch.index_select(data, axis or 0, chosen)


@translates("ReverseSequence")
def reverse_sequence(op: Call) -> Any:
    time, batch = op.attribute("time_axis", 0) % 2, op.attribute("batch_axis", 1) % 2
    extent = op.extents()[time]
    lengths = torch.reshape(op.tensor(1), [1, -1] if batch else [-1, 1])
    steps = torch.reshape(torch.arange(extent, device=op.device), [1, -1] if time else [-1, 1])
    places = torch.where(steps < lengths, lengths - 1 - steps, steps)
    x, extents = op.tensor(0), op.extents()
    places = torch.reshape(places, [*extents[:2], *[1] * (len(extents) - 2)])
    return torch.gather(x, time, torch.broadcast_to(places, extents))


@translates("TensorScatter")
def tensor_scatter(op: Call) -> Any:
    extents, updated, rank = op.extents(), op.extents(1), op.rank()
    axis = op.attribute("axis", -2) % rank
    rows = torch.reshape(torch.arange(updated[axis], device=op.device), [-1, *[1] * (rank - 1 - axis)])
    if op.has(2):
        rows = rows + torch.reshape(op.tensor(2), [-1, *[1] * (rank - 1)])
    if op.attribute("mode", "linear") == "circular":
        rows = torch.remainder(rows, extents[axis])
    return torch.scatter(op.tensor(), axis, torch.broadcast_to(rows, updated), op.tensor(1))


@translates("Unique")
def unique(op: Call) -> Any:
    """All outputs: the values, their first positions, the index of each element's value, and the counts."""
    axis, data, extents = op.attribute("axis"), op.tensor(), op.extents()
    count = math.prod(extents) if axis is None else extents[axis]
    data, axis = (torch.reshape(data, [-1]), 0) if axis is None else (data, axis)
    values, inverse, counts = torch.unique(data, return_inverse=True, return_counts=True, dim=axis)
    first = torch.full_like(counts, count).scatter_reduce(0, inverse, torch.arange(count, device=op.device), "amin")
    if op.attribute("sorted", 1):
        return values, first, inverse, counts
    order = torch.argsort(first)
    return torch.index_select(values, axis, order), first[order], torch.argsort(order)[inverse], counts[order]


@translates(COALESCE_ROWS)
def coalesce_rows(op: Call) -> Any:
    """The rows of an index are added in order: on the CPU, ``index_add_`` does so."""
    distinct, places = torch.unique(op.tensor(0), sorted=True, return_inverse=True)
    extents = op.extents(1)
    sums = torch.zeros([distinct.shape[0], *extents[1:]], dtype=op.tensor(1).dtype, device=op.device)
    return distinct, sums.index_add_(0, places, op.tensor(1))

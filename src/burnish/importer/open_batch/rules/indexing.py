"""Operators that choose by index."""

from __future__ import annotations

from burnish.importer.open_batch.call import Call, Result, opens, outcome
from burnish.importer.open_batch.operands import FIRST, STACKED, Batch, Operand, Refused


@opens("Gather")
def gather(call: Call) -> Result:
    x, indices, opening = call.operand(0), call.operand(1), call.opening
    axis = call.axis(x.rank)
    if x.batch is None:
        assert indices.batch is not None
        return call.again(x.value, indices.value)[0], Batch(indices.batch.axis + axis, indices.batch.is_extra)
    if indices.batch is not None:
        return _of_each(call, x, indices, axis)
    if x.batch == Batch(axis, is_extra=False):
        known = call.array(1)
        if known is not None and known.ndim == 0 and int(known) in (0, -1):
            return outcome(Operand(opening.emit("Identity", x.value), (), Batch(axis, is_extra=True)))
        x = Operand(opening.placed(x, Batch(axis, is_extra=True)), x.shape, Batch(axis, is_extra=True))
    assert x.batch is not None
    at = x.batch.axis
    new = axis + (x.batch.is_extra and axis >= at)
    return call.again(x.value, indices.value, axis=new)[0], Batch(at if at <= new else at - 1 + indices.rank, x.batch.is_extra)


def _of_each(call: Call, x: Operand, indices: Operand, axis: int) -> Result:
    """Each sample's own indices into what it has: the axis that is indexed comes after that of samples."""
    opening = call.opening
    value = opening.placed(x, FIRST)
    if axis:
        value = opening.emit("Transpose", value, perm=[0, axis + 1, *(index + 1 for index in range(x.rank) if index != axis)])
    chosen = opening.emit("Unsqueeze", opening.placed(indices, FIRST), opening.integers([indices.rank + 1]))
    result = opening.emit("GatherND", value, chosen, batch_dims=1)
    if axis:
        # Now the axes are: samples, those of the indices, those of the data but the one that was indexed.
        of_indices = range(1, indices.rank + 1)
        others = range(indices.rank + 1, indices.rank + x.rank)
        result = opening.emit("Transpose", result, perm=[0, *others[:axis], *of_indices, *others[axis:]])
    return result, FIRST


@opens("GatherElements", "ScatterElements")
def by_element(call: Call) -> Result:
    operands, opening = call.present, call.opening
    axis = call.axis(operands[0].rank)
    taken = next((operand.batch for operand in operands if operand.batch is not None), None)
    assert taken is not None
    singles = not taken.is_extra and taken.axis != axis and all(operand.shape[taken.axis] == 1 for operand in operands)
    batch = taken if singles else FIRST
    values = [opening.spread(operand, batch) for operand in operands]
    return call.again(*values, axis=axis + batch.is_extra)[0], batch


@opens("GatherND")
def gather_nd(call: Call) -> Result:
    opening = call.opening
    values = [opening.spread(operand, FIRST) for operand in (call.operand(0), call.operand(1))]
    return call.again(*values, batch_dims=int(call.attribute("batch_dims", 0)) + 1)[0], FIRST


@opens("ScatterND")
def scatter_nd(call: Call) -> Result:
    """Samples go along the last axis: indices that are the same for all samples leave it whole."""
    call.same_for_all(0, 2)
    opening, indices = call.opening, call.operand(1)
    data, updates = call.operand(0), call.operand(2)
    values = [opening.spread(operand, Batch(operand.rank, is_extra=True)) for operand in (data, updates)]
    return call.again(values[0], indices.value, values[1])[0], Batch(data.rank, is_extra=True)


@opens("OneHot")
def one_hot(call: Call) -> Result:
    call.same_for_all(0)
    indices = call.operand()
    assert indices.batch is not None
    axis = call.axis(indices.rank + 1, -1)
    batch = indices.batch
    if batch.is_extra:
        at = batch.axis if batch.axis <= axis else batch.axis + 1
        new = axis + 1 if batch.axis <= axis else axis
        return call.again(*call.with_rest(indices.value), axis=new)[0], Batch(at, is_extra=True)
    return call.again(*call.with_rest(indices.value), axis=axis)[0], Batch(batch.axis + (axis <= batch.axis), is_extra=False)


@opens("GridSample")
def sampled_grid(call: Call) -> Result:
    x, grid, stack = call.operand(0), call.operand(1), STACKED
    if x.shape[0] != 1 or grid.shape[0] != 1:
        raise Refused("samples several images of one sample")
    return call.again(call.opening.spread(x, stack), call.opening.spread(grid, stack))[0], stack


@opens("TensorScatter")
def tensor_scatter(call: Call) -> Result:
    """The first axis is that of samples, each of which has a cache and a place in it to write to."""
    samples = Batch(0, is_extra=False)
    for operand in call.present:
        if operand.batch not in (None, samples) or operand.shape[0] != 1:
            raise Refused("writes to several caches of a sample")
    return call.again(*(call.opening.spread(operand, samples) for operand in call.present))[0], samples

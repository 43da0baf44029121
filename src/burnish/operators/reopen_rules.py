"""How operators of the standard take several samples in a model that was made for one: ``reopen`` of their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
import onnx_ir as ir

from burnish.operators.reopening import (
    FIRST,
    STACKED,
    Batch,
    Call,
    Count,
    Element,
    Extent,
    Opening,
    Operand,
    Refused,
    Result,
    Shape,
    broadcast_extents,
    elements,
    new_axis,
    outcome,
)


def unary(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    return call.over(call.operand())


def broadcast(call: Call) -> Result:
    values, batch, _ = aligned(call.opening, call.present)
    return call.again(*values)[0], batch


def prelu(call: Call) -> Result:
    """The slopes are broadcast to the first operand, never the other way round."""
    x, slopes = call.operand(0), call.operand(1)
    check_shape_stays(x, slopes)
    if x.batch is None:
        batch = FIRST
        x = Operand(call.opening.spread(x, batch), x.shape, batch)
    values, batch, _ = aligned(call.opening, [x, slopes])
    return call.again(*values)[0], batch


def combined(opening: Opening, op_type: str, *operands: Operand) -> Operand:
    """Emit an operator that broadcasts its operands, at least one of which has samples."""
    values, batch, shape = aligned(opening, operands)
    return Operand(opening.emit(op_type, *values), shape, batch)


def aligned(opening: Opening, operands: Sequence[Operand]) -> tuple[list[ir.Value], Batch, Shape]:
    """Operands as they are broadcast against each other; where samples stand in the result, and its shape for one of them."""
    shape = broadcast_extents([operand.shape for operand in operands])
    rank = len(shape)
    batch = _common(operands, shape)
    values = []
    for operand in operands:
        missing = rank - operand.rank
        if operand.batch is not None:
            values.append(opening.placed(operand, batch, rank))
        elif batch.is_extra and batch.axis > missing:
            values.append(opening.unsqueezed(operand.value, batch.axis - missing))
        else:
            values.append(operand.value)
    return values, batch, shape


def check_shape_stays(x: Operand, beside: Operand) -> None:
    """Raise Refused where an operand that the standard broadcasts to the first would change its shape."""
    if broadcast_extents([x.shape, beside.shape]) != x.shape:
        raise Refused(f"broadcasts '{x.value.name}' to the shape of '{beside.value.name}', which the standard does not allow")


def _common(operands: Sequence[Operand], shape: Shape) -> Batch:
    """Return where samples stand in a result: in place of an axis of extent 1 in all operands, or else along one of their own."""
    batches = [
        Batch(operand.batch.axis + len(shape) - operand.rank, operand.batch.is_extra)
        for operand in operands
        if operand.batch is not None
    ]
    for batch in batches:
        if not batch.is_extra and shape[batch.axis] == 1:
            return batch
    if not batches:
        raise Refused("has no operand with samples")
    return next((batch for batch in batches if batch.is_extra), Batch(batches[0].axis, is_extra=True))


def quantization(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x, scale = call.operand(0), call.operand(1)
    if scale.rank > 1:
        raise Refused("quantizes in blocks")
    return call.over(x) if scale.rank == 0 else call.over(x, axis=call.new_axis(call.axis(x.rank, 1)))


OVER_SAMPLES = (
    "reduces over axis {axis}, in the place of which the samples of a batch stand: whether it means one sample or all of them "
    "cannot be told from a model of one"
)
LOSS_REMEDY = (
    "Where this is the model's own loss, export the model without it, and name the loss to burnish (loss=...); else export it "
    "with an open batch"
)


def reduction(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    assert x.batch is not None
    named: Sequence[int] | None = call.named_axes()
    keeps = bool(call.attribute("keepdims", 1))
    if not named:
        if call.attribute("noop_with_empty_axes", 0):
            return call.over(x)
        named = range(x.rank)
    axes = sorted({axis % x.rank for axis in named})
    value = x.value
    if x.rank == 0:
        value, along, keeps = call.opening.unsqueezed(value, 1), [1], False
    else:
        along = reduced(x, axes)
    in_attribute = "axes" in call.node.attributes
    operands = [value] if in_attribute else [value, call.opening.integers(along)]
    changed = {"axes": along} if in_attribute else {}
    result = call.again(*operands, keepdims=int(keeps), noop_with_empty_axes=None, **changed)[0]
    return [(result, _left(x.batch, along, keeps))]


def reduced(x: Operand, axes: list[int]) -> list[int]:
    """Return the numbers that reduced axes of one sample have beside the samples."""
    assert x.batch is not None
    if not x.batch.is_extra and x.batch.axis in axes:
        raise Refused(OVER_SAMPLES.format(axis=x.batch.axis), LOSS_REMEDY)
    return [axis + (x.batch.is_extra and axis >= x.batch.axis) for axis in axes]


def _left(batch: Batch, along: list[int], keeps: bool) -> Batch:
    return batch if keeps else Batch(batch.axis - sum(axis < batch.axis for axis in along), batch.is_extra)


def position(call: Call) -> Result:
    x = call.operand()
    assert x.batch is not None
    (axis,) = reduced(x, [call.axis(x.rank)])
    return call.again(x.value, axis=axis)[0], _left(x.batch, [axis], bool(call.attribute("keepdims", 1)))


def along_axis(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    return call.over(x, axis=call.new_axis(call.axis(x.rank, -1)))


def running_sum(call: Call) -> Result:
    call.same_for_all(0)
    x = call.operand()
    (axis,) = call.integers(1, "its axis")
    new = call.new_axis(axis % x.rank)
    return call.again(x.value, call.opening.constant(np.asarray(new, dtype=np.int64)))[0], x.batch


def shape(call: Call) -> Result:
    x = call.operand()
    start, end = call.attribute("start", 0), call.attribute("end", x.rank)
    return call.opening.vector(call.opening.extents(x)[start:end]), None


def size(call: Call) -> Result:
    opening = call.opening
    extents = opening.vector(opening.extents(call.operand()))
    return opening.emit("ReduceProd", extents, keepdims=0), None


LARGEST = 2**31 - 1
"""A bound of a slice from here on means "to the end"."""


def reshape(call: Call) -> Result:
    call.same_for_all(0)
    shape = call.result_shape()
    if all(isinstance(extent, int) for extent in shape):
        return to_shape(call, shape)
    return _to_computed(call)


def to_shape(call: Call, shape: Shape) -> Result:
    """A reshape to extents that are known: samples stay where they are, in a place with as many elements before it."""
    x, opening = call.operand(), call.opening
    assert x.batch is not None
    value, before = x.value, elements(x.shape[: x.batch.axis])
    batch = None if before is None else _as_many_before(x.batch, before, shape)
    if batch is None:
        value = opening.placed(x, FIRST)
        batch = Batch(0, is_extra=not shape or shape[0] != 1)
    parts: list[Element] = [extent for extent in shape if isinstance(extent, int)]
    parts[batch.axis : batch.axis + (not batch.is_extra)] = [Count.SAMPLES]
    return opening.reshaped(value, parts), batch


def _as_many_before(batch: Batch, before: object, shape: Shape) -> Batch | None:
    places = sorted(range(len(shape) + 1), key=lambda axis: axis != batch.axis)
    fitting = [axis for axis in places if elements(shape[:axis]) == before]
    taken = [axis for axis in fitting if axis < len(shape) and shape[axis] == 1]
    if taken:
        return Batch(taken[0], is_extra=False)
    return Batch(fitting[0], is_extra=True) if fitting else None


def _to_computed(call: Call) -> Result:
    """A reshape to extents of which some are computed: samples come first, so that a 0 copies the extent that it did."""
    x, shape, opening = call.operand(), call.result_shape(), call.opening
    begins_with_one = bool(shape) and shape[0] == 1
    stays = begins_with_one and x.rank > 0 and x.shape[0] == 1
    value = opening.placed(x, Batch(0, is_extra=not stays))
    target, known, copies = call.operand(1), call.array(1), not call.attribute("allowzero", 0)
    rest: list[Element] = [target.value]
    if known is not None:
        rest = [int(number) for number in known[int(begins_with_one) :]]
    elif begins_with_one:
        bounds = [opening.integers([bound]) for bound in (1, LARGEST, 0)]
        rest = [opening.emit("Slice", target.value, *bounds)]
    if begins_with_one and not stays and copies and (known is None or 0 in rest):
        raise Refused("copies extents of what it reshapes, and samples would stand among them")
    infers = known is not None and -1 not in rest and copies
    return call.again(value, opening.vector([-1 if infers else Count.SAMPLES, *rest]))[0], Batch(0, is_extra=not begins_with_one)


def flatten(call: Call) -> Result:
    x, opening = call.operand(), call.opening
    axis = int(call.attribute("axis", 1))
    axis = axis + x.rank if axis < 0 else axis
    rows, columns = elements(x.shape[:axis]), elements(x.shape[axis:])
    if rows == (1, {}) and axis > 0:
        stacked = opening.placed(x, STACKED)
        return call.again(stacked, axis=axis)[0], STACKED
    known = [None if count is None or count[1] else count[0] for count in (rows, columns)]
    if known == [None, None]:
        raise Refused("flattens axes of unknown extents on both sides")
    parts: list[Element] = [-1 if count is None else count for count in known]
    if rows == (1, {}):
        return opening.reshaped(opening.placed(x, FIRST), [Count.SAMPLES, *parts[1:]]), STACKED
    return opening.reshaped(opening.placed(x, FIRST), [Count.SAMPLES, *parts]), FIRST


def transpose(call: Call) -> Result:
    x = call.operand()
    assert x.batch is not None
    order = [int(axis) for axis in call.attribute("perm", None) or range(x.rank)[::-1]]
    if not x.batch.is_extra:
        return call.again(x.value, perm=order)[0], Batch(order.index(x.batch.axis), is_extra=False)
    # Samples stay in front of the axis that they stand in front of, so that a stack of matrices stays one.
    at = 0 if x.batch.axis == 0 or not order else (order.index(x.batch.axis) if x.batch.axis < x.rank else x.rank)
    new = [axis + (axis >= x.batch.axis) for axis in order]
    new.insert(at, x.batch.axis)
    return call.again(x.value, perm=new)[0], Batch(at, is_extra=True)


def squeeze(call: Call) -> Result:
    x = call.operand()
    axes = call.named_axes()
    if axes is None:
        if not all(isinstance(extent, int) for extent in x.shape):
            raise Refused("does not say which axes it removes, and not all extents are known")
        axes = [axis for axis, extent in enumerate(x.shape) if extent == 1]
    return outcome(call.opening.removed(x, sorted({axis % x.rank for axis in axes})))


def unsqueeze(call: Call) -> Result:
    x = call.operand()
    axes = call.named_axes() or []
    rank = x.rank + len(axes)
    return outcome(call.opening.inserted(x, sorted({axis % rank for axis in axes})))


def expand(call: Call) -> Result:
    call.same_for_all(0)
    x, opening, shape = call.operand(), call.opening, call.result_shape()
    assert x.batch is not None
    target = call.operand(1)
    length = target.shape[0] if target.shape else None
    if not isinstance(length, int):
        raise Refused("computes how many extents its result has")
    at = x.batch.axis + len(shape) - x.rank
    if not x.batch.is_extra and shape[at] == 1 and (call.array(1) is not None or at < len(shape) - length):
        return call.again(x.value, target.value)[0], Batch(at, is_extra=False)
    value = opening.placed(x, FIRST, len(shape))
    ones = [1] * (len(shape) - length + 1)
    return call.again(value, opening.vector([*ones, *_elements(call)]))[0], FIRST


def _elements(call: Call) -> list[Element]:
    """The elements of the second operand, or the operand where they are not known."""
    known = call.array(1)
    return [call.operand(1).value] if known is None else [int(number) for number in known]


def tile(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x, opening = call.operand(), call.opening
    assert x.batch is not None
    known = call.array(1)
    if not x.batch.is_extra and known is not None and known[x.batch.axis] == 1:
        return call.over(x)
    value = opening.placed(x, FIRST)
    return [(call.again(value, opening.vector([1, *_elements(call)]))[0], FIRST)]


def concat(call: Call) -> Result:
    operands, opening = call.present, call.opening
    rank = operands[0].rank
    axis = call.axis(rank)
    batches = [operand.batch for operand in operands if operand.batch is not None]
    in_place = [batch for batch in batches if not batch.is_extra and batch.axis != axis]
    batch = next(iter(in_place), None) or next((batch for batch in batches if batch.is_extra), FIRST)
    values = [opening.spread(operand, batch) for operand in operands]
    return call.again(*values, axis=axis + (batch.is_extra and axis >= batch.axis))[0], batch


def split(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    return call.over(x, axis=call.new_axis(call.axis(x.rank)))


def slice_(call: Call) -> Result:
    """What is taken of the single place of one sample is taken of each: that place."""
    call.same_for_all(0)
    x, opening = call.operand(), call.opening
    assert x.batch is not None
    count = call.operand(1).shape[0]
    if not isinstance(count, int):
        raise Refused("computes how many axes it slices")
    axes = call.integers(3, "its axes") if call.has(3) else list(range(count))
    axes = [axis % x.rank for axis in axes]
    remaining = [index for index, axis in enumerate(axes) if x.batch.is_extra or axis != x.batch.axis]
    if len(remaining) < len(axes) and call.result_shape()[x.batch.axis] != 1:
        raise Refused("takes nothing of a sample")
    if not remaining:
        return opening.emit("Identity", x.value), x.batch
    bounds = []
    for index in (1, 2, 4):
        if index == 4 and not call.has(4):
            continue
        if len(remaining) == len(axes):
            bounds.append(call.operand(index).value)
        else:
            numbers = call.integers(index, "its bounds")
            bounds.append(opening.integers([numbers[position] for position in remaining]))
    new = opening.integers([call.new_axis(axes[position]) for position in remaining])
    return opening.emit("Slice", x.value, bounds[0], bounds[1], _like(call, new, bounds[0]), *bounds[2:]), x.batch


def _like(call: Call, axes: ir.Value, bounds: ir.Value) -> ir.Value:
    """Axes in the integer type of the bounds, which all operands of a slice share."""
    kind = bounds.dtype
    return axes if kind is None or kind == axes.dtype else call.opening.emit("Cast", axes, to=int(kind))


def pad(call: Call) -> Result:
    call.same_for_all(0)
    x, opening = call.operand(), call.opening
    pads, fill = call.operand(1), call.operand(2).value if call.has(2) else None
    known = call.array(1)
    axes = [axis % x.rank for axis in (call.integers(3, "its axes") if call.has(3) else range(x.rank))]
    if known is None:
        if not call.has(3) and not (x.batch is None or x.batch.is_extra):
            raise Refused("computes how far it pads along every axis, that of the samples among them")
        new = opening.integers([new_axis(x, axis) for axis in axes])
        return call.again(x.value, pads.value, fill, new)[0], x.batch
    sides = np.split(known.reshape(-1), 2)
    widths = {axis: (int(before), int(after)) for axis, before, after in zip(axes, *sides, strict=True) if before or after}
    if x.batch is not None and not x.batch.is_extra and x.batch.axis in widths:
        x = Operand(opening.placed(x, FIRST), x.shape, FIRST)
    rank = x.rank + (x.batch is not None and x.batch.is_extra)
    columns = np.zeros((2, rank), np.int64)
    for axis, width in widths.items():
        columns[:, new_axis(x, axis)] = width
    return call.again(x.value, opening.constant(columns.reshape(-1)), fill)[0], x.batch


def center_crop_pad(call: Call) -> Result:
    """The sizes are those of some axes; the axis of the samples is left out of them."""
    call.same_for_all(0)
    x = call.operand()
    named = call.attribute("axes")
    axes = list(range(x.rank)) if named is None else [axis % x.rank for axis in named]
    sizes = dict(zip(axes, call.integers(1, "its sizes"), strict=True))
    if x.batch is not None and not x.batch.is_extra and sizes.pop(x.batch.axis, 1) != 1:
        raise Refused("pads along the axis of the samples")
    new = [new_axis(x, axis) for axis in sizes]
    return call.again(x.value, call.opening.integers(list(sizes.values())), axes=new)[0], x.batch


def fourier_transform(call: Call) -> Result:
    """Along an axis that is an operand since opset 20; the last axis holds real and imaginary parts."""
    call.same_for_all(0)
    x, opening = call.operand(), call.opening
    if x.batch is not None and x.batch.axis == x.rank - 1 + x.batch.is_extra:
        x = Operand(opening.placed(x, FIRST), x.shape, FIRST)
    length = call.operand(1).value if call.has(1) else None
    is_operand = opening.graph.opset_imports[""] >= 20
    default = -2 if is_operand else 1
    axis = call.integers(2, "its axis")[0] if call.has(2) else int(call.attribute("axis", default))
    new = new_axis(x, axis % x.rank)
    if not is_operand:
        return call.again(x.value, length, axis=new)[0], x.batch
    return call.again(x.value, length, opening.constant(np.asarray(new, np.int64)))[0], x.batch


def matrices(call: Call) -> list[Result | None]:
    """These work on the matrices of the last two axes, so samples go in front."""
    call.same_for_all(0)
    x = call.operand()
    assert x.batch is not None
    if x.batch.axis >= x.rank - 2 + x.batch.is_extra:
        x = Operand(call.opening.placed(x, FIRST), x.shape, FIRST)
    return call.over(x)


def reversed_sequence(call: Call) -> Result:
    """Samples stand in the place of its batch axis; where that has several sequences of one sample, behind its two axes."""
    call.same_for_all(0, 1)
    x, lengths, opening = call.operand(0), call.operand(1), call.opening
    along = Batch(call.axis(x.rank, 1, "batch_axis"), is_extra=False)
    if x.shape[along.axis] == 1:
        return call.again(opening.spread(x, along), opening.spread(lengths, STACKED))[0], along
    if lengths.batch is not None:
        raise Refused("reverses several sequences of a sample, each by a length of the sample's own")
    last = Batch(x.rank, is_extra=True)
    return call.again(opening.placed(x, last), lengths.value)[0], last


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


def by_element(call: Call) -> Result:
    operands, opening = call.present, call.opening
    axis = call.axis(operands[0].rank)
    taken = next((operand.batch for operand in operands if operand.batch is not None), None)
    assert taken is not None
    singles = not taken.is_extra and taken.axis != axis and all(operand.shape[taken.axis] == 1 for operand in operands)
    batch = taken if singles else FIRST
    values = [opening.spread(operand, batch) for operand in operands]
    return call.again(*values, axis=axis + batch.is_extra)[0], batch


def gather_nd(call: Call) -> Result:
    opening = call.opening
    values = [opening.spread(operand, FIRST) for operand in (call.operand(0), call.operand(1))]
    return call.again(*values, batch_dims=int(call.attribute("batch_dims", 0)) + 1)[0], FIRST


def scatter_nd(call: Call) -> Result:
    """Samples go along the last axis: indices that are the same for all samples leave it whole."""
    call.same_for_all(0, 2)
    opening, indices = call.opening, call.operand(1)
    data, updates = call.operand(0), call.operand(2)
    values = [opening.spread(operand, Batch(operand.rank, is_extra=True)) for operand in (data, updates)]
    return call.again(values[0], indices.value, values[1])[0], Batch(data.rank, is_extra=True)


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


def sampled_grid(call: Call) -> Result:
    x, grid, stack = call.operand(0), call.operand(1), STACKED
    if x.shape[0] != 1 or grid.shape[0] != 1:
        raise Refused("samples several images of one sample")
    return call.again(call.opening.spread(x, stack), call.opening.spread(grid, stack))[0], stack


def tensor_scatter(call: Call) -> Result:
    """The first axis is that of samples, each of which has a cache and a place in it to write to."""
    samples = Batch(0, is_extra=False)
    for operand in call.present:
        if operand.batch not in (None, samples) or operand.shape[0] != 1:
            raise Refused("writes to several caches of a sample")
    return call.again(*(call.opening.spread(operand, samples) for operand in call.present))[0], samples


def matmul(call: Call) -> Result:
    return outcome(product(call.opening, call.operand(0), call.operand(1)))


def product(opening: Opening, a: Operand, b: Operand) -> Operand:
    """Emit the product of two operands, at least one of which has samples."""
    vectors = (a.rank == 1, b.rank == 1)
    a = opening.inserted(a, [0]) if vectors[0] else a
    b = opening.inserted(b, [1]) if vectors[1] else b
    result = _matrices(opening, a, b)
    added = [result.rank - 2 + index for index, is_vector in enumerate(vectors) if is_vector]
    return opening.removed(result, added) if added else result


def _matrices(opening: Opening, a: Operand, b: Operand) -> Operand:
    leading = broadcast_extents([a.shape[:-2], b.shape[:-2]])
    shape = (*leading, a.shape[-2], b.shape[-1])
    rank = len(shape)
    batch = _stays(a, b, shape, rows=True) or _stays(b, a, shape, rows=False)
    if batch is not None:
        return Operand(opening.emit("MatMul", a.value, b.value), shape, batch)
    batch = _shared(a, b, shape) or FIRST
    values = [operand.value if operand.batch is None else opening.placed(operand, batch, rank) for operand in (a, b)]
    return Operand(opening.emit("MatMul", *values), shape, batch)


def _stays(x: Operand, other: Operand, shape: Shape, rows: bool) -> Batch | None:
    """Return where the samples of the only operand with samples stand in the product; None where they must move first."""
    if x.batch is None or other.batch is not None:
        return None
    rank = len(shape)
    at = x.batch.axis + rank - x.rank
    if x.batch.is_extra:
        is_last = x.batch.axis > x.rank - 2 + rows
        return None if is_last or other.rank > 2 else x.batch
    place = rank - 2 if rows else rank - 1
    return Batch(at, is_extra=False) if at == place or (at < rank - 2 and shape[at] == 1) else None


def _shared(a: Operand, b: Operand, shape: Shape) -> Batch | None:
    """The axis in front of the matrices in the place of which samples of both can stand."""
    for operand in (a, b):
        if operand.batch is not None and not operand.batch.is_extra:
            at = operand.batch.axis + len(shape) - operand.rank
            if at < len(shape) - 2 and shape[at] == 1:
                return Batch(at, is_extra=False)
    return None


def gemm(call: Call) -> Result:
    opening = call.opening
    a, b = call.operand(0), call.operand(1)
    transposed = [bool(call.attribute(name, 0)) for name in ("transA", "transB")]
    row = Batch(int(transposed[0]), is_extra=False)
    c = call.operand(2) if call.has(2) else None
    if a.batch == row and b.batch is None and (c is None or c.batch is None):
        return call.again(*call.with_rest())[0], STACKED
    a, b = (
        _transposed(opening, operand) if is_transposed else operand
        for operand, is_transposed in zip((a, b), transposed, strict=True)
    )
    factors = [Operand(opening.scalar(float(call.attribute(name, 1.0)), call.node.inputs[0]), ()) for name in ("alpha", "beta")]  # type: ignore[arg-type]
    result: Operand
    if a.batch is None and b.batch is None:
        result = Operand(opening.emit("MatMul", a.value, b.value), (a.shape[0], b.shape[1]))
        result = Operand(opening.emit("Mul", result.value, factors[0].value), result.shape)
    else:
        result = product(opening, a, b)
        if call.attribute("alpha", 1.0) != 1.0:
            result = combined(opening, "Mul", result, factors[0])
    if c is None:
        return outcome(result)
    if call.attribute("beta", 1.0) != 1.0:
        c = (
            combined(opening, "Mul", c, factors[1])
            if c.batch is not None
            else Operand(opening.emit("Mul", c.value, factors[1].value), c.shape)
        )
    return outcome(combined(opening, "Add", result, c))


def _transposed(opening: Opening, operand: Operand) -> Operand:
    shape = (operand.shape[1], operand.shape[0])
    if operand.batch is None:
        return Operand(opening.emit("Transpose", operand.value, perm=[1, 0]), shape)
    value = opening.placed(operand, FIRST)
    return Operand(opening.emit("Transpose", value, perm=[0, 2, 1]), shape, FIRST)


def einsum(call: Call) -> Result:
    """A letter more for the samples; or none where they stand in the place of the same letter in every operand that has them."""
    equation = str(call.attribute("equation")).replace(" ", "")
    terms, result = _terms(equation)
    operands = call.present
    if len(terms) != len(operands):
        raise Refused(f"has {len(operands)} operands for the equation '{equation}'")
    _check_letters(terms, operands)
    letter_of_samples = _kept_letter(terms, result, operands)
    if letter_of_samples is not None:
        return call.again(*(operand.value for operand in operands))[0], Batch(result.index(letter_of_samples), is_extra=False)
    letter = next(
        (letter for letter in "bBnNzZabcdefghijklmnopqrstuvwxyzACDEFGHIJKLMOPQRSTUVWXY" if letter not in equation), None
    )
    if letter is None:
        raise Refused(f"uses every letter in its equation '{equation}'")
    new_terms = [term if operand.batch is None else letter + term for term, operand in zip(terms, operands, strict=True)]
    values = [operand.value if operand.batch is None else call.opening.placed(operand, FIRST) for operand in operands]
    return call.again(*values, equation=f"{','.join(new_terms)}->{letter}{result}")[0], FIRST


def _terms(equation: str) -> tuple[list[str], str]:
    """What stands for each operand and for the result, which is each letter that occurs once where the equation leaves it out."""
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = [letter for letter in left if letter.isalpha()]
        result = ("..." if "..." in left else "") + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    return terms, result


def _check_letters(terms: list[str], operands: list[Operand]) -> None:
    """Raise Refused where a letter stands for axes of two extents, which engines broadcast or refuse as they like."""
    extents: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, _, behind = term.partition("...")
        for letter, extent in chain(
            zip(before, operand.shape, strict=False), zip(behind[::-1], operand.shape[::-1], strict=False)
        ):
            if isinstance(extent, int) and extents.setdefault(letter, extent) != extent:
                raise Refused(f"has axes of {extents[letter]} and {extent} places for the letter '{letter}' of its equation")


def _kept_letter(terms: list[str], result: str, operands: list[Operand]) -> str | None:
    if any("." in term for term in terms):
        return None
    letters = set()
    for term, operand in zip(terms, operands, strict=True):
        if operand.batch is None:
            continue
        if operand.batch.is_extra:
            return None
        letters.add(term[operand.batch.axis])
    letter = letters.pop()
    holders = [operand for term, operand in zip(terms, operands, strict=True) if letter in term]
    once = all(term.count(letter) <= 1 for term in terms)
    alone = not letters and once and result.count(letter) == 1 and all(operand.batch is not None for operand in holders)
    return letter if alone else None


def images(call: Call) -> Result:
    call.same_for_all(0)
    call.one_result()
    x = call.operand()
    result = call.again(*call.with_rest(stacked(call.opening, x)))[0]
    return unstacked(call, result, x.shape[0])


def stacked(opening: Opening, x: Operand) -> ir.Value:
    """Samples along the first axis: each as it is where it is one image, else all images of one after those of another.

    An operand that is the same for all samples is repeated for each.
    """
    if x.rank == 0:
        raise Refused("takes images, and gets a scalar")
    if x.shape[0] == 1:
        return opening.spread(x, STACKED)
    value = opening.spread(x, FIRST)
    rest = opening.extents(Operand(value, x.shape, FIRST))[1:]
    if 0 in x.shape:
        raise Refused("takes images without elements")
    return opening.emit("Reshape", value, opening.vector([-1, *rest]))


def unstacked(call: Call, result: ir.Value, images_of_one: Extent, index: int = 0) -> Result:
    """What ``stacked`` put after each other, apart again."""
    if images_of_one == 1:
        return result, STACKED
    if not isinstance(images_of_one, int):
        raise Refused("takes images of which a sample has an unknown number")
    rest: list[Element] = [
        extent if isinstance(extent, int) else call.opening.emit("Shape", result, start=axis, end=axis + 1)
        for axis, extent in enumerate(call.result_shape(index)[1:], start=1)
    ]
    return call.opening.reshaped(result, [Count.SAMPLES, images_of_one, *rest]), FIRST


def deformed_convolution(call: Call) -> Result:
    """The offsets and the mask are of a sample too."""
    call.same_for_all(0, 2, 4)
    count = call.operand().shape[0]
    values = [
        None if operand is None else stacked(call.opening, operand) if index in (0, 2, 4) else operand.value
        for index, operand in enumerate(call.operands)
    ]
    return unstacked(call, call.again(*values)[0], count)


def affine_grid(call: Call) -> Result:
    call.same_for_all(0)
    theta = call.operand()
    size = call.integers(1, "the size of its result")
    value = stacked(call.opening, theta)
    count = call.opening.emit("Shape", value, start=0, end=1)
    return unstacked(call, call.again(value, call.opening.vector([count, *size[1:]]))[0], theta.shape[0])


def max_pool(call: Call) -> list[Result | None]:
    """The indices count through all images: those of a sample begin again with each."""
    x, opening = call.operand(), call.opening
    values = call.again(stacked(opening, x))
    results: list[Result | None] = [unstacked(call, values[0], x.shape[0])]
    if call.is_read(1):
        indices, batch = unstacked(call, values[1], x.shape[0], 1)
        rank = len(call.result_shape(1)) + (batch is not None and batch.is_extra)
        results.append((opening.emit("Sub", indices, _counted_before(opening, x.shape, rank)), batch))
    return results


def max_unpool(call: Call) -> Result:
    """The indices count through all images of the result."""
    x, indices, opening = call.operand(0), call.operand(1), call.opening
    shape = call.result_shape()
    if call.has(2):
        raise Refused("is given the shape of its result, of one sample")
    if x.shape[0] != 1:
        raise Refused("takes several images of one sample")
    offsets = _counted_before(opening, shape, len(shape))
    counting = opening.emit("Add", opening.spread(indices, STACKED), offsets)
    return call.again(opening.spread(x, STACKED), counting)[0], STACKED


def _counted_before(opening: Opening, shape: Shape, rank: int) -> ir.Value:
    """For each sample, how many elements the samples before it hold; along the first of ``rank`` axes."""
    if not all(isinstance(extent, int) for extent in shape):
        raise Refused("counts positions of images whose extents are not known")
    size = math.prod(extent for extent in shape if isinstance(extent, int))
    bounds = [opening.constant(np.asarray(number, np.int64)) for number in (0, size)]
    end = opening.emit("Squeeze", opening.emit("Mul", opening.count, bounds[1]))
    numbers = opening.emit("Range", bounds[0], end, bounds[1])
    return opening.emit("Reshape", numbers, opening.integers([-1, *[1] * (rank - 1)]))


def resize(call: Call) -> Result:
    """Sizes hold the 1 of one sample."""
    call.same_for_all(0)
    x, opening = call.operand(), call.opening
    if call.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise Refused("crops what it resizes")
    axes = call.attribute("axes")
    along = list(range(x.rank)) if axes is None else [axis % x.rank for axis in axes]
    operands = call.with_rest(stacked(opening, x))
    if 0 in along and call.has(3):
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Refused("keeps the ratio of sizes, among which that of the batch would be")
        sizes = call.integers(3, "its sizes")
        if sizes[along.index(0)] != x.shape[0]:
            raise Refused("resizes along the axis of images")
        if x.shape[0] == 1:
            of_images: Element = Count.SAMPLES
        else:
            of_images = opening.emit("Shape", operands[0], start=0, end=1)
        operands[3] = opening.vector([of_images if axis == 0 else size for axis, size in zip(along, sizes, strict=True)])
    elif 0 in along:
        scales = call.array(2)
        if scales is None or scales[along.index(0)] != 1:
            raise Refused("computes the scale along the axis of images")
    return unstacked(call, call.again(*operands)[0], x.shape[0])


def last_axes(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x = call.operand()
    assert x.batch is not None
    first = call.axis(x.rank, -1)
    if not x.batch.is_extra and x.batch.axis >= first:
        raise Refused(f"normalizes over the axes from {first} on, among which the samples of a batch stand")
    if x.batch.axis > first:
        x = Operand(call.opening.placed(x, FIRST), x.shape, FIRST)
        assert x.batch is not None
    weights = [_beside(call, operand, x) for operand in call.operands[1:]]
    axis = first - x.rank
    return [(value, x.batch) for value in call.again(x.value, *weights, axis=axis)]


def over_axes(call: Call) -> Result:
    x = call.operand()
    axes = [axis % x.rank for axis in call.attribute("axes", None) or (0, 2, 3)]
    return call.again(x.value, axes=reduced(x, axes))[0], x.batch


def _beside(call: Call, weight: Operand | None, x: Operand) -> ir.Value | None:
    """A scale or bias, which is broadcast against what it is for: with an axis for the samples where it reaches past that."""
    assert x.batch is not None
    if weight is None:
        return None
    check_shape_stays(x, weight)
    missing = x.rank - weight.rank
    if not x.batch.is_extra or x.batch.axis <= missing:
        return weight.value
    return call.opening.unsqueezed(weight.value, x.batch.axis - missing)


def _at(axis: int) -> Batch:
    return Batch(axis, is_extra=False)


def recurrent(call: Call) -> list[Result | None]:
    """States and lengths that are the same for all samples are repeated for each, as the standard does not broadcast them."""
    call.same_for_all(0, 4, 5, 6)
    opening, batch_first = call.opening, bool(call.attribute("layout", 0))
    of_states = _at(0 if batch_first else 1)
    of_operands = {0: _at(0 if batch_first else 1), 4: _at(0), 5: of_states, 6: of_states}
    values = []
    for index, operand in enumerate(call.operands):
        batch = of_operands.get(index)
        if operand is None or batch is None:
            values.append(None if operand is None else operand.value)
            continue
        if operand.shape[batch.axis] != 1:
            raise Refused(f"gets {operand.shape[batch.axis]} sequences of one sample")
        values.append(opening.spread(operand, batch))
    of_results = (_at(0 if batch_first else 2), of_states, of_states)
    return list(zip(call.again(*values), of_results, strict=False))


MASK, PAST_KEY, LENGTHS = 3, 4, 6


def attention(call: Call) -> list[Result | None]:
    count = call.operand().shape[0]
    _know_results(call)
    values = [
        None if operand is None else _mask(call, operand, count) if index == MASK else _stacked(call, operand, count)
        for index, operand in enumerate(call.operands)
    ]
    results = call.again(*values)
    if not call.has(PAST_KEY):
        for index in (1, 2):
            if call.is_read(index):
                results[index].name = ""
                results[index] = _present(call, values[index], index)
    return [unstacked(call, value, count, index) if value.name != "" else None for index, value in enumerate(results)]


def _present(call: Call, value: ir.Value | None, index: int) -> ir.Value:
    """The keys or values without past ones, which are the operand by heads; inference has no type for the node's result."""
    if call.operand(index).rank == 4:
        return call.opening.emit("Identity", value)
    _, heads, _, size = _by_heads(call, index, "kv_num_heads")
    parts = [0, 0, heads if isinstance(heads, int) else -1, size if isinstance(size, int) else -1]
    apart = call.opening.emit("Reshape", value, call.opening.integers(parts))
    return call.opening.emit("Transpose", apart, perm=[0, 2, 1, 3])


def _know_results(call: Call) -> None:
    """Give further results their shapes, which the standard infers only where there are past keys."""
    query, key, value = (_by_heads(call, index, name) for index, name in enumerate(("q_num_heads", *["kv_num_heads"] * 2)))
    keys = key[2]
    if isinstance(keys, int) and isinstance(value[2], int) and keys != value[2]:
        raise Refused(f"has {keys} keys and {value[2]} values")
    if call.has(PAST_KEY):
        past = call.operand(PAST_KEY).shape[2]
        keys = keys + past if isinstance(keys, int) and isinstance(past, int) else None
    shapes = ((*key[:2], keys, key[3]), (*value[:2], keys, value[3]), (*query[:3], keys))
    for result, shape in zip(call.node.outputs[1:], shapes, strict=False):
        if result.shape is None:
            result.shape = ir.Shape(shape)


def _by_heads(call: Call, index: int, heads: str) -> Shape:
    """The shape [batch, heads, sequence, size] of an operand for one sample, which may have the heads in its last axis."""
    shape = call.operand(index).shape
    if len(shape) == 4:
        return shape
    batch, sequence, size = shape
    count = call.attribute(heads)
    return batch, count, sequence, size // count if isinstance(size, int) else None


def _stacked(call: Call, operand: Operand, count: Extent) -> ir.Value:
    if operand.rank == 0 or operand.shape[0] != count:
        raise Refused(f"reads '{operand.value.name}', which does not begin with an axis of {count} places")
    return stacked(call.opening, operand)


def _mask(call: Call, mask: Operand, count: Extent) -> ir.Value:
    """A mask, which is broadcast to the scores [batch, heads, queries, keys]."""
    if mask.batch is None and (mask.rank < 4 or mask.shape[0] == 1):
        return mask.value
    if mask.batch is not None and mask.rank < 4:
        shape = (*[1] * (4 - mask.rank), *mask.shape)
        mask = Operand(call.opening.placed(mask, FIRST, 4), shape, FIRST)
    return _stacked(call, mask, count)


def rotary_embedding(call: Call) -> Result:
    """With positions, the tables are the same for all samples; without, they have a row for each sample."""
    has_positions = call.has(3)
    if has_positions:
        call.same_for_all(0, 3)
    count = call.operand().shape[0]
    values = [
        operand.value if has_positions and index in (1, 2) else _stacked(call, operand, count)
        for index, operand in enumerate(call.present)
    ]
    return unstacked(call, call.again(*values)[0], count)


def class_loss(call: Call) -> list[Result | None]:
    """Without a reduction, each sample has its own loss. A sum or mean goes over all samples, and is refused."""
    call.same_for_all(0, 1)
    reduction = call.attribute("reduction", "mean")
    if reduction != "none":
        raise Refused(f"takes the {reduction} over all samples, and of a batch there is only one", LOSS_REMEDY)
    scores, labels = call.operand(0), call.operand(1)
    count = scores.shape[0]
    if labels.shape != (count, *scores.shape[2:]):
        raise Refused(f"has labels of the shape {labels.shape} for scores of the shape {scores.shape}")
    values = [stacked(call.opening, operand) for operand in (scores, labels)]
    results = call.again(*call.with_rest(*values))
    return [unstacked(call, value, count, index) if value.name != "" else None for index, value in enumerate(results)]

"""Operators that move elements, repeat them, leave some out or choose them by index."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, Rule, outcome
from burnish.importer.open_batch.opening import Count, Element, new_axis
from burnish.importer.open_batch.operands import FIRST, STACKED, Batch, Operand, Refused, Shape, elements

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


RULES: dict[str, Rule] = {
    "Reshape": reshape,
    "Flatten": flatten,
    "Transpose": transpose,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Expand": expand,
    "Tile": tile,
    "Concat": concat,
    "Split": split,
    "Slice": slice_,
    "Pad": pad,
    "CenterCropPad": center_crop_pad,
    "DFT": fourier_transform,
    **dict.fromkeys(("Trilu", "Det"), matrices),
    "ReverseSequence": reversed_sequence,
    "Gather": gather,
    **dict.fromkeys(("GatherElements", "ScatterElements"), by_element),
    "GatherND": gather_nd,
    "ScatterND": scatter_nd,
    "OneHot": one_hot,
    "GridSample": sampled_grid,
    "TensorScatter": tensor_scatter,
}

"""Reopen rules: standard operators applied to several samples in a model made for one; ``reopen`` in their records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from string import ascii_letters

import numpy as np
import onnx_ir as ir

from burnish.operators.axes import einsum_terms
from burnish.operators.axis_rules import LARGEST
from burnish.operators.reopening import (
    FIRST,
    STACKED,
    Batch,
    Call,
    Count,
    Element,
    Opening,
    Operand,
    Refused,
    Result,
    Shape,
    broadcast_extents,
    elements,
    outcome,
)


def unary(call: Call) -> list[Result | None]:
    x = call.alone()
    return [(value, x.batch) for value in call.again(*call.with_rest(x.value))]


def broadcast(call: Call) -> Result:
    values, batch, _ = aligned(call.opening, call.present)
    return call.again(*values)[0], batch


def prelu(call: Call) -> Result:
    """The slopes are broadcast to the first operand, never the reverse."""
    x, slopes = call.operand(0), call.operand(1)
    check_shape_stays(x, slopes)
    if x.batch is None:
        x = Operand(call.opening.spread(x, FIRST), x.shape, FIRST)
    values, batch, _ = aligned(call.opening, [x, slopes])
    return call.again(*values)[0], batch


def combined(opening: Opening, op_type: str, *operands: Operand) -> Operand:
    values, batch, shape = aligned(opening, operands)
    return Operand(opening.emit(op_type, *values), shape, batch)


def aligned(opening: Opening, operands: Sequence[Operand]) -> tuple[list[ir.Value], Batch | None, Shape]:
    """Return operands ready to be broadcast, the position of samples in the result, and its shape for one sample."""
    shape = broadcast_extents([operand.shape for operand in operands])
    rank = len(shape)
    batch = _common(operands, shape)
    values = []
    for operand in operands:
        missing = rank - operand.rank
        if batch is not None and operand.batch is not None:
            values.append(opening.placed(operand, batch, rank))
        elif batch is not None and batch.is_extra and batch.axis > missing:
            values.append(opening.unsqueezed(operand.value, batch.axis - missing))
        else:
            values.append(operand.value)
    return values, batch, shape


def check_shape_stays(x: Operand, beside: Operand) -> None:
    """Raise Refused if an operand that the standard broadcasts to the first would change its shape."""
    if broadcast_extents([x.shape, beside.shape]) != x.shape:
        raise Refused(f"broadcasts '{x.value.name}' to the shape of '{beside.value.name}', which the standard does not allow")


def _common(operands: Sequence[Operand], shape: Shape) -> Batch | None:
    """Return the position of samples in a result: at an axis of extent 1 in all operands, otherwise along an extra axis."""
    batches = [
        Batch(operand.batch.axis + len(shape) - operand.rank, operand.batch.is_extra)
        for operand in operands
        if operand.batch is not None
    ]
    for batch in batches:
        if not batch.is_extra and shape[batch.axis] == 1:
            return batch
    extra = [batch for batch in batches if batch.is_extra] or [Batch(batch.axis, is_extra=True) for batch in batches]
    return extra[0] if extra else None


def quantization(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    scale = call.operand(1)
    if scale.rank > 1:
        raise Refused("quantizes in blocks")
    return along_axis(call, 1) if scale.rank else unary(call)


OVER_SAMPLES = (
    "reduces over axis {axis}, in the place of which the samples of a batch stand: whether it means one sample or all of them "
    "cannot be told from a model of one"
)
LOSS_REMEDY = (
    "Where this is the model's own loss, export the model without it, and name the loss to burnish (loss=...); else export it "
    "with an open batch"
)


def reduction(call: Call) -> list[Result | None]:
    x = call.alone()
    named: Sequence[int] | None = call.named_axes()
    keeps = bool(call.attribute("keepdims", 1))
    if not named:
        if call.attribute("noop_with_empty_axes", 0):
            return unary(call)
        named = range(x.rank)
    along = reduced(x, sorted({axis % x.rank for axis in named}))
    if x.rank == 0:
        x, along, keeps = Operand(call.opening.unsqueezed(x.value, 1), (1,), x.batch), [1], False
    if "axes" in call.node.attributes:
        return call.over(x, axes=along, keepdims=int(keeps), noop_with_empty_axes=None)
    named_along = Operand(call.opening.integers(along), (len(along),))
    return call.over(x, named_along, keepdims=int(keeps), noop_with_empty_axes=None)


def reduced(x: Operand, axes: list[int]) -> list[int]:
    """Return the axes to reduce, counted with the samples."""
    if not x.samples.is_extra and x.samples.axis in axes:
        raise Refused(OVER_SAMPLES.format(axis=x.samples.axis), LOSS_REMEDY)
    return [x.new_axis(axis) for axis in axes]


def position(call: Call) -> list[Result | None]:
    x = call.operand()
    (axis,) = reduced(x, [call.axis(x.rank)])
    return call.over(x, axis=axis)


def along_axis(call: Call, default: int = -1) -> list[Result | None]:
    x = call.alone()
    return call.over(x, axis=x.new_axis(call.axis(x.rank, default)))


def running_sum(call: Call) -> list[Result | None]:
    x = call.alone()
    (axis,) = call.integers(1, "its axis")
    return call.over(x, Operand(call.opening.constant(np.asarray(x.new_axis(axis % x.rank), dtype=np.int64)), ()))


def shape(call: Call) -> Result:
    x = call.operand()
    start, end = call.attribute("start", 0), call.attribute("end", x.rank)
    return call.opening.vector(call.opening.extents(x)[start:end]), None


def size(call: Call) -> Result:
    opening = call.opening
    extents = opening.vector(opening.extents(call.operand()))
    return opening.emit("ReduceProd", extents, keepdims=0), None


def reshape(call: Call) -> Result:
    """Reshape to known extents: samples keep their place if the same number of elements comes before it."""
    x, opening, shape = call.alone(), call.opening, call.result_shape()
    parts: list[Element] = [extent for extent in shape if isinstance(extent, int)]
    if len(parts) < len(shape):
        return _to_computed(call)
    value, before = x.value, elements(x.shape[: x.samples.axis])
    batch = None if before is None else _as_many_before(x.samples, before, shape)
    if batch is None:
        value, batch = opening.placed(x, FIRST), Batch(0, is_extra=not shape or shape[0] != 1)
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
    """Reshape to partly computed extents: samples come first, so that a 0 still copies the right extent."""
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


def transpose(call: Call) -> list[Result | None]:
    x = call.operand()
    batch = x.samples
    order = [int(axis) for axis in call.attribute("perm", None) or range(x.rank)[::-1]]
    if not batch.is_extra:
        return call.over(x, perm=order)
    # Samples stay before the same axis, so that a stack of matrices stays one.
    at = 0 if batch.axis == 0 or not order else (order.index(batch.axis) if batch.axis < x.rank else x.rank)
    new = [x.new_axis(axis) for axis in order]
    new.insert(at, batch.axis)
    return call.over(x, perm=new)


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
    target = call.operand(1)
    length = target.shape[0] if target.shape else None
    if not isinstance(length, int):
        raise Refused("computes how many extents its result has")
    at = x.samples.axis + len(shape) - x.rank
    if not x.samples.is_extra and shape[at] == 1 and (call.array(1) is not None or at < len(shape) - length):
        return call.again(x.value, target.value)[0], Batch(at, is_extra=False)
    value = opening.placed(x, FIRST, len(shape))
    ones = [1] * (len(shape) - length + 1)
    return call.again(value, opening.vector([*ones, *_elements(call)]))[0], FIRST


def _elements(call: Call) -> list[Element]:
    known = call.array(1)
    return [call.operand(1).value] if known is None else [int(number) for number in known]


def tile(call: Call) -> list[Result | None]:
    x, opening = call.alone(), call.opening
    known = call.array(1)
    if not x.samples.is_extra and known is not None and known[x.samples.axis] == 1:
        return call.over(x)
    return [(call.again(opening.placed(x, FIRST), opening.vector([1, *_elements(call)]))[0], FIRST)]


def concat(call: Call) -> Result:
    axis = call.axis(call.present[0].rank)
    batches = [operand.batch for operand in call.present if operand.batch is not None]
    in_place = [batch for batch in batches if not batch.is_extra and batch.axis != axis]
    batch = next(iter(in_place), None) or next((batch for batch in batches if batch.is_extra), FIRST)
    return call.spread(batch, axis=axis + (batch.is_extra and axis >= batch.axis))


def slice_(call: Call) -> Result:
    """A slice of the single place of one sample applies to every sample."""
    x, opening = call.alone(), call.opening
    count = call.operand(1).shape[0]
    if not isinstance(count, int):
        raise Refused("computes how many axes it slices")
    axes = call.integers(3, "its axes") if call.has(3) else list(range(count))
    axes = [axis % x.rank for axis in axes]
    remaining = [index for index, axis in enumerate(axes) if x.samples.is_extra or axis != x.samples.axis]
    if len(remaining) < len(axes) and call.result_shape()[x.samples.axis] != 1:
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
    new = opening.integers([x.new_axis(axes[position]) for position in remaining])
    return opening.emit("Slice", x.value, bounds[0], bounds[1], _like(call, new, bounds[0]), *bounds[2:]), x.batch


def _like(call: Call, axes: ir.Value, bounds: ir.Value) -> ir.Value:
    kind = bounds.dtype
    return axes if kind is None or kind == axes.dtype else call.opening.emit("Cast", axes, to=int(kind))


def pad(call: Call) -> Result:
    x, opening = call.alone(), call.opening
    pads, fill = call.operand(1), call.operand(2).value if call.has(2) else None
    known = call.array(1)
    axes = [axis % x.rank for axis in (call.integers(3, "its axes") if call.has(3) else range(x.rank))]
    if known is None:
        if not call.has(3) and not x.samples.is_extra:
            raise Refused("computes how far it pads along every axis, that of the samples among them")
        new = opening.integers([x.new_axis(axis) for axis in axes])
        return call.again(x.value, pads.value, fill, new)[0], x.batch
    sides = np.split(known.reshape(-1), 2)
    widths = {axis: (int(before), int(after)) for axis, before, after in zip(axes, *sides, strict=True) if before or after}
    if not x.samples.is_extra and x.samples.axis in widths:
        x = opening.moved(x)
    columns = np.zeros((2, x.rank + x.samples.is_extra), np.int64)
    for axis, width in widths.items():
        columns[:, x.new_axis(axis)] = width
    return call.again(x.value, opening.constant(columns.reshape(-1)), fill)[0], x.batch


def center_crop_pad(call: Call) -> Result:
    """The sizes are for some axes; the sample axis is excluded."""
    x = call.alone()
    named = call.attribute("axes")
    axes = list(range(x.rank)) if named is None else [axis % x.rank for axis in named]
    sizes = dict(zip(axes, call.integers(1, "its sizes"), strict=True))
    if not x.samples.is_extra and sizes.pop(x.samples.axis, 1) != 1:
        raise Refused("pads along the axis of the samples")
    new = [x.new_axis(axis) for axis in sizes]
    return call.again(x.value, call.opening.integers(list(sizes.values())), axes=new)[0], x.batch


def fourier_transform(call: Call) -> Result:
    """The axis is an operand since opset 20; the last axis has real and imaginary parts."""
    x, opening = call.alone(), call.opening
    if x.samples.axis == x.rank - 1 + x.samples.is_extra:
        x = opening.moved(x)
    length = call.operand(1).value if call.has(1) else None
    is_operand = opening.graph.opset_imports[""] >= 20
    axis = call.integers(2, "its axis")[0] if call.has(2) else int(call.attribute("axis", -2 if is_operand else 1))
    new = x.new_axis(axis % x.rank)
    if not is_operand:
        return call.again(x.value, length, axis=new)[0], x.batch
    return call.again(x.value, length, opening.constant(np.asarray(new, np.int64)))[0], x.batch


def matrices(call: Call) -> list[Result | None]:
    """These operators work on the matrices of the last two axes, so samples go first."""
    x = call.alone()
    return call.over(call.opening.moved(x) if x.samples.axis >= x.rank - 2 + x.samples.is_extra else x)


def reversed_sequence(call: Call) -> Result:
    """Samples replace its batch axis if that has extent 1; if one sample has several sequences, they come after its two axes."""
    call.same_for_all(0, 1)
    x, lengths, opening = call.operand(0), call.operand(1), call.opening
    along = Batch(call.axis(x.rank, 1, "batch_axis"), is_extra=False)
    if x.shape[along.axis] == 1:
        return call.again(opening.spread(x, along), opening.spread(lengths, STACKED))[0], along
    if lengths.batch is not None:
        raise Refused("reverses several sequences of a sample, each by a length of the sample's own")
    last = Batch(x.rank, is_extra=True)
    return call.again(opening.placed(x, last), lengths.value)[0], last


def gather(call: Call) -> Result | list[Result | None]:
    x, indices, opening = call.operand(0), call.operand(1), call.opening
    axis = call.axis(x.rank)
    if x.batch is None:
        return call.over(x, indices)
    if indices.batch is not None:
        return _of_each(call, x, indices, axis)
    if x.batch == Batch(axis, is_extra=False):
        known = call.array(1)
        if known is not None and known.ndim == 0 and int(known) in (0, -1):
            return opening.emit("Identity", x.value), Batch(axis, is_extra=True)
        x = opening.moved(x, Batch(axis, is_extra=True))
    return call.over(x, axis=x.new_axis(axis))


def _of_each(call: Call, x: Operand, indices: Operand, axis: int) -> Result:
    """Gather with each sample's own indices: the indexed axis comes after the sample axis."""
    opening = call.opening
    value = opening.placed(x, FIRST)
    if axis:
        value = opening.emit("Transpose", value, perm=[0, axis + 1, *(index + 1 for index in range(x.rank) if index != axis)])
    chosen = opening.emit("Unsqueeze", opening.placed(indices, FIRST), opening.integers([indices.rank + 1]))
    result = opening.emit("GatherND", value, chosen, batch_dims=1)
    if axis:
        # The axes are now: samples, those of the indices, those of the data without the indexed one.
        of_indices = range(1, indices.rank + 1)
        others = range(indices.rank + 1, indices.rank + x.rank)
        result = opening.emit("Transpose", result, perm=[0, *others[:axis], *of_indices, *others[axis:]])
    return result, FIRST


def by_element(call: Call) -> Result:
    operands = call.present
    axis = call.axis(operands[0].rank)
    taken = next(operand.samples for operand in operands if operand.batch is not None)
    singles = not taken.is_extra and taken.axis != axis and all(operand.shape[taken.axis] == 1 for operand in operands)
    batch = taken if singles else FIRST
    return call.spread(batch, axis=axis + batch.is_extra)


def gather_nd(call: Call) -> Result:
    return call.spread(FIRST, batch_dims=int(call.attribute("batch_dims", 0)) + 1)


def scatter_nd(call: Call) -> Result:
    """Samples go along the last axis, which indices shared by all samples do not split."""
    call.same_for_all(0, 2)
    opening, indices = call.opening, call.operand(1)
    data, updates = call.operand(0), call.operand(2)
    values = [opening.spread(operand, Batch(operand.rank, is_extra=True)) for operand in (data, updates)]
    return call.again(values[0], indices.value, values[1])[0], Batch(data.rank, is_extra=True)


def one_hot(call: Call) -> list[Result | None]:
    indices = call.alone()
    axis = call.axis(indices.rank + 1, -1)
    return call.over(indices, axis=axis + (indices.samples.is_extra and indices.samples.axis <= axis))


def tensor_scatter(call: Call) -> Result:
    """The first axis is the sample axis; each sample has a cache and a write position."""
    if any(operand.batch not in (None, STACKED) or operand.shape[0] != 1 for operand in call.present):
        raise Refused("writes to several caches of a sample")
    return call.spread(STACKED)


def matmul(call: Call) -> Result:
    return outcome(product(call.opening, call.operand(0), call.operand(1)))


def product(opening: Opening, a: Operand, b: Operand) -> Operand:
    """Emit the product of two operands, at least one of them with samples."""
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
    batch = _shared(a, b, shape)
    values = [opening.placed(operand, batch, rank) if batch and operand.batch else operand.value for operand in (a, b)]
    return Operand(opening.emit("MatMul", *values), shape, batch)


def _stays(x: Operand, other: Operand, shape: Shape, rows: bool) -> Batch | None:
    """Return the position of samples in the product if only one operand has them; None if they must move first."""
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
    """Return the axis before the matrices that can hold the samples of both, otherwise an extra one; None without samples."""
    for operand in (a, b):
        if operand.batch is not None and not operand.batch.is_extra:
            at = operand.batch.axis + len(shape) - operand.rank
            if at < len(shape) - 2 and shape[at] == 1:
                return Batch(at, is_extra=False)
    return None if a.batch is None and b.batch is None else FIRST


def gemm(call: Call) -> Result:
    opening = call.opening
    a, b, c = call.operand(0), call.operand(1), call.operand(2) if call.has(2) else None
    like, transposed = a.value, [bool(call.attribute(name, 0)) for name in ("transA", "transB")]
    if a.batch == Batch(int(transposed[0]), is_extra=False) and b.batch is None and (c is None or c.batch is None):
        return call.again(*call.with_rest())[0], STACKED

    def scaled(operand: Operand, name: str) -> Operand:
        number = float(call.attribute(name, 1.0))
        return operand if number == 1.0 else combined(opening, "Mul", operand, Operand(opening.scalar(number, like), ()))

    a, b = (_transposed(opening, each) if flips else each for each, flips in zip((a, b), transposed, strict=True))
    result = scaled(product(opening, a, b), "alpha")
    return outcome(result if c is None else combined(opening, "Add", result, scaled(c, "beta")))


def _transposed(opening: Opening, operand: Operand) -> Operand:
    shape = (operand.shape[1], operand.shape[0])
    if operand.batch is None:
        return Operand(opening.emit("Transpose", operand.value, perm=[1, 0]), shape)
    value = opening.placed(operand, FIRST)
    return Operand(opening.emit("Transpose", value, perm=[0, 2, 1]), shape, FIRST)


def einsum(call: Call) -> Result:
    """Add a letter for the samples, or none if they have the place of the same letter in every operand with samples."""
    equation = str(call.attribute("equation")).replace(" ", "")
    terms, result = einsum_terms(equation)
    operands = call.present
    if len(terms) != len(operands):
        raise Refused(f"has {len(operands)} operands for the equation '{equation}'")
    _check_letters(terms, operands)
    letter_of_samples = _kept_letter(terms, result, operands)
    if letter_of_samples is not None:
        return call.again(*(operand.value for operand in operands))[0], Batch(result.index(letter_of_samples), is_extra=False)
    letter = next((letter for letter in "bBnNzZ" + ascii_letters if letter not in equation), None)
    if letter is None:
        raise Refused(f"uses every letter in its equation '{equation}'")
    new_terms = [term if operand.batch is None else letter + term for term, operand in zip(terms, operands, strict=True)]
    values = [operand.value if operand.batch is None else call.opening.placed(operand, FIRST) for operand in operands]
    return call.again(*values, equation=f"{','.join(new_terms)}->{letter}{result}")[0], FIRST


def _check_letters(terms: list[str], operands: list[Operand]) -> None:
    """Raise Refused if a letter stands for axes of two extents: engines differ in broadcasting or refusing that."""
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


def images(call: Call, sampled: Sequence[int] = (0,), results: int = 1) -> list[Result | None]:
    """Put samples along the first axis of some operands, which all have the same number of images, and of some results."""
    call.same_for_all(*sampled)
    call.no_results_after(results)
    values = [
        operand if operand is None else stacked(call, operand) if index in sampled else operand.value
        for index, operand in enumerate(call.operands)
    ]
    return apart(call, call.again(*values)[:results])


def stacked(call: Call, operand: Operand) -> ir.Value:
    """Return samples along the first axis: unchanged if each is one image, otherwise all images of one after those of another.

    An operand that is the same for all samples is repeated for each.
    """
    opening, count = call.opening, call.operand().shape[:1]
    if not count:
        raise Refused("takes images, and gets a scalar")
    if operand.shape[:1] != count:
        raise Refused(f"reads '{operand.value.name}', which does not begin with an axis of {count[0]} places")
    if count == (1,):
        return opening.spread(operand, STACKED)
    value = opening.spread(operand, FIRST)
    rest = opening.extents(Operand(value, operand.shape, FIRST))[1:]
    if 0 in operand.shape:
        raise Refused("takes images without elements")
    return opening.emit("Reshape", value, opening.vector([-1, *rest]))


def unstacked(call: Call, result: ir.Value, index: int = 0) -> Result:
    count = call.operand().shape[0]
    if count == 1:
        return result, STACKED
    if not isinstance(count, int):
        raise Refused("takes images of which a sample has an unknown number")
    rest: list[Element] = [
        extent if isinstance(extent, int) else call.opening.extent(result, axis)
        for axis, extent in enumerate(call.result_shape(index)[1:], start=1)
    ]
    return call.opening.reshaped(result, [Count.SAMPLES, count, *rest]), FIRST


def apart(call: Call, results: Sequence[ir.Value]) -> list[Result | None]:
    """Undo ``stacked`` for results over images; None for one that the node does not have."""
    return [unstacked(call, value, index) if value.name != "" else None for index, value in enumerate(results)]


def affine_grid(call: Call) -> Result:
    value = stacked(call, call.alone())
    size = call.integers(1, "the size of its result")
    return unstacked(call, call.again(value, call.opening.vector([call.opening.extent(value, 0), *size[1:]]))[0])


def max_pool(call: Call) -> list[Result | None]:
    """The indices count through all images, and must start again with each sample."""
    values = call.again(stacked(call, call.operand()))
    results: list[Result | None] = [unstacked(call, values[0])]
    if call.is_read(1):
        indices, batch = unstacked(call, values[1], 1)
        rank = len(call.result_shape(1)) + (batch is not None and batch.is_extra)
        results.append((call.opening.emit("Sub", indices, _counted_before(call.opening, call.operand().shape, rank)), batch))
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
    """Return, for each sample, the number of elements in the samples before it; along the first of ``rank`` axes."""
    if not all(isinstance(extent, int) for extent in shape):
        raise Refused("counts positions of images whose extents are not known")
    size = math.prod(extent for extent in shape if isinstance(extent, int))
    bounds = [opening.constant(np.asarray(number, np.int64)) for number in (0, size)]
    end = opening.emit("Squeeze", opening.emit("Mul", opening.count, bounds[1]))
    numbers = opening.emit("Range", bounds[0], end, bounds[1])
    return opening.emit("Reshape", numbers, opening.integers([-1, *[1] * (rank - 1)]))


def resize(call: Call) -> Result:
    """Sizes include the 1 of one sample."""
    x, opening = call.alone(), call.opening
    if call.attribute("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        raise Refused("crops what it resizes")
    axes = call.attribute("axes")
    along = list(range(x.rank)) if axes is None else [axis % x.rank for axis in axes]
    operands = call.with_rest(stacked(call, x))
    if 0 in along and call.has(3):
        if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
            raise Refused("keeps the ratio of sizes, among which that of the batch would be")
        sizes = call.integers(3, "its sizes")
        if sizes[along.index(0)] != x.shape[0]:
            raise Refused("resizes along the axis of images")
        of_images: Element = Count.SAMPLES if x.shape[0] == 1 else opening.extent(operands[0], 0)  # type: ignore[arg-type]
        operands[3] = opening.vector([of_images if axis == 0 else size for axis, size in zip(along, sizes, strict=True)])
    elif 0 in along:
        scales = call.array(2)
        if scales is None or scales[along.index(0)] != 1:
            raise Refused("computes the scale along the axis of images")
    return unstacked(call, call.again(*operands)[0])


def last_axes(call: Call) -> list[Result | None]:
    x = call.alone()
    first = call.axis(x.rank, -1)
    if not x.samples.is_extra and x.samples.axis >= first:
        raise Refused(f"normalizes over the axes from {first} on, among which the samples of a batch stand")
    if x.samples.axis > first:
        x = call.opening.moved(x)
    weights = [_beside(call, operand, x) for operand in call.operands[1:]]
    return [(value, x.batch) for value in call.again(x.value, *weights, axis=first - x.rank)]


def over_axes(call: Call) -> list[Result | None]:
    x = call.operand()
    return call.over(x, axes=reduced(x, [axis % x.rank for axis in call.attribute("axes", None) or (0, 2, 3)]))


def _beside(call: Call, weight: Operand | None, x: Operand) -> ir.Value | None:
    """Return a scale or bias that broadcasts to ``x``: with an axis for the samples if it reaches beyond them."""
    if weight is None:
        return None
    check_shape_stays(x, weight)
    missing = x.rank - weight.rank
    if not x.samples.is_extra or x.samples.axis <= missing:
        return weight.value
    return call.opening.unsqueezed(weight.value, x.samples.axis - missing)


def recurrent(call: Call) -> list[Result | None]:
    """States and lengths that are the same for all samples are repeated, since the standard does not broadcast them."""
    call.same_for_all(0, 4, 5, 6)
    batch_first = bool(call.attribute("layout", 0))
    of_states, of_result = (STACKED, STACKED) if batch_first else (Batch(1, is_extra=False), Batch(2, is_extra=False))
    places, values = {0: of_states, 4: STACKED, 5: of_states, 6: of_states}, call.with_rest()
    for index, batch in places.items():
        if call.has(index):
            operand = call.operand(index)
            if operand.shape[batch.axis] != 1:
                raise Refused(f"gets {operand.shape[batch.axis]} sequences of one sample")
            values[index] = call.opening.spread(operand, batch)
    return list(zip(call.again(*values), (of_result, of_states, of_states), strict=False))


MASK, PAST_KEY = 3, 4


def attention(call: Call) -> list[Result | None]:
    _know_results(call)
    values = [
        None if operand is None else _mask(call, operand) if index == MASK else stacked(call, operand)
        for index, operand in enumerate(call.operands)
    ]
    results = call.again(*values)
    if not call.has(PAST_KEY):
        for index in (1, 2):
            if call.is_read(index):
                results[index].name = ""
                results[index] = _present(call, values[index], index)
    return apart(call, results)


def _present(call: Call, value: ir.Value | None, index: int) -> ir.Value:
    """Return the keys or values without past ones, by heads; inference has no type for the node's result."""
    if call.operand(index).rank == 4:
        return call.opening.emit("Identity", value)
    _, heads, _, size = _by_heads(call, index, "kv_num_heads")
    parts = [0, 0, heads if isinstance(heads, int) else -1, size if isinstance(size, int) else -1]
    apart = call.opening.emit("Reshape", value, call.opening.integers(parts))
    return call.opening.emit("Transpose", apart, perm=[0, 2, 1, 3])


def _know_results(call: Call) -> None:
    """Set the shapes of the other results, which the standard infers only with past keys."""
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
    """Return the shape [batch, heads, sequence, size] of an operand for one sample, which may have heads in its last axis."""
    shape = call.operand(index).shape
    if len(shape) == 4:
        return shape
    batch, sequence, size = shape
    count = call.attribute(heads)
    return batch, count, sequence, size // count if isinstance(size, int) else None


def _mask(call: Call, mask: Operand) -> ir.Value:
    if mask.batch is None and (mask.rank < 4 or mask.shape[0] == 1):
        return mask.value
    if mask.batch is not None and mask.rank < 4:
        shape = (*[1] * (4 - mask.rank), *mask.shape)
        mask = Operand(call.opening.placed(mask, FIRST, 4), shape, FIRST)
    return stacked(call, mask)


def rotary_embedding(call: Call) -> list[Result | None]:
    """With positions, the tables are the same for all samples; without, they have a row for each sample."""
    return images(call, (0, 3) if call.has(3) else (0, 1, 2))


def class_loss(call: Call) -> list[Result | None]:
    """Without a reduction, each sample has its own loss. A sum or mean goes over all samples, and is refused."""
    call.same_for_all(0, 1)
    reduction = call.attribute("reduction", "mean")
    if reduction != "none":
        raise Refused(f"takes the {reduction} over all samples, and of a batch there is only one", LOSS_REMEDY)
    scores, labels = call.operand(0).shape, call.operand(1).shape
    if labels != (scores[0], *scores[2:]):
        raise Refused(f"has labels of the shape {labels} for scores of the shape {scores}")
    return images(call, (0, 1), results=2)

"""Operators on each element, along axes (reductions, softmax, sums, choices), and on the shape of what holds samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, Rule
from burnish.importer.open_batch.opening import Opening
from burnish.importer.open_batch.operands import FIRST, Batch, Operand, Refused, Shape, broadcast_extents


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


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Bernoulli", "BitCast", "Cast", "Clip", "Dropout", "RandomNormalLike", "RandomUniformLike"), unary),
    "PRelu": prelu,
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), quantization),
    **dict.fromkeys((f"Reduce{name}" for name in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()), reduction),
    **dict.fromkeys(("ArgMax", "ArgMin"), position),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK"), along_axis),
    **dict.fromkeys(("CumProd", "CumSum"), running_sum),
    "Shape": shape,
    "Size": size,
}

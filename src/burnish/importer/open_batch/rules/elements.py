"""Operators that compute each element of the result from those at its place in the operands."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.opening import Opening
from burnish.importer.open_batch.operands import FIRST, Batch, Operand, Refused, Shape, broadcast_extents


@opens("Bernoulli", "BitCast", "Cast", "Clip", "Dropout", "RandomNormalLike", "RandomUniformLike")
def unary(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    return call.over(call.operand())


def broadcast(call: Call) -> Result:
    values, batch, _ = aligned(call.opening, call.present)
    return call.again(*values)[0], batch


@opens("PRelu")
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


@opens("QuantizeLinear", "DequantizeLinear")
def quantization(call: Call) -> list[Result | None]:
    call.same_for_all(0)
    x, scale = call.operand(0), call.operand(1)
    if scale.rank > 1:
        raise Refused("quantizes in blocks")
    return call.over(x) if scale.rank == 0 else call.over(x, axis=call.new_axis(call.axis(x.rank, 1)))

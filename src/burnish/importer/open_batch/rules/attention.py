"""Attention, and the positions that it reads."""

from __future__ import annotations

import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.operands import FIRST, Extent, Operand, Refused
from burnish.importer.open_batch.rules.images import stacked, unstacked

MASK, LENGTHS = 3, 6


@opens("Attention")
def attention(call: Call) -> list[Result | None]:
    count = call.operand().shape[0]
    values = [
        None if operand is None else _mask(call, operand, count) if index == MASK else _stacked(call, operand, count)
        for index, operand in enumerate(call.operands)
    ]
    results = call.again(*values)
    return [unstacked(call, value, count, index) if value.name != "" else None for index, value in enumerate(results)]


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


@opens("RotaryEmbedding")
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

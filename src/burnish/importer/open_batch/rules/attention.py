"""Attention, and the positions that it reads."""

from __future__ import annotations

import onnx_ir as ir

from burnish.importer.open_batch.call import Call, Result, opens
from burnish.importer.open_batch.operands import FIRST, Extent, Operand, Refused, Shape
from burnish.importer.open_batch.rules.images import stacked, unstacked

MASK, PAST_KEY, LENGTHS = 3, 4, 6


@opens("Attention")
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

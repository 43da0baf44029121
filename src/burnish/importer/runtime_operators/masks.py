"""What ONNX Runtime's attention layers add to their scores, in each form of their masks."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.graph import Tensor, same_dimension
from burnish.operators import Operation
from burnish.operators.attention_decomposition import as_bias, places, total, visible
from burnish.operators.positions import extent, known_rank

_INDEX = ir.DataType.INT64
_LOWEST_FILTER = -10000.0
"""What the runtime adds to the scores of keys that a mask excludes, unless a node says otherwise."""


def attention_bias(
    op: Operation, q: Tensor, k: Tensor, past: Tensor | None, mask: Tensor | None, added: Tensor | None
) -> Tensor | None:
    """The sum of what the node's mask, its direction and a bias of its own add to the scores.

    Args:
        op: the node.
        q: ``[batch, heads, queries, size]``.
        k: ``[batch, heads, keys, size]``, with what was kept from before.
        past: how many of the keys that is, int64 [1].
        mask: in any form that the node takes.
        added: what is added as it is, ``[batch, heads, queries, keys]`` or broadcast to it.
    """
    parts: list[Tensor] = []
    if mask is not None:
        allowed = _allowed(op, mask, q, k, past)
        parts.append(as_bias(allowed, q.dtype, op.attribute("mask_filter_value", _LOWEST_FILTER)))
    if op.attribute("unidirectional", 0):
        seen = visible(extent(q, 2), extent(k, 2), past, after=0)
        parts.append(as_bias(seen, q.dtype))
    if added is not None:
        parts.append(added)
    return total(parts)


def _allowed(op: Operation, mask: Tensor, q: Tensor, k: Tensor, past: Tensor | None) -> Tensor:
    """A mask as booleans that broadcast to ``[batch, heads, queries, keys]``.

    One axis: where the keys of each sample end, then, if there are more numbers, where they begin. Two: a number for each key.
    Three: for each query and key. Four: for each query and key of the longest sequence, of which the last queries are cut.
    """
    builder, rank = op.builder, known_rank(op, mask)
    queries, keys = extent(q, 2), extent(k, 2)
    if rank == 1:
        return _between_ends(mask, q, keys)
    marked = builder.op("Greater", mask, builder.scalar(0, mask)) if mask.dtype != ir.DataType.BOOL else mask
    if rank == 4:
        start = builder.integers([0]) if past is None else past
        marked = builder.op("Slice", marked, start, start + queries, builder.integers([2]))
        return builder.op("Slice", marked, builder.integers([0]), keys, builder.integers([3]))
    return builder.op("Unsqueeze", marked, builder.integers(_new_axes(rank)))


def _new_axes(rank: int) -> Sequence[int]:
    return (1, 2) if rank == 2 else (1,)


def _between_ends(mask: Tensor, q: Tensor, keys: Tensor) -> Tensor:
    builder, batch = mask.builder, extent(q, 0)
    place, numbers, inner = places(builder, keys), builder.cast(mask, _INDEX), builder.integers([1, 2, 3])
    if mask.shape is not None and q.shape is not None and same_dimension(mask.shape[0], q.shape[0]):
        return builder.op("Less", place, builder.op("Unsqueeze", numbers, inner))
    ends = builder.op("Slice", numbers, builder.integers([0]), batch, builder.integers([0]))
    before_end = builder.op("Less", place, builder.op("Unsqueeze", ends, inner))
    # Without second numbers, zeros stand where they would.
    zeros = builder.op("ConstantOfShape", batch, value=ir.tensor([0], dtype=_INDEX), dtype=_INDEX)
    begins = builder.op("Slice", builder.op("Concat", numbers, zeros, axis=0), batch, batch + batch, builder.integers([0]))
    return builder.op("And", before_end, builder.op("GreaterOrEqual", place, builder.op("Unsqueeze", begins, inner)))

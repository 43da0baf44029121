"""Attention with one projection of its input (``Attention``) or with queries, keys and values (``MultiHeadAttention``).

Also masks in several forms, and biases that depend on the distance between keys and queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from burnish.graph import Tensor, same_dimension
from burnish.importer.runtime_operators.registry import Results, is_read, rewrites, split
from burnish.operators import Operation
from burnish.operators.attention_decomposition import (
    Stage,
    as_bias,
    merge_heads,
    places,
    scaled_dot_product,
    split_heads,
    total,
    visible,
)
from burnish.operators.positions import extent, known_rank

_INDEX = ir.DataType.INT64
_LOWEST_FILTER = -10000.0
"""The runtime's default bias for the scores of masked keys."""


def attention_bias(
    op: Operation, q: Tensor, k: Tensor, past: Tensor | None, mask: Tensor | None, added: Tensor | None
) -> Tensor | None:
    """Return the sum of the biases from the node's mask, its direction and its own bias.

    Args:
        op: the node.
        q: ``[batch, heads, queries, size]``.
        k: ``[batch, heads, keys, size]``, including cached keys.
        past: number of cached keys, int64 [1].
        mask: mask in any form that the node accepts.
        added: additional bias, ``[batch, heads, queries, keys]`` or broadcast to it.
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
    """Return a mask as booleans that broadcast to ``[batch, heads, queries, keys]``.

    One axis: the end of each sample's keys, optionally followed by their starts. Two: a number per key. Three: per query and key.
    Four: per query and key of the longest sequence, from which the last queries are sliced.
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
    # zeros replace missing starts
    zeros = builder.op("ConstantOfShape", batch, value=ir.tensor([0], dtype=_INDEX), dtype=_INDEX)
    begins = builder.op("Slice", builder.op("Concat", numbers, zeros, axis=0), batch, batch + batch, builder.integers([0]))
    return builder.op("And", before_end, builder.op("GreaterOrEqual", place, builder.op("Unsqueeze", begins, inner)))


_PACKED = 5
"""Rank of packed queries, keys and values, or keys and values: ``[batch, sequence, heads, 3 or 2, size]``."""


@rewrites("Attention")
def attention(op: Operation) -> Results:
    """Rewrite ``Attention(x W + b)``, with the columns of queries, keys and values.

    Nodes with a shared cache buffer or a rotation stay.
    """
    if op.attribute("past_present_share_buffer", 0) or op.attribute("do_rotary", 0):
        return None
    return attended(op, op.input, op.required(1), op.optional(2), op.optional(3), op.optional(4), op.optional(5))


def attended(
    op: Operation,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    past: Tensor | None,
    scores_bias: Tensor | None = None,
) -> Results:
    """Return the outputs of an attention layer with one projection; None if the sizes of its parts are unknown."""
    builder, columns = op.builder, weight.dimension(1)
    if columns is None:
        return None
    heads = op.attribute("num_heads")
    projected = builder.op("MatMul", x, weight)
    projected = projected if bias is None else projected + bias
    sizes = list(op.attribute("qkv_hidden_sizes", ())) or [columns // 3] * 3
    q, k, v = (split_heads(part, heads) for part in split(projected, sizes, axis=2))
    length = None
    if past is not None:
        length = extent(past, 3)
        earlier = (builder.op("Squeeze", part, builder.integers([0])) for part in split(past, [1, 1], axis=0))
        k, v = (builder.op("Concat", before, now, axis=2) for before, now in zip(earlier, (k, v), strict=True))
    added = attention_bias(op, q, k, length, mask, scores_bias)
    y, _ = scaled_dot_product(q, k, v, scale=op.attribute("scale", 0.0) or None, bias=added)
    present = None
    if is_read(op, 1):
        present = builder.op("Concat", *(builder.op("Unsqueeze", part, builder.integers([0])) for part in (k, v)), axis=0)
    return merge_heads(y), present


@rewrites("MultiHeadAttention")
def multi_head_attention(op: Operation) -> Results:
    """Rewrite attention over separate projections, in each input format.

    Nodes with beams or a shared cache buffer stay.
    """
    builder = op.builder
    if op.optional(8) is not None or op.optional(9) is not None:
        return None
    q, k, v = _heads(op)
    past_key, past_value, length = op.optional(6), op.optional(7), None
    if past_key is not None and past_value is not None:
        length = extent(past_key, 2)
        k, v = builder.op("Concat", past_key, k, axis=2), builder.op("Concat", past_value, v, axis=2)
    added = attention_bias(op, q, k, length, op.optional(4), op.optional(5))
    stage = Stage.SCORES if is_read(op, 3) else None
    y, scores = scaled_dot_product(q, k, v, scale=op.attribute("scale", 0.0) or None, bias=added, stage=stage)
    return merge_heads(y), k, v, scores


def _heads(op: Operation) -> tuple[Tensor, Tensor, Tensor]:
    heads, query, key, value = op.attribute("num_heads"), op.input, op.optional(1), op.optional(2)
    if known_rank(op, query) == _PACKED:
        parts = _unpacked(query, 3)
        biases = _biases(op, [None] * 3)
    elif key is not None and known_rank(op, key) == _PACKED:
        parts = (split_heads(query, heads), *_unpacked(key, 2))
        biases = _biases(op, [query.dimension(-1)] * 3)
    else:
        assert key is not None
        assert value is not None
        parts = (split_heads(query, heads), *(x if known_rank(op, x) == 4 else split_heads(x, heads) for x in (key, value)))
        is_split = known_rank(op, key) == 4
        biases = _biases(
            op, [query.dimension(-1), None if is_split else key.dimension(-1), None if is_split else value.dimension(-1)]
        )
        biases = (biases[0], None, None) if is_split else biases
    biased = [part if bias is None else part + _per_head(bias, heads) for part, bias in zip(parts, biases, strict=True)]
    return biased[0], biased[1], biased[2]


def _unpacked(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Split ``[batch, sequence, heads, count, size]`` into ``count`` times ``[batch, heads, sequence, size]``."""
    builder = x.builder
    squeezed = (builder.op("Squeeze", part, builder.integers([3])) for part in split(x, [1] * count, axis=3))
    return tuple(builder.op("Transpose", part, perm=[0, 2, 1, 3]) for part in squeezed)


def _biases(op: Operation, sizes: list[int | None]) -> tuple[Tensor | None, ...]:
    bias = op.optional(3)
    if bias is None:
        return None, None, None
    known = [size for size in sizes if size is not None]
    width = bias.dimension(0)
    if len(known) < len(sizes) or sum(known) != width:
        if width is None:
            return op.builder.op("Split", bias, axis=0, num_outputs=3, outputs=3)
        known = [known[0], known[0], width - 2 * known[0]] if known else [width // 3] * 3
    return split(bias, known, axis=0)


def _per_head(bias: Tensor, heads: int) -> Tensor:
    """Reshape ``[heads * size]`` to ``[heads, 1, size]``."""
    return bias.builder.op("Reshape", bias, bias.builder.integers([heads, 1, -1]))


_INDEX, _FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


@rewrites("RelativePositionBias")
def relative_position_bias(op: Operation) -> Results:
    """Emit table rows by buckets of growing distance (T5), ``[1, heads, queries, keys]``.

    Half of the buckets hold one distance each; the others grow by a constant factor up to ``max_distance``.
    """
    builder, table = op.builder, op.input
    buckets, is_both = table.dimension(0), bool(op.attribute("is_bidirectional", 0))
    if buckets is None:
        return None
    query, key = (_places(op, index) for index in (1, 2))
    distance = builder.op("Unsqueeze", key, builder.integers([0])) - builder.op("Unsqueeze", query, builder.integers([1]))
    zero, first = builder.scalar(0, _INDEX), None
    if is_both:
        buckets //= 2
        first = builder.cast(builder.op("Greater", distance, zero), _INDEX) * buckets
        distance = builder.op("Abs", distance)
    else:
        distance = builder.op("Max", builder.op("Neg", distance), zero)
    exact = buckets // 2
    factor = (buckets - exact) / math.log(op.attribute("max_distance") / exact)
    ratio = builder.cast(builder.op("Max", distance, builder.scalar(1, _INDEX)), _FLOAT) / float(exact)
    far = builder.cast(builder.op("Log", ratio) * factor, _INDEX) + exact
    far = builder.op("Min", far, builder.scalar(buckets - 1, _INDEX))
    bucket = builder.op("Where", builder.op("Less", distance, builder.scalar(exact, _INDEX)), distance, far)
    rows = builder.op("Gather", table, bucket if first is None else bucket + first, axis=0)
    return builder.op("Unsqueeze", builder.op("Transpose", rows, perm=[2, 0, 1]), builder.integers([0]))


def _places(op: Operation, index: int) -> Tensor:
    builder = op.builder
    length = builder.op("Reshape", builder.cast(op.required(index), _INDEX), builder.integers([]))
    return builder.op("Range", builder.scalar(0, _INDEX), length, builder.scalar(1, _INDEX))


@rewrites("GatedRelativePositionBias")
def gated_relative_position_bias(op: Operation) -> Results:
    """Emit a position bias times a gate of each query (WavLM): ``g (r eco - 1) + 2``; packed sequences stay.

    Both gates are sigmoids of sums over halves of a projection of each head's query.
    """
    builder, heads = op.builder, op.attribute("num_heads")
    if op.optional(6) is not None:
        return None
    query = split_heads(op.input + op.required(1), heads)
    projected = builder.op("MatMul", query, op.required(3)) + op.required(4)
    halves = builder.op("Split", projected, axis=-1, num_outputs=2, outputs=2)
    first, second = (builder.op("Sigmoid", builder.op("ReduceSum", half, builder.integers([-1]), keepdims=1)) for half in halves)
    return (first * (second * op.required(5) - 1.0) + 2.0) * op.required(2)

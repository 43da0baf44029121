"""Decoder attention with heads that share keys and values (``GroupQueryAttention``), and rotary positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.importer.runtime_operators.registry import Results, held, is_read, rewrites, split
from burnish.operators import Operation
from burnish.operators.attention_decomposition import (
    Stage,
    as_bias,
    merge_heads,
    places,
    repeat_heads,
    rotate,
    scaled_dot_product,
    split_heads,
    total,
    visible,
)
from burnish.operators.positions import extent, joined, known_rank

_INDEX = ir.DataType.INT64
_QUANTIZED_INPUTS = 12
"""Index of the first input of an integer cache."""


@rewrites("RotaryEmbedding")
def rotary_embedding(op: Operation) -> Results:
    """Rewrite the rotation of ``[batch, sequence, heads * size]`` or ``[batch, heads, sequence, size]``.

    Positions are given per token, or for the first token. Packed sequences stay.
    """
    builder, x, positions, cosine, sine = op.builder, op.input, op.required(1), op.required(2), op.required(3)
    if op.attribute("is_packed_batching", 0):
        return None
    dimension, heads, half = op.attribute("rotary_embedding_dim", 0), op.attribute("num_heads", 0), cosine.dimension(1)
    in_one = known_rank(op, x) == 3
    if in_one and not heads:
        width = x.dimension(2)
        if width is None or half is None:
            return None
        heads = width // (2 * half)
    x = split_heads(x, heads) if in_one else x
    if known_rank(op, positions) == 1:
        positions = positions + places(builder, extent(x, 2))
        new_axes = [0, 1]
    else:
        new_axes = [1]
    cosine, sine = (
        builder.op("Unsqueeze", builder.op("Gather", held(table), positions, axis=0), builder.integers(new_axes))
        for table in (cosine, sine)
    )
    rotated = rotate(x, cosine, sine, interleaved=bool(op.attribute("interleaved", 0)), dimension=dimension)
    return merge_heads(rotated) if in_one else rotated


@dataclass(frozen=True)
class _Cache:
    """Number of cached keys before the queries: none, or per sample, int64 ``[batch, 1]``."""

    before: Tensor | None

    @property
    def offset(self) -> Tensor | None:
        if self.before is None:
            return None
        builder = self.before.builder
        return builder.op("Reshape", self.before, builder.integers([-1, 1, 1, 1]))


@rewrites("GroupQueryAttention")
def grouped_query_attention(op: Operation) -> Results:
    """Rewrite causal attention with rotation, a window, a cap on scores, a sink and a cache.

    The cache holds the keys of each sample at its start, with room for ``total_sequence_length``; with that many queries it is
    overwritten. Nodes with an integer cache stay.
    """
    if len(op.inputs) > _QUANTIZED_INPUTS and any(operand is not None for operand in op.inputs[_QUANTIZED_INPUTS:]):
        return None
    heads, kv_heads = op.attribute("num_heads"), op.attribute("kv_num_heads")
    q, k, v = _heads(op, heads, kv_heads)
    queries, past_key, past_value = extent(q, 2), op.optional(3), op.optional(4)
    cache = _Cache(_before(op, queries) if past_key is not None and past_key.dimension(2) != 0 else None)
    if op.attribute("do_rotary", 0):
        q, k = _rotated(op, (q, k), queries, cache)
    if cache.before is not None:
        assert past_key is not None
        assert past_value is not None
        k, v = (_with_past(op, earlier, new, cache.before) for earlier, new in ((past_key, k), (past_value, v)))
    window = op.attribute("local_window_size", -1)
    seen = visible(queries, extent(k, 2), cache.offset, before=window - 1 if window > 0 else None, after=0)
    added = op.optional(10)
    bias = total([as_bias(seen, q.dtype), *(() if added is None else (added,))])
    stages = {1: Stage.BIASED, 2: Stage.PROBABILITIES}
    y, stage = scaled_dot_product(
        q,
        repeat_heads(k, heads // kv_heads),
        repeat_heads(v, heads // kv_heads),
        scale=op.attribute("scale", 0.0) or None,
        bias=bias,
        softcap=op.attribute("softcap", 0.0),
        sink=_sink(op, q),
        stage=stages.get(op.attribute("qk_output", 0)) if is_read(op, 3) else None,
    )
    return merge_heads(y), k, v, stage


def _heads(op: Operation, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = op.input, op.optional(1), op.optional(2)
    if key is None or value is None:
        width = query.dimension(2)
        if width is None:
            parts = op.builder.op("Reshape", query, op.builder.integers([0, 0, heads + 2 * kv_heads, -1]))
            q, k, v = split(parts, [heads, kv_heads, kv_heads], axis=2)
            turned = [op.builder.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (q, k, v)]
            return turned[0], turned[1], turned[2]
        size = width // (heads + 2 * kv_heads)
        query, key, value = split(query, [heads * size, kv_heads * size, kv_heads * size], axis=2)
    return split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)


def _before(op: Operation, queries: Tensor) -> Tensor:
    """Return each sample's number of cached keys, int64 [batch, 1]; zero if there are as many queries as total keys."""
    builder = op.builder
    last, longest = (builder.cast(op.required(index), _INDEX) for index in (5, 6))
    lengths = builder.op("Reshape", last, builder.integers([-1, 1])) + 1
    is_first = builder.op("Equal", builder.op("Reshape", longest, builder.integers([1])), queries)
    return builder.op("Where", is_first, builder.integers([0]), lengths - queries)


def _rotated(op: Operation, heads: tuple[Tensor, Tensor], queries: Tensor, cache: _Cache) -> list[Tensor]:
    builder, positions = op.builder, op.optional(9)
    if positions is None:
        positions = places(builder, queries)
        positions = positions if cache.before is None else positions + cache.before
    angles = []
    for table in (op.required(7), op.required(8)):
        rows = builder.op("Gather", held(table), positions, axis=0)
        angles.append(builder.op("Unsqueeze", rows, builder.integers([1] if rows.rank == 3 else [0, 1])))
    half, is_interleaved = angles[0].dimension(-1), bool(op.attribute("rotary_interleaved", 0))
    dimension = 0 if half is None else 2 * half
    return [rotate(part, *angles, interleaved=is_interleaved, dimension=dimension) for part in heads]


def _with_past(op: Operation, earlier: Tensor, new: Tensor, before: Tensor) -> Tensor:
    builder = op.builder
    room, added = extent(earlier, 2), extent(new, 2)
    together = builder.op("Concat", earlier, new, axis=2)
    longest = builder.op("Reshape", builder.cast(op.required(6), _INDEX), builder.integers([1]))
    place = places(builder, builder.op("Max", longest, room))
    own = place + (room - before)
    source = builder.op("Where", builder.op("Less", place, before), place, builder.op("Min", own, room + added - 1))
    source, is_filled = (
        builder.op("Unsqueeze", each, builder.integers([1, 3])) for each in (source, builder.op("Less", place, before + added))
    )
    shape = joined(builder, [builder.integers([1]), extent(together, 1), builder.integers([1]), extent(together, 3)])
    gathered = builder.op("GatherElements", together, builder.op("Expand", source, shape), axis=2)
    gathered = builder.op("Where", is_filled, gathered, builder.scalar(0.0, gathered))
    if gathered.shape is not None and together.shape is not None:
        gathered.value.shape = ir.Shape([*together.shape.dims[:2], None, together.shape[3]])
    return gathered


def _sink(op: Operation, q: Tensor) -> Tensor | None:
    """Return the sink score: one per head, or 0 for a softmax that need not sum to 1."""
    builder, sinks = op.builder, op.optional(11)
    if sinks is not None:
        return builder.op("Reshape", sinks, builder.integers([1, -1, 1, 1]))
    return builder.constant(np.zeros((1, 1, 1, 1), q.dtype.numpy())) if op.attribute("smooth_softmax", 0) == 1 else None

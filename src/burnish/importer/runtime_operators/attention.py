"""Attention over one projection of its input (``Attention``), and over queries, keys and values (``MultiHeadAttention``)."""

from __future__ import annotations

from burnish.graph import Tensor
from burnish.importer.runtime_operators.masks import attention_bias
from burnish.importer.runtime_operators.registry import Results, is_read, rewrites, split
from burnish.operators import Operation
from burnish.operators.attention_decomposition import Stage, merge_heads, scaled_dot_product, split_heads
from burnish.operators.positions import extent, known_rank

_PACKED = 5
"""The rank of what holds queries, keys and values, or the last two: ``[batch, sequence, heads, 3 or 2, size]``."""


@rewrites("Attention")
def attention(op: Operation) -> Results:
    """``Attention(x W + b)``, whose columns are those of queries, keys and values.

    A cache that lies in one buffer with what is returned, and rotation inside of the node, stay.
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
    """What an attention layer over one projection returns; None where the sizes of its parts are not known."""
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
    """Attention over projections that stand before the node, in each of the ways in which it takes them.

    Beams and a cache that lies in one buffer with what is returned stay.
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
    """Queries, keys and values ``[batch, heads, sequence, size]``, with the bias of the projection added."""
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
    """``[batch, sequence, heads, count, size]`` to ``count`` times ``[batch, heads, sequence, size]``."""
    builder = x.builder
    squeezed = (builder.op("Squeeze", part, builder.integers([3])) for part in split(x, [1] * count, axis=3))
    return tuple(builder.op("Transpose", part, perm=[0, 2, 1, 3]) for part in squeezed)


def _biases(op: Operation, sizes: list[int | None]) -> tuple[Tensor | None, ...]:
    """The parts of the bias that belong to queries, keys and values; thirds where their sizes are not known."""
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
    """``[heads * size]`` to ``[heads, 1, size]``."""
    return bias.builder.op("Reshape", bias, bias.builder.integers([heads, 1, -1]))

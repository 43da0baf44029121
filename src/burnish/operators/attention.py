"""The standard's attention layer and rotary position embedding, in the pieces that a gradient follows from."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Tensor, operator_version, same_dimension
from burnish.operators.attention_pieces import (
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
from burnish.operators.registry import Operation, training_form

STAGE_OUTPUT = 3
"""The position of the optional output with what is computed of the scores."""

PADDED_MASKS = 24
"""The version from which on a mask may be of fewer keys than there are; the others are left out."""


@training_form("Attention", since=23)
def attention(op: Operation) -> tuple[Tensor | None, ...]:
    """ONNX Attention-23 to -25: masks, windows, groups of queries on one key, a cap of the scores, a cache."""
    builder, q, k, v = op.builder, op.required(0), op.required(1), op.required(2)
    in_one = known_rank(op, q) == 3
    if in_one:
        q_heads, kv_heads = op.attribute("q_num_heads"), op.attribute("kv_num_heads")
        q, k, v = split_heads(q, q_heads), split_heads(k, kv_heads), split_heads(v, kv_heads)
    past_key, past_value = op.optional(4), op.optional(5)
    if past_key is not None and past_value is not None:
        k = builder.op("Concat", past_key, k, axis=2)
        v = builder.op("Concat", past_value, v, axis=2)
    bias, may_exclude_all = _bias(op, q, k, past_key)
    repeats = _repeats(op, q, k)
    precision = op.attribute("softmax_precision")
    mode = op.attribute("qk_matmul_output_mode", 0)
    y, scores = scaled_dot_product(
        q,
        repeat_heads(k, repeats, q),
        repeat_heads(v, repeats, q),
        scale=op.attribute("scale"),
        bias=bias,
        may_exclude_all=may_exclude_all,
        softcap=op.attribute("softcap", 0.0),
        softmax_dtype=None if precision is None else ir.DataType(precision),
        stage=Stage(mode) if len(op.outputs) > STAGE_OUTPUT else None,
    )
    return merge_heads(y) if in_one else y, k, v, scores


@training_form("RotaryEmbedding", since=23)
def rotary_embedding(op: Operation) -> Tensor:
    """ONNX RotaryEmbedding-23: angles by position, or given for each token."""
    builder, x, cosine, sine, positions = op.builder, op.required(0), op.required(1), op.required(2), op.optional(3)
    if positions is not None:
        cosine, sine = (builder.op("Gather", table, positions, axis=0) for table in (cosine, sine))
    in_one = known_rank(op, x) == 3
    heads = split_heads(x, op.attribute("num_heads")) if in_one else x
    cosine, sine = (builder.op("Unsqueeze", table, builder.integers([1])) for table in (cosine, sine))
    rotated = rotate(
        heads,
        cosine,
        sine,
        interleaved=bool(op.attribute("interleaved", 0)),
        dimension=op.attribute("rotary_embedding_dim", 0),
    )
    return merge_heads(rotated) if in_one else rotated


def _repeats(op: Operation, q: Tensor, k: Tensor) -> int | Tensor:
    """How many heads of queries share one of keys; an int64 [1] where the graph alone knows."""
    if q.shape is not None and k.shape is not None and same_dimension(q.shape[1], k.shape[1]):
        return 1
    q_heads, kv_heads = q.dimension(1), k.dimension(1)
    if q_heads is None or kv_heads is None:
        return extent(q, 1) / extent(k, 1)
    if q_heads % kv_heads:
        raise UnsupportedOperatorError(
            f"{op}: the query has {q_heads} heads and the key {kv_heads}, and the first is to be a multiple of the second; "
            "export the model again"
        )
    return q_heads // kv_heads


def _bias(op: Operation, q: Tensor, k: Tensor, past_key: Tensor | None) -> tuple[Tensor | None, bool]:
    """What is added to the scores, and whether it may leave a query no key at all."""
    builder, mask, lengths = op.builder, op.optional(3), op.optional(6)
    allowed: Tensor | None = None
    queries, keys = extent(q, 2), extent(k, 2)
    mask = None if mask is None else _of_all_keys(op, mask, k, keys)
    before, after = op.attribute("left_window_size", -1), op.attribute("right_window_size", -1)
    before, after = None if before < 0 else before, None if after < 0 else after
    after = 0 if op.attribute("is_causal", 0) else after
    if before is not None or after is not None:
        offset = None if past_key is None else extent(past_key, 2)
        if lengths is not None:
            offset = builder.op("Reshape", lengths, builder.integers([-1, 1, 1, 1])) - queries
        allowed = visible(queries, keys, offset, before, after)
    if lengths is not None:
        is_token = builder.op("Less", places(builder, keys), builder.op("Reshape", lengths, builder.integers([-1, 1, 1, 1])))
        allowed = is_token if allowed is None else builder.op("And", allowed, is_token)
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        allowed = mask if allowed is None else builder.op("And", mask, allowed)
        mask = None
    parts = [] if allowed is None else [as_bias(allowed, q.dtype)]
    parts += [] if mask is None else [builder.cast(mask, q.dtype)]
    # A causal mask leaves a query its own place at least; a window need not where there are fewer keys than queries.
    return total(parts), any(option is not None for option in (op.optional(3), lengths, before))


def _of_all_keys(op: Operation, mask: Tensor, k: Tensor, keys: Tensor) -> Tensor:
    """A mask over as many keys as there are."""
    builder = op.builder
    if (operator_version("Attention", builder.opset) or 0) < PADDED_MASKS:
        return mask
    if mask.shape is not None and k.shape is not None and same_dimension(mask.shape[-1], k.shape[2]):
        return mask
    mask = as_bias(mask, k.dtype) if mask.dtype == ir.DataType.BOOL else mask
    pads = joined(builder, [builder.integers([0]), keys - extent(mask, -1)])
    padded = builder.op("Pad", mask, pads, builder.scalar(-np.inf, mask), builder.integers([-1]))
    if padded.shape is not None and k.shape is not None:
        padded.value.shape = ir.Shape([*padded.shape.dims[:-1], k.shape[2]])
    return padded

"""The standard's attention and rotary position embedding, and ``burnish.Attention`` for recognized attention.

The standard's layer is decomposed for training, and its gradient follows from the parts. ``burnish.Attention`` is scaled
dot-product attention (Vaswani et al. 2017); a kernel need not keep its probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import Tensor, operator_version, same_dimension, unbroadcast
from burnish.operators import axis_rules, reopen_rules
from burnish.operators.activation import SOFTMAX_GRAD
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
from burnish.operators.registry import Operation, Operator
from burnish.operators.semantic import Operands, OutputType, SemanticOperator, like

STAGE_OUTPUT = 3
"""The position of the optional output with an intermediate stage of the scores."""

PADDED_MASKS = 24
"""From this version a mask may cover only the first keys; the other keys are excluded."""


def attention(op: Operation) -> tuple[Tensor | None, ...]:
    """ONNX Attention-23 to -25: masks, windows, grouped queries, a cap of the scores, a cache."""
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


def rotary_embedding(op: Operation) -> Tensor:
    """ONNX RotaryEmbedding-23: angles by position, or given per token."""
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
    """Return the number of query heads per key head; an int64 tensor [1] if known only at run time."""
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
    """Return the bias of the scores, and True if it may exclude all keys of a query."""
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
    # With a causal mask a query sees at least itself; with a window it may see no key if keys are fewer than queries.
    return total(parts), any(option is not None for option in (op.optional(3), lengths, before))


def _of_all_keys(op: Operation, mask: Tensor, k: Tensor, keys: Tensor) -> Tensor:
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


LAST_TWO = [0, 1, 3, 2]
"""A permutation that swaps the matrix axes of heads."""


def _result_types(operands: Operands) -> list[OutputType]:
    query = operands["query"]
    wide = ir.DataType.DOUBLE if query.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT

    def rows_of(columns: Tensor, dtype: ir.DataType) -> OutputType:
        if query.shape is None or columns.shape is None:
            return OutputType(dtype, None)
        return OutputType(dtype, ir.Shape([*query.shape.dims[:-1], columns.shape[-1]]))

    return [rows_of(operands["value"], query.dtype), rows_of(operands["key"], wide)]


class _Gradients(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor | None
    scores: Tensor


def lower_attention(op: Operation) -> tuple[Tensor, Tensor]:
    builder, query, mask = op.builder, op.required(0), op.optional(3)
    wide = op.outputs[1].dtype
    scores = _scaled(op, builder.cast(builder.op("MatMul", query, op.required(1), shape=op.outputs[1].shape), wide))
    if mask is not None:
        scores = builder.op("Add", scores, mask, like=op.outputs[1])
    probabilities = builder.op("Softmax", scores, axis=-1, like=op.outputs[1])
    if op.attribute("zeros"):
        probabilities = builder.op("Where", builder.op("IsNaN", probabilities), builder.scalar(0, wide), probabilities)
    return builder.op("MatMul", builder.cast(probabilities, query.dtype), op.required(2), like=op.output), probabilities


def attention_gradient(op: Operation, flow: Tensor | None, by_probabilities: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of attention: that of the mask equals that of the scores; readers of the probabilities add to it."""
    query, key, value, mask = (op.optional(index) for index in range(4))
    if flow is not None and by_probabilities is None and not op.wants(3):
        settings = {name: op.attribute(name) for name in ("factor", "divisor", "zeros")}
        return *ATTENTION_GRAD.emit(flow, query, key, value, mask, *op.outputs, **settings), None
    gradients = _gradients(op, flow, by_probabilities, op.inputs[:3], op.outputs[1])
    return gradients.query, gradients.key, gradients.value, None if mask is None else unbroadcast(gradients.scores, mask)


def lower_attention_grad(op: Operation) -> tuple[Tensor | None, ...]:
    return _gradients(op, op.required(0), None, op.inputs[1:4], op.required(6))[:3]


def _gradients(
    op: Operation, flow: Tensor | None, by_probabilities: Tensor | None, heads: tuple[Tensor | None, ...], p: Tensor
) -> _Gradients:
    """With P the probabilities and dY the flow: dV = P'dY, dP = dY V', dS = P(dP - Σ dP·P), dQ = dS K', dK = Q'dS."""
    query, key, value = (head for head in heads if head is not None)
    builder = op.builder
    d_value = None
    if flow is not None:
        d_value = builder.op("MatMul", _transposed(builder.cast(p, value.dtype)), flow, like=value)
        through_result = builder.cast(builder.op("MatMul", flow, _transposed(value)), p.dtype)
        by_probabilities = through_result if by_probabilities is None else by_probabilities + through_result
    assert by_probabilities is not None
    d_scores = SOFTMAX_GRAD(by_probabilities, p, axis=-1)
    d_product = builder.cast(_scaled(op, d_scores), query.dtype)
    d_query = builder.op("MatMul", d_product, _transposed(key), like=query)
    d_key = builder.op("MatMul", _transposed(query), d_product, like=key)
    return _Gradients(d_query, d_key, d_value, d_scores)


def _scaled(op: Operation, scores: Tensor) -> Tensor:
    """Multiply the scores or their gradient by the factor, or divide by the divisor: the model's number in all digits."""
    if op.attribute("factor") != 1.0:
        return scores * op.attribute("factor")
    return scores if op.attribute("divisor") == 1.0 else scores / op.attribute("divisor")


def _transposed(heads: Tensor) -> Tensor:
    return heads.builder.op("Transpose", heads, perm=LAST_TWO)


ATTENTION = SemanticOperator(
    "ScaledDotProductAttention",
    ("query", "key", "value", "mask"),
    ("result", "probabilities"),
    _result_types,
    gradient=attention_gradient,
    lowering=lower_attention,
)
"""softmax(query key * factor / divisor + mask) value, over heads.

Query [N, H, M, D], key [N, H, D, L] (already transposed) and value [N, H, L, E] have one dtype; mask is optional and broadcasts
to [N, H, M, L]. The result [N, H, M, E] has their dtype. The scores, the mask and the probabilities [N, H, M, L] are float32 if
the heads have 16 bits. Attributes: ``factor`` and ``divisor`` of the scores, one of them 1; ``zeros``: 1 if a query that sees
no key has zeros for its probabilities instead of NaN.
"""
ATTENTION_GRAD = SemanticOperator(
    "ScaledDotProductAttentionGrad",
    ("flow", "query", "key", "value", "mask", "result", "probabilities"),
    ("dquery", "dkey", "dvalue"),
    like("query", "key", "value"),
    lowering=lower_attention_grad,
)
"""The gradients for query, key and value, from that of the result; inputs and attributes as above."""

OPERATORS = [
    Operator(
        "Attention",
        since=23,
        training_form=attention,
        axes=axis_rules.attention,
        mixes=axis_rules.keys_axis,
        reopen=reopen_rules.attention,
    ),
    Operator(
        "RotaryEmbedding",
        since=23,
        training_form=rotary_embedding,
        axes=axis_rules.like_first,
        reopen=reopen_rules.rotary_embedding,
    ),
    ATTENTION,
    ATTENTION_GRAD,
]

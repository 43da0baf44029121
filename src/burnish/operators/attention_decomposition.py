"""Parts of attention layers: heads, the scaled dot product with a bias, and the keys that a query sees.

``softmax(q kᵀ * scale + bias) v`` (Vaswani et al. 2017) over heads ``[batch, heads, sequence, head size]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor
from burnish.operators.positions import INT64_MAX, extent, joined

INDEX = ir.DataType.INT64


class Stage(IntEnum):
    """A stage of the scores in attention, with the standard's numbers (``qk_matmul_output_mode``)."""

    SCORES = 0
    CAPPED = 1
    BIASED = 2
    PROBABILITIES = 3


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape ``[batch, sequence, heads * size]`` to ``[batch, heads, sequence, size]``."""
    builder, width = x.builder, x.dimension(-1)
    target = builder.integers([0, 0, heads, -1 if width is None else width // heads])
    return builder.op("Transpose", builder.op("Reshape", x, target), perm=[0, 2, 1, 3])


def merge_heads(x: Tensor) -> Tensor:
    """Reshape ``[batch, heads, sequence, size]`` to ``[batch, sequence, heads * size]``."""
    builder, heads, size = x.builder, x.dimension(1), x.dimension(3)
    width = -1 if heads is None or size is None else heads * size
    return builder.op("Reshape", builder.op("Transpose", x, perm=[0, 2, 1, 3]), builder.integers([0, 0, width]))


def repeat_heads(x: Tensor, repeats: int | Tensor, like: Tensor | None = None) -> Tensor:
    """Repeat each head: ``[batch, heads, sequence, size]`` to ``[batch, heads * repeats, sequence, size]``, copies adjacent.

    Args:
        x: the heads.
        repeats: number of copies; an int64 tensor [1] if known only at run time.
        like: a tensor with the heads of the result.
    """
    if isinstance(repeats, int) and repeats == 1:
        return x
    builder = x.builder
    times = builder.integers([repeats]) if isinstance(repeats, int) else repeats
    heads = extent(x, 1)
    heads = (
        heads * times
        if heads.array is None or times.array is None
        else builder.integers([int((heads.array * times.array).item())])
    )
    apart = builder.op("Unsqueeze", x, builder.integers([2]))
    repeated = builder.op("Expand", apart, joined(builder, [builder.integers([1, 1]), times, builder.integers([1, 1])]))
    shape = joined(builder, [extent(x, 0), heads, extent(x, 2), extent(x, 3)])
    result = builder.op("Reshape", repeated, shape, allowzero=1)
    if like is not None and like.shape is not None and x.shape is not None:
        result.value.shape = ir.Shape([x.shape[0], like.shape[1], *x.shape.dims[2:]])
    return result


def head_scale(q: Tensor) -> Tensor:
    """``1 / sqrt(head size)``, a scalar of the dtype of ``q``."""
    builder, size = q.builder, q.dimension(-1)
    if size is not None:
        return builder.scalar(1.0 / np.sqrt(size), q)
    root = builder.op("Sqrt", builder.cast(builder.op("Squeeze", extent(q, -1), builder.integers([0])), ir.DataType.FLOAT))
    return builder.cast(1.0 / root, q.dtype)


def places(builder: Builder, length: Tensor) -> Tensor:
    """0, 1, ... up to a length (int64 [1])."""
    if length.array is not None:
        return builder.integers(range(int(length.array.item())))
    zero, one = builder.scalar(0, INDEX), builder.scalar(1, INDEX)
    return builder.op("Range", zero, builder.op("Squeeze", length, builder.integers([0])), one)


def visible(
    queries: Tensor, keys: Tensor, offset: Tensor | None = None, before: int | None = None, after: int | None = None
) -> Tensor:
    """Emit the mask of visible keys, bool ``[..., queries, keys]``, from ``before`` places before the query to ``after`` after.

    Args:
        queries: number of queries, int64 [1].
        keys: number of keys, int64 [1].
        offset: number of keys before the first query, an int64 that broadcasts to ``[..., queries, 1]``; 0 by default.
        before: None for all.
        after: None for all; at least one of the two is a number. 0 is causal attention.
    """
    builder = queries.builder
    if queries.array is not None and keys.array is not None and (offset is None or offset.array is not None):
        shift = 0 if offset is None or offset.array is None else offset.array
        distance = np.arange(keys.array.item()) - np.arange(queries.array.item())[:, None] - shift
        seen = np.ones(distance.shape, bool) if before is None else distance >= -before
        return builder.constant(seen if after is None else seen & (distance <= after))
    place = builder.op("Unsqueeze", places(builder, queries), builder.integers([1]))
    place = place if offset is None else place + offset
    other = places(builder, keys)
    bounds = []
    if after is not None:
        bounds.append(builder.op("LessOrEqual", other, place + after if after else place))
    if before is not None:
        bounds.append(builder.op("GreaterOrEqual", other, place - before))
    return bounds[0] if len(bounds) == 1 else builder.op("And", *bounds)


def as_bias(allowed: Tensor, dtype: ir.DataType, excluded: float = -np.inf) -> Tensor:
    """Return 0 for true elements of a mask, otherwise ``excluded``."""
    builder = allowed.builder
    if allowed.array is not None:
        return builder.constant(np.where(allowed.array, 0.0, excluded).astype(dtype.numpy()))
    return builder.op("Where", allowed, builder.scalar(0.0, dtype), builder.scalar(excluded, dtype))


def total(tensors: Sequence[Tensor]) -> Tensor | None:
    result: Tensor | None = None
    for tensor in tensors:
        result = tensor if result is None else result + tensor
    return result


def scaled_dot_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    may_exclude_all: bool = False,
    softcap: float = 0.0,
    softmax_dtype: ir.DataType | None = None,
    sink: Tensor | None = None,
    stage: Stage | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Emit attention in the plain form ``q * scale``, MatMul, Add, Softmax, MatMul.

    Args:
        q: ``[batch, heads, queries, size]``.
        k: ``[batch, heads, keys, size]``.
        v: ``[batch, heads, keys, value size]``.
        scale: factor of the scores; ``1 / sqrt(size)`` by default.
        bias: added to the scores, broadcast to them.
        may_exclude_all: True if ``bias`` may be -inf for all keys of a query; the output of that query is 0.
        softcap: the scores become ``softcap * tanh(scores / softcap)``; 0 for no cap.
        softmax_dtype: dtype of the softmax; the dtype of the scores by default.
        sink: an extra score in the softmax without a value, broadcast to ``[batch, heads, queries, 1]``.
        stage: the stage to return with the output.

    Returns:
        The output ``[batch, heads, queries, value size]``, and the stage ``[batch, heads, queries, keys]`` or None.
    """
    builder = q.builder
    scaled = q * (head_scale(q) if scale is None else builder.scalar(scale, q))
    scores = builder.op("MatMul", scaled, builder.op("Transpose", k, perm=[0, 1, 3, 2]))
    capped = builder.op("Tanh", scores / softcap) * softcap if softcap else scores
    excluded = None
    if bias is not None and may_exclude_all:
        # A softmax over only -inf is NaN: such rows are computed without their bias, and set to zero afterwards.
        largest = builder.op("ReduceMax", bias, builder.integers([-1]), keepdims=1)
        excluded = builder.op("Equal", largest, builder.scalar(-np.inf, bias))
        bias = builder.op("Where", excluded, builder.scalar(0.0, bias), bias)
    biased = capped if bias is None else capped + bias
    wide = builder.cast(biased, softmax_dtype or biased.dtype)
    probabilities = builder.op("Softmax", wide, axis=-1) if sink is None else _softmax_with_sink(wide, sink)
    probabilities = builder.cast(probabilities, q.dtype)
    output = builder.op("MatMul", probabilities, v)
    if excluded is not None:
        output = _without(excluded, output, 0.0)
    if stage is None:
        return output, None
    result = (scores, capped, biased, probabilities)[stage]
    if excluded is not None and stage >= Stage.BIASED:
        result = _without(excluded, result, -np.inf if stage == Stage.BIASED else 0.0)
    return output, result


def _without(excluded: Tensor, tensor: Tensor, number: float) -> Tensor:
    """Replace the rows of queries that see no key with a number."""
    builder = tensor.builder
    return builder.op("Where", excluded, builder.scalar(number, tensor), tensor, like=tensor)


def _softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    builder = scores.builder
    column = builder.op("Slice", scores, builder.integers([0]), builder.integers([1]), builder.integers([-1]))
    column = builder.op("Expand", builder.cast(sink, scores.dtype), builder.op("Shape", column))
    together = builder.op("Softmax", builder.op("Concat", column, scores, axis=-1), axis=-1)
    return builder.op(
        "Slice", together, builder.integers([1]), builder.integers([INT64_MAX]), builder.integers([-1]), like=scores
    )


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool, dimension: int = 0) -> Tensor:
    """Emit the rotary position embedding of heads (Su et al. 2021).

    Args:
        x: ``[..., size]``.
        cosine: cosines of the angles, broadcast to ``[..., half]``, half of the rotated elements.
        sine: sines of the angles, likewise.
        interleaved: True to rotate neighbours together; otherwise elements of the first half with those of the second.
        dimension: number of leading elements to rotate; 0 for all.
    """
    builder, size = x.builder, x.dimension(-1)
    rest = None
    if dimension and dimension != size:
        ends = [builder.integers([0]), builder.integers([dimension]), builder.integers([INT64_MAX]), builder.integers([-1])]
        zero, middle, end, axis = ends
        rest = builder.op("Slice", x, middle, end, axis)
        x = builder.op("Slice", x, zero, middle, axis)
    whole = x
    if interleaved:
        half = cosine.dimension(-1)
        rank = x.rank or 0
        x = builder.op("Reshape", x, builder.integers([0] * (rank - 1) + [-1 if half is None else half, 2]))
        one, other = builder.op("Split", x, axis=-1, num_outputs=2, outputs=2)
        one, other = (builder.op("Squeeze", part, builder.integers([-1])) for part in (one, other))
    else:
        one, other = builder.op("Split", x, axis=-1, num_outputs=2, outputs=2)
    real, imaginary = one * cosine - other * sine, one * sine + other * cosine
    if interleaved:
        pairs = [builder.op("Unsqueeze", part, builder.integers([-1])) for part in (real, imaginary)]
        rotated = builder.op(
            "Reshape", builder.op("Concat", *pairs, axis=-1), builder.op("Shape", whole), allowzero=1, like=whole
        )
    else:
        rotated = builder.op("Concat", real, imaginary, axis=-1)
    return rotated if rest is None else builder.op("Concat", rotated, rest, axis=-1)
